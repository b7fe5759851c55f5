"""Own keeper: the keeper process of a daemon, which serves at `<server.socket>.keep`. Where there is none, one is started.

The daemon makes the listening socket and leaves it to the process: so it has the daemon's place and rights from the beginning,
and nobody waits for it. Who is at the other end is asked of the kernel. The connection lasts as long as the daemon's life: its
end is how the keeper knows of that.

Control thread only. Each call waits ANSWER_S at most, and `take_memory` BUSY_S for a daemon that is just ending.
"""

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Collection

from kvpool.clock import Deadline
from kvpool.ownership import fault_of_daemon, peer_of, user_name
from kvpool.server.keeping import keeper_process
from kvpool.server.keeping.keeper_place import why_it_may_end
from kvpool.tiers.dram.kept.keeper import FILES_MAX, KeeperFault

log = logging.getLogger(__name__)

SUFFIX = ".keep"
ANSWER_S = 5.0
BACKLOG = 4
BUSY_S = 5.0
LOOK_S = 0.02
# The variables that the process gets: they say where the interpreter's own libraries are.
_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONHOME")
_FD_BYTES = 4
_CREDENTIALS = struct.Struct("iII")
_ANCILLARY_BYTES = socket.CMSG_SPACE(FILES_MAX * _FD_BYTES) + socket.CMSG_SPACE(_CREDENTIALS.size)
_BLOCK_BYTES = 512  # of st_blocks
assert FILES_MAX == keeper_process.FILES_MAX


class KeeperGone(KeeperFault):
    """The process has ended."""


class KeeperBusy(KeeperFault):
    """The process serves another one."""


def _fault_of_other(path: str, uid: int) -> str:
    """That a keeper is another user's; empty where it is this one's."""
    if uid == os.geteuid():
        return ""
    owner = user_name(uid)
    return (
        f"the memory that is kept at {path} belongs to user {owner}: `kvpoolctl flush --all` as {owner} or root frees it, "
        "or the end of its process"
    )


class OwnKeeper:
    """The keeper process of one daemon's socket; see the module. Invariant: `pid` is 0 while there is no connection."""

    def __init__(
        self,
        socket_path: str,
        keep_s: float | None,
        busy_s: float = BUSY_S,
        *,
        fault_of_user: Callable[[str, int], str] = _fault_of_other,
    ) -> None:
        """`keep_s`: for how long it keeps memory without a daemon; None: as long as before; `busy_s`: how long the end of
        another one's connection is waited for. `fault_of_user`: why the user who serves at a path is not trusted; by default
        no other one is."""
        self._path = socket_path + SUFFIX
        self._keep_s = keep_s
        self._busy_s = busy_s
        self._fault_of_user = fault_of_user
        self._connection: socket.socket | None = None
        self._sender = 0  # of the last answer, by the kernel; 0: it cannot be seen from here
        self._silent: socket.socket | None = None  # a connection that was not answered as it should
        self._may_start = True
        self._place: tuple[int, int] | None = None  # of its socket's file, when it was connected to
        self.pid = 0

    def __repr__(self) -> str:
        return f"<OwnKeeper {self.pid} at {self._path}>"

    @property
    def name(self) -> str:
        """What it is, with its process where there is one."""
        return f"kvpool-keeper (process {self.pid})" if self.pid else "kvpool-keeper"

    def why_it_may_end(self, *, is_restart: bool) -> str:
        """See `Keeper`."""
        del is_restart
        return self.why_unfound or why_it_may_end(self.pid)

    @property
    def why_unfound(self) -> str:
        """Why the next daemon would not find it, as a clause; empty where it would."""
        is_there = self._place is not None and self._place == _place_of(self._path)
        return "" if is_there else f"its socket {self._path} has gone, or is another one's"

    def take_memory(self) -> dict[str, int]:
        """See `Keeper`."""
        self._may_start = self._connection is None and not self._connect_in_time()
        if self._may_start:
            return {}
        answer, descriptors = self._ask("take")
        return dict(zip(answer[1:], descriptors, strict=True))

    def give_memory(self, name: str, descriptor: int) -> None:
        """See `Keeper`. A process is started where none was found, and not in the place of one that may have had files."""
        if self._connection is None and not (self._may_start and self._connect()):
            if not self._may_start:
                raise KeeperGone("it has ended")
            self._start()
            self._may_start = False
        self._ask(f"give {name}", descriptor)

    def drop_memory(self, names: Collection[str]) -> None:
        """See `Keeper`."""
        if names and (self._connection is not None or self._connect()):
            self._ask(" ".join(["drop", *names]))

    def forsake(self) -> bool:
        """See `Keeper`. A process that does not answer ends as soon as it goes on; nobody finds it before."""
        if self._silent is not None:
            with contextlib.suppress(OSError):  # it has ended, or left this connection
                self._silent.setblocking(False)
                self._silent.send(b"hello 0")
        self.close()
        with contextlib.suppress(OSError):  # there is none, or another user's
            os.unlink(self._path)
        self._may_start = True
        return True

    @property
    def descriptor(self) -> int | None:
        """Of the connection, which is readable when the process has ended; None without one."""
        return None if self._connection is None else self._connection.fileno()

    def close(self) -> None:
        """Leave it: it ends where it has nothing, else after its time."""
        for connection in (self._connection, self._silent):
            if connection is not None:
                connection.close()
        self._connection, self._silent, self.pid = None, None, 0

    def _leave_silent(self) -> None:
        """Not connected any more, for `forsake` or `close`."""
        left, self._connection = self._connection, None
        self.close()
        self._silent = left

    def _connect_in_time(self) -> bool:
        """As `_connect`, but a connection that has not ended yet is waited for: of a daemon that has just left its socket."""
        deadline, never = Deadline(self._busy_s), threading.Event()
        while not deadline.has_passed():
            with contextlib.suppress(KeeperBusy):  # it is tried again
                return self._connect()
            never.wait(LOOK_S)
        return self._connect()

    def _connect(self) -> bool:
        """Connect to the process; False where there is none. Raises KeeperFault where another one is there."""
        self.close()
        connection = _new_connection()
        try:
            connection.connect(self._path)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return False
        except OSError as error:
            connection.close()
            reason = f"nobody can be reached at {self._path}: {error.strerror or 'it does not answer'}"
            raise KeeperFault(self._fault_of_owner() or reason) from error
        if fault := self._fault_of_user(self._path, peer_of(connection)[1]):
            connection.close()
            raise KeeperFault(fault)
        try:
            self._greet(connection)
        except KeeperGone:  # its time was over just now
            return False
        return True

    def _fault_of_owner(self) -> str:
        """That the socket is another user's; empty where it is not, or that is unknown."""
        try:
            return _fault_of_other(self._path, os.lstat(self._path).st_uid)
        except OSError:
            return ""

    def remove_place(self) -> None:
        """Remove the socket of a process that was killed. REQUIRES: nobody serves there, and no other daemon begins."""
        with contextlib.suppress(OSError):  # it is not there, or another user's
            os.unlink(self._path)

    def _greet(self, connection: socket.socket) -> None:
        """Be the one that is served. Raises KeeperFault."""
        self._connection = connection
        answer, _ = self._receive("its connection")
        if len(answer) != 1 or not answer[0].isdecimal():
            self.close()
            raise KeeperFault(f"{self._path} is served by something else")
        if not self._sender:
            self.close()
            raise KeeperFault(f"{self._path} is served by a process of another PID namespace")
        if self._keep_s is not None:
            self._ask(f"hello {int(self._keep_s)}")
        self._place = _place_of(self._path)
        self.pid = self._sender  # its own number is that of its own namespace

    def _start(self) -> None:
        """Start the process. Raises KeeperFault."""
        assert self._keep_s is not None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection = _new_connection()
        try:
            with listener:
                self.remove_place()
                listener.bind(self._path)
                os.chmod(self._path, 0o600)
                listener.listen(BACKLOG)
                connection.connect(self._path)  # answered as soon as the process runs
                started = subprocess.Popen(  # noqa: S603 - this interpreter and a file of this package
                    [sys.executable, "-I", "-S", keeper_process.__file__, str(int(self._keep_s))],
                    stdin=listener.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd="/",
                    env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
                )
            self._greet(connection)
            started.wait(ANSWER_S)  # it has left a child behind, which is nobody's
        except (OSError, subprocess.SubprocessError) as error:
            connection.close()
            raise KeeperFault(f"the keeper's process cannot be started at {self._path}: {error}") from error

    def _ask(self, request: str, descriptor: int | None = None) -> tuple[list[str], list[int]]:
        """The words of an answer, and its descriptors. Raises KeeperFault, and is not connected then."""
        assert self._connection is not None
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        try:
            self._connection.sendmsg([request.encode()], rights)
        except OSError as error:
            self.close()
            raise KeeperGone(f"it has gone: {error.strerror}") from error
        return self._receive(request.split()[0])

    def _receive(self, what: str) -> tuple[list[str], list[int]]:
        """As `_ask`, of an answer to what was asked."""
        assert self._connection is not None
        try:
            packet, ancillary, flags, _ = self._connection.recvmsg(
                keeper_process.PACKET_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            self.close()
            raise KeeperGone("it has ended") from error
        except OSError as error:
            self._leave_silent()
            raise KeeperFault(f"it does not answer {what}: {error.strerror or 'not in time'}") from error
        descriptors: list[int] = []
        for _, kind, data in ancillary:
            if kind == socket.SCM_CREDENTIALS:
                self._sender = _CREDENTIALS.unpack(data)[0]
            else:
                descriptors += [fd for (fd,) in struct.iter_unpack("i", data)]
        words = packet.decode("ascii", "replace").split()
        if words[:1] != ["ok"] or flags & socket.MSG_CTRUNC:
            for one in descriptors:
                with contextlib.suppress(OSError):
                    os.close(one)
            self.close()
            if not words:
                raise KeeperGone("it has ended")
            if words[:2] == ["no", "busy"]:
                raise KeeperBusy(f"it serves process {words[-1]}")
            raise KeeperFault(" ".join(words[1:]) if words[0] == "no" else "too few descriptors are left here")
        return words[1:], descriptors


def _place_of(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _new_connection() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    connection.settimeout(ANSWER_S)
    return connection


def drop_everything(socket_path: str) -> int | None:
    """Have the keeper process of a socket without a daemon drop what it has, and end; the bytes of memory that were in it. None
    where there is no such process. Raises KeeperFault. Root may do so for the users that a client trusts there."""
    keeper = OwnKeeper(socket_path, 0, fault_of_user=fault_of_daemon)
    try:
        found = keeper.take_memory()
        if not keeper.pid:
            return None
        kept_bytes = sum(os.fstat(descriptor).st_blocks * _BLOCK_BYTES for descriptor in found.values())
        for descriptor in found.values():
            os.close(descriptor)
        keeper.drop_memory(found)
    finally:
        keeper.close()
    return kept_bytes
