"""Keeper process: who is served, what it has, and when it ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.index.holders import Process, has_ended, process_of
from kvpool.ownership import DAEMON_UID_VARIABLE
from kvpool.server.keeping import keeper_process, own_keeper
from kvpool.server.keeping.keeper_place import why_it_may_end
from kvpool.server.keeping.keeper_process import PACKET_BYTES
from kvpool.server.keeping.own_keeper import SUFFIX, OwnKeeper
from kvpool.tiers.dram.kept.keeper import FILES_MAX, KeeperFault
from tests.rigs.daemon import wait_until

LONG_S = 3600
OTHER = 12345
RSS_KIB_MAX = 16 << 10
Keepers = Callable[..., OwnKeeper]


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[Keepers]:
    """Makes ends to the keeper of one socket; the process ends with the test."""
    made: list[OwnKeeper] = []

    def make(keep_s: float | None = LONG_S, busy_s: float = 60.0) -> OwnKeeper:
        made.append(OwnKeeper(str(tmp_path / "kvpool.sock"), keep_s, busy_s))
        return made[-1]

    yield make
    for keeper in made:
        keeper.close()
    last = OwnKeeper(str(tmp_path / "kvpool.sock"), 1)
    taken = last.take_memory()
    for descriptor in taken.values():
        os.close(descriptor)
    last.drop_memory(taken)
    last.close()


def _file(content: bytes) -> int:
    descriptor = os.memfd_create("kept")
    os.write(descriptor, content)
    return descriptor


def _contents(keeper: OwnKeeper) -> dict[str, bytes]:
    found = {}
    for name, descriptor in keeper.take_memory().items():
        found[name] = os.pread(descriptor, 100, 0)
        os.close(descriptor)
    return found


def _give(keeper: OwnKeeper, **files: bytes) -> None:
    for name, content in files.items():
        descriptor = _file(content)
        keeper.give_memory(name, descriptor)
        os.close(descriptor)


def _status(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)


def test_what_was_given_is_there_for_the_next_one(keepers: Keepers) -> None:
    first = keepers()
    assert first.take_memory() == {}
    assert first.pid == 0
    _give(first, arena=b"bytes", book=b"words")
    assert _contents(first) == {"arena": b"bytes", "book": b"words"}
    pid = first.pid
    first.close()
    second = keepers()
    assert _contents(second) == {"arena": b"bytes", "book": b"words"}
    assert second.pid == pid
    second.drop_memory(["book", "unknown"])
    assert _contents(second) == {"arena": b"bytes"}


def test_it_is_nobodys_child_and_takes_little(keepers: Keepers) -> None:
    keeper = keepers()
    _give(keeper, arena=b"x")
    status = _status(keeper.pid)
    assert status["Name"] == "kvpool-keeper"
    assert int(status["PPid"]) != os.getpid()
    assert os.getsid(keeper.pid) != os.getsid(0)
    assert os.getpgid(keeper.pid) not in (os.getpgid(0), keeper.pid)
    assert status["Threads"] == "1"
    assert int(status["VmRSS"].split()[0]) < RSS_KIB_MAX
    assert Path(f"/proc/{keeper.pid}/oom_score_adj").read_text() == "1000\n"
    assert set(os.listdir(f"/proc/{keeper.pid}/fd")) == {"0", "1", "2", "3", "4"}


def test_one_is_served_at_a_time(keepers: Keepers) -> None:
    first, second = keepers(), keepers(busy_s=0.0)
    _give(first, arena=b"x")
    with pytest.raises(KeeperFault, match=f"it serves process {os.getpid()}"):
        second.take_memory()
    assert _contents(first) == {"arena": b"x"}
    first.close()
    wait_until(lambda: _can_take(second), "the second one is served")


def test_one_that_has_not_left_yet_is_waited_for(keepers: Keepers) -> None:
    first, second = keepers(), keepers()
    _give(first, arena=b"x")
    threading.Timer(0.1, first.close).start()
    assert _contents(second) == {"arena": b"x"}


def _can_take(keeper: OwnKeeper) -> bool:
    try:
        return bool(_contents(keeper))
    except KeeperFault:
        return False


def test_it_ends_when_nobody_comes_back_in_time(keepers: Keepers) -> None:
    keeper = keepers(1)
    _give(keeper, arena=b"x")
    found = process_of(keeper.pid)
    assert not has_ended(found)
    keeper.close()
    assert has_ended(found, 60.0)
    assert keepers().take_memory() == {}


def test_it_ends_at_once_when_it_has_nothing(keepers: Keepers) -> None:
    keeper = keepers()
    _give(keeper, arena=b"x")
    found = process_of(keeper.pid)
    keeper.drop_memory(["arena"])
    keeper.close()
    assert has_ended(found, 60.0)


def test_a_killed_one_has_kept_nothing_and_another_is_started(keepers: Keepers) -> None:
    keeper = keepers()
    _give(keeper, arena=b"x")
    killed = process_of(keeper.pid)
    os.kill(killed.pid, signal.SIGKILL)
    assert has_ended(killed, 60.0)
    with pytest.raises(KeeperFault):
        keeper.take_memory()
    assert keeper.take_memory() == {}
    _give(keeper, arena=b"y")
    assert process_of(keeper.pid) != killed


def test_a_kill_of_the_daemon_while_it_gives_leaves_what_was_whole(keepers: Keepers, tmp_path: Path) -> None:
    code = """
import os, signal, sys
from kvpool.server.keeping.own_keeper import OwnKeeper
keeper = OwnKeeper(sys.argv[1], 3600)
for name in ("arena", "index"):
    keeper.give_memory(name, os.memfd_create(name))
keeper._connection.send(b"give boo")  # without its descriptor
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "kvpool.sock")]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    keeper = keepers()
    wait_until(lambda: _can_take(keeper), "the keeper has noticed")
    assert set(_contents(keeper)) == {"arena", "index"}


def test_it_has_bounds(keepers: Keepers) -> None:
    keeper = keepers()
    _give(keeper, **{f"file-{number}": b"x" for number in range(FILES_MAX)})
    with pytest.raises(KeeperFault, match=f"it has {FILES_MAX} files"):
        _give(keeper, further=b"x")
    assert len(_contents(keeper)) == FILES_MAX
    keeper.drop_memory([f"file-{number}" for number in range(1, FILES_MAX)])
    with pytest.raises(KeeperFault, match="one of this name"):
        _give(keeper, **{"file-0": b"y"})
    assert _contents(keeper) == {"file-0": b"x"}


@pytest.mark.parametrize(
    "packet",
    [b"nonsense", b"\xff\xfe", b"give", b"give a b", b"give name", b"hello -1", b"hello", b"x" * (PACKET_BYTES + 1)],
)
def test_what_it_does_not_know_is_refused_and_changes_nothing(keepers: Keepers, packet: bytes) -> None:
    keeper = keepers()
    _give(keeper, arena=b"x")
    assert keeper._connection is not None
    keeper._connection.send(packet)
    assert keeper._connection.recv(PACKET_BYTES).startswith(b"no ")
    assert _contents(keeper) == {"arena": b"x"}
    assert set(os.listdir(f"/proc/{keeper.pid}/fd")) == {"0", "1", "2", "3", "4"}


def test_descriptors_beyond_its_limit_are_not_kept_and_none_leaks(keepers: Keepers, tmp_path: Path) -> None:
    keeper = keepers()
    _give(keeper, arena=b"x")
    pid = keeper.pid
    subprocess.run(["prlimit", f"--pid={pid}", "--nofile=5:5"], check=True)
    with pytest.raises(KeeperFault, match="cannot take so many descriptors"):
        _give(keeper, book=b"y")
    assert set(_contents(keeper)) == {"arena"}
    keeper.close()
    assert set(_contents(keepers())) == {"arena"}


def test_another_users_socket_is_not_believed(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = keepers()
    _give(keeper, arena=b"x")
    keeper.close()
    monkeypatch.setattr(own_keeper, "peer_of", lambda _: (1, 12345, 1))
    with pytest.raises(KeeperFault, match="belongs to user 12345: `kvpoolctl flush --all` as 12345 or root frees it"):
        keepers().take_memory()
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user takes root")
def test_another_user_is_not_served(keepers: Keepers, tmp_path: Path) -> None:
    keeper = keepers()
    _give(keeper, arena=b"x")
    keeper.close()
    code = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.seteuid(12345)
connection.connect(sys.argv[1])
connection.settimeout(60)
print(connection.recv(1000).decode())
"""
    path = tmp_path / f"kvpool.sock{SUFFIX}"
    path.chmod(0o777)
    for folder in path.parents:  # pytest's own are closed to others
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    command = [sys.executable, "-c", code, str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "no it serves its own user and root alone" in shown.stdout, shown
    assert set(_contents(keepers())) == {"arena"}


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user takes root")
def test_root_may_drop_what_another_user_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{tmp_path}/kvpool.sock{SUFFIX}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    for one in (tmp_path, path):
        os.chown(one, OTHER, OTHER)
    child = os.fork()
    if child == 0:
        os.setuid(OTHER)
        listener.listen()
        keeper_process.Keeper(listener, LONG_S).run()
        os._exit(0)
    listener.close()
    try:
        owner = own_keeper.OwnKeeper(str(tmp_path / "kvpool.sock"), LONG_S, fault_of_user=lambda *_: "")
        wait_until(lambda: _takes(owner), "it listens")
        _give(owner, arena=b"x" * 5000)
        owner.close()
        with pytest.raises(KeeperFault, match=f"belongs to user {OTHER}: `kvpoolctl flush --all`"):
            OwnKeeper(str(tmp_path / "kvpool.sock"), LONG_S).take_memory()
        with pytest.raises(KeeperFault, match=f"if that is the daemon's user, set {DAEMON_UID_VARIABLE}={OTHER}"):
            own_keeper.drop_everything(str(tmp_path / "kvpool.sock"))  # anybody could have made its directory
        monkeypatch.setenv(DAEMON_UID_VARIABLE, str(OTHER))
        assert own_keeper.drop_everything(str(tmp_path / "kvpool.sock")) == 8192
        assert has_ended(Process(child), 60.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _takes(keeper: OwnKeeper) -> bool:
    with contextlib.suppress(KeeperFault):
        return keeper.take_memory() == {} and bool(keeper.pid)
    return False


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_its_file_goes_with_it(keepers: Keepers, tmp_path: Path, number: int) -> None:
    keeper, path = keepers(1), f"{tmp_path}/kvpool.sock{SUFFIX}"
    _give(keeper, arena=b"x")
    found = process_of(keeper.pid)
    assert os.path.lexists(path)
    if number:
        os.kill(found.pid, number)
    keeper.close()
    assert has_ended(found, 60.0)
    assert not os.path.lexists(path)


def test_a_file_that_another_one_has_put_there_stays(keepers: Keepers, tmp_path: Path) -> None:
    keeper, path = keepers(1), f"{tmp_path}/kvpool.sock{SUFFIX}"
    _give(keeper, arena=b"x")
    found = process_of(keeper.pid)
    os.rename(path, f"{path}.moved")
    other = keepers()
    _give(other, arena=b"y")
    keeper.close()
    assert has_ended(found, 60.0)
    assert os.path.lexists(path)
    other.close()
    assert _contents(keepers()) == {"arena": b"y"}


WITHIN = """
import os, sys
from kvpool.server.keeping.own_keeper import OwnKeeper
keeper = OwnKeeper(sys.argv[1], 600)
try:
    print(*keeper.take_memory())
    keeper.give_memory("arena", os.memfd_create("arena"))
    keeper.close()
    print("given", flush=True)
except Exception as error:
    print(error, flush=True)
input()
"""


@pytest.fixture
def within(tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    """A daemon's side of a keeper in a PID namespace of its own; skips where none may be made."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0 or subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no PID namespace may be made here")
    command = [*unshare, sys.executable, "-c", WITHIN, str(tmp_path / "kvpool.sock")]
    with contextlib.ExitStack() as stack:

        def start() -> "subprocess.Popen[str]":
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return stack.enter_context(process)

        yield start


def test_a_keeper_in_a_container_is_known_by_its_number_here(
    keepers: Keepers, within: Callable[[], "subprocess.Popen[str]"]
) -> None:
    process = within()
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["\n", "given\n"]
    keeper = keepers()
    assert set(_contents(keeper)) == {"arena"}
    assert Path(f"/proc/{keeper.pid}/comm").read_text() == "kvpool-keeper\n"
    assert why_it_may_end(keeper.pid) == "it is in a container, by its pid namespace"
    keeper.close()


def test_a_keeper_outside_of_the_container_is_nobodys_there(
    keepers: Keepers, within: Callable[[], "subprocess.Popen[str]"]
) -> None:
    keeper = keepers()
    _give(keeper, arena=b"x")
    assert keeper.pid
    assert Path(f"/proc/{keeper.pid}/comm").read_text() == "kvpool-keeper\n"
    keeper.close()
    process = within()
    assert process.stdout is not None
    assert "is served by a process of another PID namespace" in process.stdout.readline()
    assert set(_contents(keepers())) == {"arena"}


def test_a_file_in_its_place_is_no_keeper(keepers: Keepers, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / f"kvpool.sock{SUFFIX}"))
        other.listen()
        with pytest.raises(KeeperFault, match="nobody can be reached"):
            keepers().take_memory()
    Path(tmp_path / f"kvpool.sock{SUFFIX}").unlink()


def test_no_process_is_believed_to_run_that_was_never_there() -> None:
    assert has_ended(Process(1 << 22))


@pytest.mark.parametrize("is_greeted", [True, False])
def test_a_forsaken_process_is_found_by_nobody_and_ends_when_it_goes_on(
    keepers: Keepers, monkeypatch: pytest.MonkeyPatch, is_greeted: bool
) -> None:
    first, descriptor = keepers(), _file(b"old")
    first.give_memory("kvpool-arena", descriptor)
    process = process_of(first.pid)
    if not is_greeted:
        first.close()
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(own_keeper, "ANSWER_S", 0.1)
        if first._connection is not None:
            first._connection.settimeout(0.1)
        with pytest.raises(KeeperFault, match="does not answer"):
            first.take_memory()
    assert first.forsake()
    second = keepers()
    assert second.take_memory() == {}
    second.give_memory("kvpool-arena", descriptor)
    os.kill(process.pid, signal.SIGCONT)
    assert has_ended(process, 60.0)
    os.close(descriptor)
    second.close()
    taken = keepers().take_memory()
    assert list(taken) == ["kvpool-arena"]
    os.close(taken["kvpool-arena"])


def test_a_process_that_has_ended_is_not_replaced_in_the_middle_of_a_hand_over(keepers: Keepers) -> None:
    keeper, descriptor = keepers(), _file(b"new")
    keeper.give_memory("kvpool-arena", descriptor)
    process = process_of(keeper.pid)
    os.kill(process.pid, signal.SIGKILL)
    assert has_ended(process, 60.0)
    for _ in range(2):
        with pytest.raises(KeeperFault, match="it has "):
            keeper.give_memory("kvpool-index-1", descriptor)
    assert keeper.take_memory() == {}
    keeper.give_memory("kvpool-index-1", descriptor)
    assert keeper.pid not in (0, process.pid)
    os.close(descriptor)


def test_a_look_changes_no_time(keepers: Keepers) -> None:
    keeper, descriptor = keepers(1), _file(b"kept")
    keeper.give_memory("kvpool-arena", descriptor)
    process = process_of(keeper.pid)
    keeper.close()
    os.close(descriptor)
    look = keepers(None)
    taken = look.take_memory()
    look.close()
    assert list(taken) == ["kvpool-arena"]
    os.close(taken["kvpool-arena"])
    assert has_ended(process, 60.0)
