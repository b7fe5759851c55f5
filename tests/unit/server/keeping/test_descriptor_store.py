"""Descriptor store: what systemd is sent, and what a start takes from it."""

import array
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.server.health.systemd import ServiceManager
from kvpool.server.keeping import descriptor_store
from kvpool.server.keeping.descriptor_store import PROBE, DescriptorStore, has_store, take_passed
from kvpool.tiers.dram.kept.keeper import FILES_MAX, KeeperFault
from tests.rigs.storing_manager import StoringManager

PID = 4711


@pytest.fixture
def manager_socket(tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.settimeout(60)
        yield bound


def _receive(bound: socket.socket) -> tuple[list[str], list[int]]:
    message, ancillary, _, _ = bound.recvmsg(4096, socket.CMSG_SPACE(16))
    received = array.array("i")
    for _, _, data in ancillary:
        received.frombytes(data)
    return message.decode().splitlines(), list(received)


def _store(bound: socket.socket, **passed: int) -> DescriptorStore:
    return DescriptorStore(ServiceManager({"NOTIFY_SOCKET": bound.getsockname()}), passed)


def test_files_are_stored_by_name_and_never_polled(manager_socket: socket.socket) -> None:
    store, descriptor = _store(manager_socket), os.memfd_create("kept")
    store.give_memory("kvpool-book-7", descriptor)
    lines, descriptors = _receive(manager_socket)
    assert lines == ["FDSTORE=1", "FDNAME=kvpool-book-7", "FDPOLL=0"]
    assert [os.path.sameopenfile(one, descriptor) for one in descriptors] == [True]
    for one in (descriptor, *descriptors):
        os.close(one)


def test_what_is_dropped_is_free_when_the_call_returns(tmp_path: Path) -> None:
    with StoringManager(str(tmp_path / "notify")) as manager:
        store, descriptor = (
            DescriptorStore(ServiceManager({"NOTIFY_SOCKET": manager.address}), {}),
            os.memfd_create("kept"),
        )
        for name in ("kvpool-book-6", "kvpool-index-6", "kvpool-arena"):
            other = os.memfd_create("kept")
            store.give_memory(name, other)
            os.close(other)
        store.give_memory("kvpool-book-7", descriptor)
        os.close(descriptor)
        store.drop_memory(["kvpool-book-6", "kvpool-index-6", "unknown"])
        assert set(manager.stored) == {"kvpool-arena", "kvpool-book-7"}
        store.drop_memory([])
        manager.take()
        assert [line for lines in manager.received for line in lines if line.startswith("BARRIER")] == ["BARRIER=1"]


def test_a_manager_that_does_not_read_is_not_waited_for_for_long(
    manager_socket: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptor_store, "READ_S", 0.05)
    store = _store(manager_socket)
    store.drop_memory(["kvpool-book-6"])  # it is sent, and done sooner or later
    assert not store.has_room()
    assert not ServiceManager({"NOTIFY_SOCKET": manager_socket.getsockname()}).wait_read(0.05)
    passed = _store(manager_socket, **{"kvpool-arena": os.memfd_create("kept")})
    assert passed.has_room()  # what has given something back is believed
    for descriptor in passed.take_memory().values():
        os.close(descriptor)


@pytest.mark.parametrize("passed", [0, 1, FILES_MAX, FILES_MAX + 1])
def test_room_counts_with_what_was_passed_and_trying_leaves_nothing(tmp_path: Path, passed: int) -> None:
    for room, expected in ((FILES_MAX, True), (FILES_MAX - 1, passed >= FILES_MAX)):
        with StoringManager(str(tmp_path / "notify"), FILES_MAX + 1) as manager:
            sender = ServiceManager({"NOTIFY_SOCKET": manager.address})
            files = {f"kvpool-{number}": os.memfd_create("kept") for number in range(passed)}
            for name, descriptor in files.items():
                sender.store(name, descriptor)
            manager.take()
            manager.room = room
            before = set(os.listdir("/proc/self/fd"))
            assert DescriptorStore(sender, files).has_room() is expected
            manager.take()
            assert set(os.listdir("/proc/self/fd")) == before
            assert set(manager.stored) == set(files)
            for descriptor in files.values():
                os.close(descriptor)


def test_what_a_life_that_ended_while_it_tried_has_left_takes_no_room(tmp_path: Path) -> None:
    with StoringManager(str(tmp_path / "notify")) as manager:
        sender = ServiceManager({"NOTIFY_SOCKET": manager.address})
        left = os.memfd_create("kept")
        sender.store(PROBE, left)
        assert DescriptorStore(sender, {PROBE: left}).has_room()
        manager.take()
        assert manager.stored == {}
        os.close(left)


def test_what_was_passed_is_taken_once(manager_socket: socket.socket) -> None:
    descriptor = os.memfd_create("kept")
    store = _store(manager_socket, **{"kvpool-arena": descriptor})
    assert store.take_memory() == {"kvpool-arena": descriptor}
    assert store.take_memory() == {}
    os.close(descriptor)


def test_a_manager_that_is_away_keeps_nothing(tmp_path: Path) -> None:
    descriptor = os.memfd_create("kept")
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        store = DescriptorStore(ServiceManager(environment), {})
        with pytest.raises(KeeperFault, match="did not take"):
            store.give_memory("kvpool-arena", descriptor)
        with pytest.raises(KeeperFault, match="did not take"):
            store.drop_memory(["kvpool-arena"])
    os.close(descriptor)


def test_it_outlives_restarts_alone(manager_socket: socket.socket) -> None:
    store = _store(manager_socket)
    assert store.why_it_may_end(is_restart=True) == ""
    assert store.why_it_may_end(is_restart=False) == "it is no restart"


@pytest.mark.parametrize(
    ("room", "expected"),
    [("", False), ("0", False), (str(FILES_MAX - 1), False), (str(FILES_MAX), True), ("x9", False)],
)
def test_the_unit_has_to_allow_as_many_as_there_may_be(room: str, expected: bool) -> None:
    assert has_store({"FDSTORE": room}) is expected


def _in_child(count: int, environment: dict[str, str]) -> tuple[dict[str, int], set[int], dict[str, str]]:
    """What a process takes that was started with so many descriptors, those that it then has, and its environment."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write_end, 100)
        os.closerange(3, 100)
        for descriptor in range(3, 3 + count):
            os.dup2(0, descriptor)
        passed = take_passed(environment, PID)
        still = {one for one in range(3, 3 + count + 2) if _is_open(one)}
        inherited = {one for one in passed.values() if os.get_inheritable(one)}
        os.write(100, repr((passed, still, environment, inherited)).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    passed, still, left, inherited = eval(text)
    assert not inherited
    return passed, still, left


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _listen(count: int | str, names: str, pid: int = PID) -> dict[str, str]:
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names, "OTHER": "1"}


def test_passed_descriptors_are_taken_by_name() -> None:
    passed, still, left = _in_child(3, _listen(3, "kvpool-arena:kvpool-book-2:kvpool-index-2"))
    assert passed == {"kvpool-arena": 3, "kvpool-book-2": 4, "kvpool-index-2": 5}
    assert still == {3, 4, 5}
    assert left == {"OTHER": "1"}


def test_others_and_second_ones_of_a_name_are_closed() -> None:
    passed, still, _ = _in_child(4, _listen(4, "stored:kvpool-arena:kvpool-arena:x"))
    assert passed == {"kvpool-arena": 4}
    assert still == {4}


def test_those_without_a_name_are_closed() -> None:
    passed, still, _ = _in_child(3, _listen(3, "kvpool-arena"))
    assert passed == {"kvpool-arena": 3}
    assert still == {3}
    passed, still, _ = _in_child(2, _listen(2, ""))
    assert passed == {}
    assert still == set()


@pytest.mark.parametrize(
    "environment", [{}, _listen(2, "kvpool-arena:kvpool-book-2", PID + 1), _listen("two", "kvpool-arena:kvpool-book-2")]
)
def test_what_is_for_another_process_or_no_number_is_not_ours(environment: dict[str, str]) -> None:
    passed, still, left = _in_child(2, dict(environment))
    assert passed == {}
    assert still == {3, 4}
    assert not {name for name in left if name.startswith("LISTEN")}


def test_a_descriptor_that_is_not_there_is_none() -> None:
    passed, still, _ = _in_child(1, _listen(2, "kvpool-arena:kvpool-book-2"))
    assert passed == {"kvpool-arena": 3}
    assert still == {3}
