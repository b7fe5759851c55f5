"""Sets with keys that cannot be leased now: whatever has to wait, the others are leased."""

from pathlib import Path

import pytest

from kvpool.protocol.records import messages as m
from kvpool.states import Level, SaveState
from tests.hostile.rigs.raw_clients import engine, keys_of, store, write_and_commit
from tests.rigs.daemon import SMALL, Start, wait_until
from tests.rigs.dropping import drop_leases
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.reserve_requests import reserve_alone

CHUNKS = 40
KEYS = [keys_of(number, 1) for number in range(CHUNKS)]
WRITTEN = KEYS[0]  # that somebody else is just writing


@pytest.mark.parametrize("place", [0, 17, CHUNKS - 1])
def test_a_key_that_is_written_anew_here_keeps_no_other_one_on_disk(
    start_daemon: Start, tmp_path: Path, place: int
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    daemon.wait_open()
    with engine(daemon) as writer, engine(daemon) as reader, daemon.admin() as admin:
        for key in KEYS:
            store(writer, key)
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None, "dram")
        made = writer.call(reserve_alone(0, WRITTEN), m.Reserved)
        assert made.states == bytes([SaveState.RESERVED])
        keys = [*KEYS[1 : place + 1], WRITTEN, *KEYS[place + 1 :]]
        leased = reader.call(m.Acquire(b"".join(keys), set_of=1), m.Leased)
        assert [level == m.NO_LEVEL for level in leased.tiers] == [key == WRITTEN for key in keys]
        assert leased.chunks == CHUNKS - 1
        drop_leases(reader, leased.lease)
        assert write_and_commit(writer, WRITTEN, made) == bytes([SaveState.STORED])
        leased = reader.call(m.Acquire(b"".join(keys), set_of=1), m.Leased)
        assert leased.chunks == CHUNKS
        drop_leases(reader, leased.lease)
    assert daemon.problems() == []


def test_a_key_that_is_saved_here_keeps_no_other_one_of_another_node(tmp_path: Path) -> None:
    keys = b"".join(KEYS)
    with two_daemons(tmp_path) as (owner, here), engine(owner) as there, engine(here) as writer, engine(here) as reader:
        assert set(write_and_commit(there, keys, there.call(reserve_alone(0, keys), m.Reserved))) == {SaveState.STORED}
        wait_until(lambda: here.stats()["peer.known_chunks"] == CHUNKS, "the hints have come")
        assert writer.call(reserve_alone(0, WRITTEN), m.Reserved).states == bytes([SaveState.RESERVED])
        leased = reader.call(m.Acquire(keys, set_of=1), m.Leased)
        assert (leased.chunks, leased.tiers[0], set(leased.tiers[1:])) == (CHUNKS - 1, m.NO_LEVEL, {Level.DRAM})


def test_what_has_no_room_is_left_out_and_the_room_is_used(start_daemon: Start, tmp_path: Path) -> None:
    room = 24
    options = {"dram__capacity": f"{room * SMALL.chunk_bytes}B", "dram__connection_quota": "1.0"}
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", **options)
    daemon.wait_open()
    with engine(daemon) as writer, engine(daemon) as reader, daemon.admin() as admin:
        for key in KEYS:
            store(writer, key)
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None, "dram")
        pinned = reader.call(m.Acquire(b"".join(KEYS[:6]), set_of=1), m.Leased)
        assert pinned.chunks == 6
        leased = reader.call(m.Acquire(b"".join(KEYS[6:]), set_of=1), m.Leased)
        assert leased.chunks == room - pinned.chunks
        drop_leases(reader, leased.lease, pinned.lease)
    assert daemon.problems() == []
