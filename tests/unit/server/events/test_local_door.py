"""Tests of a local door: closed by full turns or a flood, open again once nothing waits, whatever happens to the file."""

from pathlib import Path

from kvpool.clock import MonotonicClock
from kvpool.server.events.local_door import FULL_TURNS_MAX, LocalDoor


def test_a_door_closes_after_full_turns_and_opens_when_nothing_waits(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("a socket")
    door = LocalDoor(str(path), MonotonicClock())
    for _ in range(3):
        for _ in range(FULL_TURNS_MAX - 1):
            door.note_turn(is_full=True)
        door.note_turn(is_full=False)  # one after another, and not together
        assert door.is_open
        for _ in range(2 * FULL_TURNS_MAX):
            door.note_turn(is_full=True)
        assert not door.is_open
        assert not path.exists()
        door.note_turn(is_full=False)
        assert door.is_open
        assert path.read_text() == "a socket"
    door.close()
    door.close()
    assert not path.exists()
    door.open()
    door.open()
    assert path.read_text() == "a socket"


def test_a_file_that_has_gone_is_no_fault_of_the_door(tmp_path: Path) -> None:
    path = tmp_path / "events"
    door = LocalDoor(str(path), MonotonicClock())
    door.close()
    assert door.is_open
    path.write_text("a socket")
    door.close()
    (tmp_path / "events.closed").unlink()
    door.note_turn(is_full=False)
    assert not door.is_open
