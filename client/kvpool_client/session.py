"""One life of the connection to a daemon: the socket, the shared memory that came with it, the epoch.

A session ends once and for good: when the daemon goes, when an answer is late, when the Pool closes. A new daemon
means a new session. Memory stays mapped for as long as a running copy needs it, whatever becomes of the session.

Any thread may call it. Lock: `_lock` serialises round trips; it is never held while anything else is waited for.
An ended session writes no more: `end` stops running saves before it closes the socket, because the daemon reuses
reserved slots once the connection is gone.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

import kvpool_native
from kvpool import failpoint
from kvpool.errors import DaemonUnreachable, KVPoolError, ProtocolError, Refused
from kvpool.layout import Layout
from kvpool.protocol import messages as m
from kvpool.protocol import staging_messages as sm
from kvpool.protocol.blocking import BlockingConnection
from kvpool.types import EPOCH_BYTES

Answer = TypeVar("Answer")


class Stoppable(Protocol):
    """A save that can be ended; when `cancel` returns it writes no more."""

    def cancel(self) -> None:
        """End the save."""
        ...


class Session:
    """A handshaken connection with the arena and the index mapped.

    Invariant: once `is_alive` is False it stays so, and no native save job of this session runs.
    """

    def __init__(
        self, path: str, model: str, layout: Layout, timeout_s: float, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """`on_end` is called once, on the thread that ends the session. Raises KVPoolError or OSError: nothing is left."""
        self._on_end = on_end
        hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, model, layout.to_wire())
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._saves: weakref.WeakSet[Stoppable] = weakref.WeakSet()  # guarded by _lock
        self._is_alive = True
        self._connection = BlockingConnection(path, hello, timeout_s)  # guarded by _lock
        try:
            failpoint.reach("client.connect.after_welcome")
            self.welcome = self._connection.welcome
            self.arena, self.index = self._map()
        except BaseException:
            self._connection.close()
            raise

    def __repr__(self) -> str:
        return f"<Session {self.welcome.epoch.hex()[:8]} {'alive' if self.is_alive else 'ended'}>"

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be answered. False in a forked child."""
        return self._is_alive and os.getpid() == self._pid

    @property
    def epoch(self) -> bytes:
        """Which life of the daemon this is: 16 bytes."""
        return self.welcome.epoch

    def fileno(self) -> int:
        """The socket's descriptor, for waiting on its end; -1 when ended."""
        return self._connection.fileno()

    def call(self, request: object, answer: type[Answer], timeout_s: float | None = None) -> Answer:
        """One round trip. Raises DaemonUnreachable (the session has ended) or Refused (it goes on)."""
        return self._round_trip(lambda: self._connection.call(request, answer, timeout_s))

    def open_staging(self) -> kvpool_native.Mapping:
        """The connection's staging memory, mapped. One round trip. Raises DaemonUnreachable or Refused."""
        record, fd = self._round_trip(lambda: self._connection.call_for_descriptor(sm.OpenStaging(), sm.Staging))
        try:
            return kvpool_native.Mapping.attach(fd, record.staging_bytes, writable=True)
        except (ValueError, OSError, RuntimeError) as error:
            raise DaemonUnreachable(f"the daemon's staging memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def notify(self, record: object) -> bool:
        """Send a record that is never answered; whether it was sent. Waits for a round trip under way, for no answer."""
        with self._lock:
            if not self.is_alive:
                return False
            try:
                return self._connection.notify(record)
            except DaemonUnreachable:
                pass  # ended below: `end` takes the lock itself
        self.end()
        return False

    def adopt_save(self, run: Stoppable) -> bool:
        """Have `end` stop this save. False when the session has ended: then the caller stops it."""
        with self._lock:
            if not self._is_alive:
                return False
            self._saves.add(run)
            return True

    def end(self) -> None:
        """Stop running saves, then close the socket. Idempotent; any thread."""
        with self._lock:
            if not self._is_alive:
                return
            self._is_alive = False
            saves = list(self._saves)
        for run in saves:
            run.cancel()
        with self._lock:
            self._connection.close()
        self._on_end()

    def abandon_in_child(self) -> None:
        """In a forked child: let go of the parent's socket without a word. The mappings are not inherited."""
        self._is_alive = False
        fd = self._connection.fileno()
        if fd >= 0:
            os.close(fd)

    def _round_trip(self, call: Callable[[], Answer]) -> Answer:
        if not self.is_alive:
            raise DaemonUnreachable("the connection to the daemon has ended")
        try:
            with self._lock:
                return call()
        except Refused as error:
            if error.code == "protocol":
                self.end()
            raise
        except (DaemonUnreachable, ProtocolError) as error:
            self.end()
            raise DaemonUnreachable(str(error)) from error

    def _map(self) -> tuple[kvpool_native.Mapping, kvpool_native.IndexView]:
        if len(self.welcome.epoch) != EPOCH_BYTES:
            raise ProtocolError(f"epoch has {len(self.welcome.epoch)} bytes, expected {EPOCH_BYTES}")
        fds = self._connection.fds
        if len(fds) != 2:
            raise ProtocolError(f"the welcome came with {len(fds)} descriptors, expected 2")
        try:
            is_writable = not self.welcome.staging_bytes
            arena = kvpool_native.Mapping.attach(fds[0], self.welcome.arena_bytes, writable=is_writable)
            index = kvpool_native.Mapping.attach(fds[1], self.welcome.index_bytes, writable=False)
            return arena, kvpool_native.IndexView(index)
        except (ValueError, OSError, RuntimeError) as error:
            raise KVPoolError(f"the daemon's shared memory cannot be mapped: {error}") from error
        finally:
            while fds:
                os.close(fds.pop())
