"""Choice of a keeper: each kind where it outlives the daemon, and the reason where nobody does."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.config.config import load_config
from kvpool.index.holders import Process, has_ended
from kvpool.server.health.systemd import ServiceManager
from kvpool.server.keeping import own_keeper
from kvpool.server.keeping.choice import Choice, choose_keeper
from kvpool.server.keeping.own_keeper import SUFFIX, OwnKeeper
from kvpool.tiers.dram.kept.keeper import FILES_MAX
from tests.rigs.storing_manager import StoringManager

PID = 4711
STORE = {"FDSTORE": str(FILES_MAX)}


@pytest.fixture
def notify(tmp_path: Path) -> Iterator[StoringManager]:
    """The service manager's end."""
    with StoringManager(str(tmp_path / "notify")) as bound:
        yield bound


def _choose(
    tmp_path: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    manager: StoringManager | None = None,
    passed: dict[str, int] | None = None,
    pid: int = PID,
) -> Choice:
    server = load_config(None, [f"server.socket={tmp_path}/kvpool.sock", *(f"server.{one}" for one in options)]).server
    found = ServiceManager({} if manager is None else {"NOTIFY_SOCKET": manager.address})
    return choose_keeper(server, found, passed or {}, environment=environment or {}, pid=pid)


def test_a_unit_with_a_store_keeps_it(tmp_path: Path, notify: StoringManager) -> None:
    for mode in ("auto", "systemd"):
        choice = _choose(tmp_path, f"keep_memory={mode}", environment=STORE, manager=notify)
        assert choice.keeper is not None
        assert choice.keeper.name == "systemd"


def test_a_plain_process_has_a_keeper_of_its_own(tmp_path: Path) -> None:
    choice = _choose(tmp_path)
    assert choice.keeper is not None
    assert choice.keeper.name == "kvpool-keeper"


def test_it_may_be_wanted_under_a_unit_too(tmp_path: Path, notify: StoringManager) -> None:
    choice = _choose(tmp_path, "keep_memory=keeper", environment=STORE, manager=notify, pid=1)
    assert isinstance(choice.keeper, OwnKeeper)


@pytest.mark.parametrize(
    ("options", "environment", "has_manager", "pid", "reason"),
    [
        (["keep_memory=off"], STORE, True, PID, "server.keep_memory is off"),
        (["write_mode=copy"], STORE, True, PID, "server.write_mode is copy"),
        (["keep_memory=systemd"], {}, True, PID, "the service manager has no store"),
        (["keep_memory=systemd"], STORE, False, PID, "the service manager has no store"),
        ([], {}, True, PID, "the unit has no store"),
        ([], {"FDSTORE": str(FILES_MAX - 1)}, True, PID, "the unit has no store"),
        ([], {"SYSTEMD_EXEC_PID": str(PID)}, False, PID, "the unit has no store"),
        ([], {}, False, 1, "first process of a container"),
    ],
)
def test_nobody_keeps_it_for_a_reason(
    tmp_path: Path,
    notify: StoringManager,
    options: list[str],
    environment: dict[str, str],
    has_manager: bool,
    pid: int,
    reason: str,
) -> None:
    choice = _choose(tmp_path, *options, environment=environment, manager=notify if has_manager else None, pid=pid)
    assert choice.keeper is None
    assert reason in choice.why_nobody


def test_a_shell_below_a_unit_is_no_unit(tmp_path: Path) -> None:
    assert _choose(tmp_path, environment={"SYSTEMD_EXEC_PID": str(PID + 1)}).keeper is not None


def test_what_systemd_has_is_dropped_where_it_is_not_used(tmp_path: Path, notify: StoringManager) -> None:
    descriptor = os.memfd_create("kept")
    _choose(tmp_path, "keep_memory=off", environment=STORE, manager=notify, passed={"kvpool-arena": descriptor})
    assert notify.received == [["FDSTOREREMOVE=1", "FDNAME=kvpool-arena"], ["BARRIER=1"]]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_a_process_has_is_dropped_where_it_is_not_used(tmp_path: Path, notify: StoringManager) -> None:
    before = _choose(tmp_path).keeper
    assert isinstance(before, OwnKeeper)
    descriptor = os.memfd_create("kept")
    before.give_memory("kvpool-arena", descriptor)
    os.close(descriptor)
    before.close()
    _choose(tmp_path, environment=STORE, manager=notify)
    assert OwnKeeper(f"{tmp_path}/kvpool.sock", 1).take_memory() == {}


@pytest.mark.parametrize("room", [0, 1, FILES_MAX - 1])
def test_a_store_with_less_room_than_the_unit_says_is_none(tmp_path: Path, notify: StoringManager, room: int) -> None:
    notify.room = room
    for mode in ("auto", "systemd"):
        choice = _choose(tmp_path, f"keep_memory={mode}", environment=STORE, manager=notify)
        assert choice.keeper is None
        assert "store for it (FileDescriptorStoreMax=8" in choice.why_nobody
    notify.take()
    assert notify.stored == {}


def test_what_is_not_known_to_be_free_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _choose(tmp_path).keeper
    assert isinstance(before, OwnKeeper)
    descriptor = os.memfd_create("kept")
    before.give_memory("kvpool-arena", descriptor)
    os.close(descriptor)
    process = Process(before.pid)
    os.kill(process.pid, signal.SIGSTOP)
    before.close()
    try:
        with monkeypatch.context() as impatient:
            impatient.setattr(own_keeper, "ANSWER_S", 0.1)
            for option in ("keep_memory=off", "write_mode=copy"):
                caplog.clear()
                assert _choose(tmp_path, option).keeper is None
                assert [record.levelname for record in caplog.records] == ["WARNING"]
                assert (
                    "may still have memory of an earlier daemon, which its end frees: it does not answer" in caplog.text
                )
    finally:
        os.kill(process.pid, signal.SIGCONT)
    caplog.clear()
    assert _choose(tmp_path, "keep_memory=off").keeper is None
    assert caplog.records == []
    assert has_ended(process, 60.0)
    assert not os.path.lexists(f"{tmp_path}/kvpool.sock{SUFFIX}")


def test_nothing_is_left_of_a_keeper_that_was_killed(tmp_path: Path) -> None:
    before = _choose(tmp_path).keeper
    assert isinstance(before, OwnKeeper)
    descriptor = os.memfd_create("kept")
    before.give_memory("kvpool-arena", descriptor)
    os.close(descriptor)
    killed = Process(before.pid)
    os.kill(killed.pid, signal.SIGKILL)
    assert has_ended(killed, 60.0)
    before.close()
    assert os.path.lexists(f"{tmp_path}/kvpool.sock{SUFFIX}")
    _choose(tmp_path, "keep_memory=off")
    assert not os.path.lexists(f"{tmp_path}/kvpool.sock{SUFFIX}")
