"""Local socket: the unix socket of engines and operators. Binding, accepting, the handshake.

The socket is made under a temporary name and renamed once the daemon serves: a visible socket can be used. A stale socket is
replaced, a live one refuses the second daemon. The kernel identifies the peer (SO_PEERCRED), never a message. The daemon sends
descriptors and accepts none.

Control thread only. Bounds: peers beyond the limits are refused (see `roster`), `handshake_timeout_s` for the first frame.
"""

import asyncio
import errno
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvpool import failpoint
from kvpool.errors import ConfigError, LayoutMismatch, ProtocolError, Refused, SocketInUse
from kvpool.escaping import escaped
from kvpool.memory_limit import describe
from kvpool.ownership import fault_of_left, fault_of_other, fault_of_root, is_served, make_socket_directory, peer_of
from kvpool.protocol import frames, versions
from kvpool.protocol.records import messages as m
from kvpool.server.listeners import listens_at
from kvpool.server.lives import Life

log = logging.getLogger(__name__)

BACKLOG = 1024
# A layout of 64 groups whose formats have 256 bytes each is one of some 20 KiB.
HELLO_BYTES_MAX = 32 << 10
_SO_PEERGROUPS = 59  # Python has no name for it
_GROUPS_BYTES_MAX = 1024  # as much as Python asks the kernel for
_ACCEPT_PAUSE_S = 0.1
_ACCEPT_MAY_FAIL_WITH = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's credentials by the kernel, when it connected. `groups`: the supplementary ones, where they are known. `name`: by
    its own word, for people alone; escaped."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid} uid {self.uid}{f' ({self.name})' if self.name else ''}"


@dataclass(frozen=True, slots=True)
class AcceptedHello:
    """The answer to a hello: the welcome, which has the connection's number, and the descriptors to pass with it."""

    welcome: m.Welcome
    fds: tuple[int, ...]


class ConnectionSlots(Protocol):
    """Connections that may be open or in a handshake at a time."""

    def begin_handshake(self, peer: Peer) -> None:
        """Count a peer's connection from now on. Raises Refused."""

    def end_handshake(self, peer: Peer) -> None:
        """Count it no longer: its handshake has failed."""


# Decides on a hello (raises Refused); takes the socket over after the handshake.
Admit = Callable[[m.Hello, Peer], AcceptedHello]
Adopt = Callable[[socket.socket, m.Hello, Peer, m.Welcome], Coroutine[None, None, None]]
# Called with the peer, a code and the reason.
OnRefused = Callable[[Peer, str, str], None]


class LocalSocket:
    """The listening socket of one daemon.

    Invariant: while `_listener` is bound, `life` holds an exclusive lock on the file beside the socket, so that of two daemons
    started at once exactly one serves.
    """

    def __init__(self, path: str, *, mode: int, handshake_timeout_s: float, on_refused: OnRefused) -> None:
        """Claim the socket's path. `on_refused` is called for each handshake that was refused or failed.

        Raises SocketInUse, ConfigError (another user's directory) or OSError (an unusable one).
        """
        self._path = path
        self._mode = mode
        self.handshake_timeout_s = handshake_timeout_s
        self._on_refused = on_refused
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.refused_connections = 0
        # Another user could replace the socket, or could use nothing of what root leaves there.
        if fault := fault_of_root(path) or make_socket_directory(path):
            raise ConfigError([f"server.socket cannot be there: {fault}"])
        self.life = Life(_lock(path), _lock_path(path))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._bind()
        except BaseException:
            self._listener.close()
            self.life.end_life(is_clean=True)
            raise

    def start(
        self,
        admit: Admit,
        adopt: Adopt,
        slots: ConnectionSlots,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """Make the socket visible and accept. `adopt` takes over a connection with its slot.

        `on_failed` is called when accepting has failed for good.
        """
        self._listener.listen(BACKLOG)
        os.rename(bound_name(self._path), self._path)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(admit, adopt, slots, on_failed))

    def abandon(self) -> None:
        """Leave nothing behind: the process ends at once, by a signal and before it serves. No life has ended early."""
        for path in (bound_name(self._path), _lock_path(self._path)):
            Path(path).unlink(missing_ok=True)

    async def stop(self, *, is_clean: bool) -> None:
        """Stop accepting and remove the socket. `is_clean`: no life has ended early."""
        for task in [self._accepting, *self._handshakes]:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._listener.close()
        for path in (self._path, bound_name(self._path)):
            Path(path).unlink(missing_ok=True)
        self.life.end_life(is_clean=is_clean)

    def _bind(self) -> None:
        if _answers(self._path):
            raise SocketInUse(f"a daemon already serves {self._path}: stop it, or set server.socket to another path")
        if fault := fault_of_left(self._path):
            raise ConfigError([f"server.socket cannot be there: {fault}"])
        unpublished = bound_name(self._path)
        Path(unpublished).unlink(missing_ok=True)
        self._listener.bind(unpublished)
        os.chmod(unpublished, self._mode)

    async def _accept(
        self,
        admit: Admit,
        adopt: Adopt,
        slots: ConnectionSlots,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        is_pausing = False
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except (OSError, MemoryError) as error:
                # Out of descriptors or memory: open connections are served on, new ones wait in the backlog.
                if isinstance(error, OSError) and error.errno not in _ACCEPT_MAY_FAIL_WITH:
                    on_failed(error)
                    return
                if not is_pausing:
                    log.warning("accepting pauses: %s", describe(error))
                is_pausing = True
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            is_pausing = False
            try:
                peer = _identify(accepted)
            except OSError as error:
                log.info("an accepted connection had gone: %s", error)
                accepted.close()
                continue
            try:
                slots.begin_handshake(peer)
            except Refused as error:
                self._refuse_full(accepted, peer, error)
                continue
            task = loop.create_task(self._handshake(accepted, peer, slots=slots, admit=admit, adopt=adopt))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _refuse_full(self, accepted: socket.socket, peer: Peer, refusal: Refused) -> None:
        self.refused_connections += 1
        self._on_refused(peer, refusal.code, refusal.message)
        with accepted:
            try:
                accepted.send(m.encode(m.Failure(refusal.code, refusal.message), 0))
            except OSError as error:
                log.debug("a refused connection had gone: %s", error)

    async def _handshake(
        self, accepted: socket.socket, peer: Peer, *, slots: ConnectionSlots, admit: Admit, adopt: Adopt
    ) -> None:
        is_adopted = False
        try:
            try:
                hello = await asyncio.wait_for(_receive_hello(accepted), self.handshake_timeout_s)
                peer = replace(peer, name=_name_in(hello))
                versions.choose(hello.oldest, hello.version)
                admission = admit(hello, peer)
                version = versions.choose(hello.oldest, hello.version)
                sent = versions.encode_for(replace(admission.welcome, protocol=version), 0, version)
                failpoint.reach("daemon.handshake.before_welcome")
                # The first send on a fresh socket takes these few bytes whole.
                if socket.send_fds(accepted, [sent], list(admission.fds)) != len(sent):
                    raise ProtocolError("the welcome did not fit the socket's buffer")
            except BaseException:
                slots.end_handshake(peer)
                raise
            await adopt(accepted, hello, peer, admission.welcome)
            failpoint.reach("daemon.handshake.after_welcome")
            is_adopted = True
        except (Refused, LayoutMismatch, ProtocolError) as error:
            self._answer_refusal(accepted, peer, error)
        except (OSError, asyncio.TimeoutError) as error:
            self.refused_connections += 1
            self._on_refused(peer, "failed", str(error) or "no hello in time")
        finally:
            if not is_adopted:
                accepted.close()

    def _answer_refusal(self, accepted: socket.socket, peer: Peer, error: Exception) -> None:
        self.refused_connections += 1
        code = (
            error.code if isinstance(error, Refused) else "layout" if isinstance(error, LayoutMismatch) else "protocol"
        )
        reason = str(error).removeprefix(f"{code}: ")
        self._on_refused(peer, code, reason)
        try:
            accepted.send(m.encode(m.Failure(code, reason), 0))
        except OSError as gone:
            log.debug("a refused connection had gone: %s", gone)


async def _receive_hello(accepted: socket.socket) -> m.Hello:
    loop = asyncio.get_running_loop()
    buffer = b""
    needed = frames.LENGTH.size
    while len(buffer) < needed:
        data = await loop.sock_recv(accepted, needed - len(buffer))
        if not data:
            raise ProtocolError("the peer closed the connection before its hello")
        buffer += data
        if len(buffer) == frames.LENGTH.size == needed:
            (length,) = frames.LENGTH.unpack(buffer)
            if not 2 <= length <= HELLO_BYTES_MAX:
                raise ProtocolError(f"hello announces {length} bytes, expected 2..{HELLO_BYTES_MAX}")
            needed += length
    kind, _, values = frames.decode(buffer[frames.LENGTH.size :])
    if kind != m.Hello.KIND:
        raise ProtocolError(f"the first frame is of kind {kind}, expected a hello")
    hello = versions.decode_of_any(m.Hello, values)
    if hello.magic != m.MAGIC:
        raise ProtocolError("the hello does not carry the magic of kvpool")
    return hello


def _name_in(hello: m.Hello) -> str:
    """The name that a peer gives its connection, on one line. Raises Refused."""
    if len(hello.name) > m.CONNECTION_NAME_BYTES_MAX:
        raise Refused(
            "name", f"connection name has {len(hello.name)} bytes, expected at most {m.CONNECTION_NAME_BYTES_MAX}"
        )
    return escaped(hello.name.decode("utf-8", "replace"))


def _identify(accepted: socket.socket) -> Peer:
    pid, uid, gid = peer_of(accepted)
    return Peer(pid, uid, gid, _groups_of(accepted))


def _groups_of(accepted: socket.socket) -> tuple[int, ...]:
    try:
        packed = accepted.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    except OSError:  # a kernel before 4.13, or a process in more groups than that: none of them counts
        return ()
    return tuple(group for (group,) in struct.iter_unpack("I", packed))


def bound_name(path: str) -> str:
    """The name with which a daemon's socket is bound, and by which the kernel lists it, before it gets its own."""
    return f"{path}.new"


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def _lock(path: str) -> int:
    """The descriptor of the locked file beside the socket. Raises SocketInUse, ConfigError for another user's file, OSError."""
    name = _lock_path(path)
    while True:
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except PermissionError as error:
            raise ConfigError([f"server.socket cannot be there: {fault_of_other(name) or error}"]) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(name, fd):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise SocketInUse(f"a daemon already serves {path} (it holds {name})") from error
        os.close(fd)  # the last daemon has removed it meanwhile


def _is_at(name: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(name), os.fstat(fd))
    except FileNotFoundError:
        return False


def _answers(path: str) -> bool:
    """Whether something accepts connections at `path`. Raises SocketInUse if the path is something else's file."""
    if not os.path.lexists(path):
        return False
    if not Path(path).is_socket():
        raise SocketInUse(f"{path} exists and is no socket: move it away, or set server.socket to another path")
    try:
        return is_served(path)
    except PermissionError:
        return listens_at(bound_name(path))
    except OSError:  # it is there, and does not take our connection
        return True
