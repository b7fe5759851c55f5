"""Session: one connection to one daemon process, with its socket, its shared memory and its epoch.

A session ends once and for good: when the daemon ends, when an answer is late, or when the Pool closes. A new daemon means a
new session, mostly with the same arena. Memory stays mapped as long as a running copy needs it, even after the session has
ended.

Any thread may call it. `_turn` is held for a round trip, never while anything else is waited for: threads take turns, and
waiting for one counts against the caller's own time, up to TURN_FRACTION of it, so that a thread that gets its turn late still
leaves the daemon some time. A request that is not answered in time ends the session at once for all waiting threads. A request
without an answer never waits: it goes into `_outbox`, which is sent before the next request and as soon as the turn is free.
Lock: `_state` guards what `end` does once, and the running saves. An ended session writes nothing: `end` stops running saves
before the connection ends, because the daemon reuses reserved slots then. Only saves by copy are stopped after it: they write
to staging memory, and may be waiting for an answer.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import kvpool_native
from kvpool import failpoint
from kvpool.clock import Deadline
from kvpool.errors import DaemonUnreachable, KVPoolError, ProtocolError, Refused
from kvpool.ids import EPOCH_BYTES, PAGE_BYTES
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol import columns, versions
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool_client.connection.ended_connections import add_ended, ended_connections
from kvpool_client.connection.endings import Endings
from kvpool_client.connection.peer_pace import PeerPace, pace_in
from kvpool_client.connection.reserved_saves import ReservedSaves
from kvpool_client.connection.shared_arena import SharedArena

Answer = TypeVar("Answer")
# The longest part of a caller's time that it waits for other threads' requests.
TURN_FRACTION = 0.5
# Refusals after which the daemon reads nothing from the connection.
ENDING_CODES = ("protocol", "disconnected")
_NO_ANSWER = "what has no answer"


class Stoppable(Protocol):
    """A save that can be stopped; when `cancel` has returned, it writes nothing."""

    def cancel(self) -> None:
        """End the save."""
        ...


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Plan of a session: the daemon's socket, for which model and layout, and the longest time of a round trip. `name`: of
    the connection, for people."""

    path: str
    model: str
    layout: Layout
    timeout_s: float
    name: str = ""


class Session:
    """A handshaken connection with the arena and the index mapped.

    Invariant: once `is_alive` is False it stays so, and when `end` has returned no save of this session runs.
    """

    def __init__(
        self,
        plan: SessionPlan,
        on_end: Callable[[], None],
        *,
        endings: Endings,
        welcome_s: float,
        is_wanted: Callable[[], bool],
        former: "Session | None" = None,
    ) -> None:
        """`on_end` is called once, on the thread that ends the session. `endings`: of what its saves and leases leave.
        `welcome_s`: how long to wait for the daemon's welcome, while `is_wanted`. `former`: the Pool's last session, whose
        arena is used on where it is this daemon's too. Raises KVPoolError or OSError, and then leaves nothing open."""
        self.endings = endings
        self._on_end = on_end
        wire, name = plan.layout.to_wire(), plan.name.encode(errors="replace")
        self._path = plan.path
        ended = ended_connections(plan.path)
        hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, plan.model, wire, versions.OLDEST, name, ended)
        self._timeout_s = plan.timeout_s
        self._turn = threading.Lock()
        # Guarded by _turn: turns of requests, the request that has the turn (or _NO_ANSWER), and on which thread.
        self._turns = 0
        self._under_way: object = None
        self._thread = 0
        self._state = threading.Lock()
        self._saves: set[Stoppable] = set()  # guarded by _state; not weak: a collected one still writes
        self._has_ended = False  # guarded by _state
        self.is_alive = True  # whether requests can still be answered; written by the session alone
        self.shortcoming = ""  # what a new session lacks
        self.end_reason = ""  # why it has ended; set before `is_alive` is False
        self.reserved_saves = ReservedSaves()
        self._outbox: deque[bytes] = deque()  # any thread appends, the thread that has the turn removes
        # guarded by _turn, but for `hang_up`
        self._connection = BlockingConnection(
            plan.path, hello, plan.timeout_s, welcome_s=welcome_s, is_wanted=is_wanted
        )
        try:
            failpoint.reach("client.connect.after_welcome")
            self.welcome: m.Welcome = self._connection.welcome
            self.shared_arena: SharedArena
            self.shared_arena, self.index = self._map(None if former is None else former.shared_arena)
        except BaseException:
            self._connection.close()
            raise

    def __repr__(self) -> str:
        return f"<Session {self.welcome.epoch.hex()[:8]} {'alive' if self.is_alive else 'ended'}>"

    @property
    def epoch(self) -> bytes:
        """Id of the daemon process: 16 bytes."""
        return self.welcome.epoch

    @property
    def arena(self) -> kvpool_native.Mapping:
        """The daemon's arena."""
        return self.shared_arena.mapping

    def fileno(self) -> int:
        """The socket's descriptor, for waiting on its end; -1 when ended."""
        return self._connection.fileno()

    def call(
        self, request: object, answer: type[Answer], timeout_s: float | None = None, fds: list[int] | None = None
    ) -> Answer:
        """One round trip. Raises DaemonUnreachable (no answer in time: the session has ended, unless only other threads'
        requests took that long) or Refused (the session goes on). `fds`: as for a
        BlockingConnection."""
        left_s = self._timeout_s if timeout_s is None else timeout_s
        if not self._turn.acquire(blocking=False):
            left_s = self._wait_for_turn(left_s)
        if not self.is_alive:
            self._turn.release()
            raise DaemonUnreachable("the connection to the daemon has ended")
        self._turns += 1
        self._under_way, self._thread = request, threading.get_ident()
        fault = "a request was interrupted"
        try:
            if self._outbox:
                left_s = self._send_before(left_s)
            received = self._connection.call(request, answer, left_s, fds)
            fault = ""
        except Refused as error:
            fault = str(error) if error.code in ENDING_CODES else ""
            raise
        except (DaemonUnreachable, ProtocolError) as error:
            fault = str(error) or type(error).__name__
            raise DaemonUnreachable(fault) from error
        finally:
            self._under_way = None
            if fault:
                self._leave_broken(fault)
            else:
                self._turn.release()
        if self._outbox:
            self.send_waiting()
        return received

    @property
    def has_peers(self) -> bool:
        """Whether chunks may come from other nodes, and a request may name one."""
        return self._remote is not None

    def peer_pace(self, column: bytes, chunk: int) -> PeerPace | None:
        """How long chunks of the node take that seems to have this one; None where that was not measured."""
        return None if self._remote is None else pace_in(*self._remote.pace_of(KeyColumn(column)[chunk]))

    def open_staging(self) -> kvpool_native.Mapping:
        """The connection's staging memory, mapped. One round trip. Raises as `call` does."""
        record, fd = self._open_memory(b"")
        try:
            return kvpool_native.Mapping.attach(fd, record.memory_bytes, writable=True)
        except (ValueError, OSError, RuntimeError) as error:
            raise DaemonUnreachable(f"the daemon's staging memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def open_device(self, uuid: bytes) -> tuple[mm.Memory, int]:
        """The memory of the device tier for engines on the device of this UUID; the caller closes the descriptor. One round
        trip. Raises as `call` does."""
        return self._open_memory(uuid)

    def _open_memory(self, uuid: bytes) -> tuple[mm.Memory, int]:
        fds: list[int] = []
        try:
            return self.call(mm.OpenMemory(uuid), mm.Memory, fds=fds), fds.pop()
        finally:
            for fd in fds:
                os.close(fd)

    def notify(self, record: object) -> bool:
        """Send a record that has no answer, before every later request; never waits. False: it will never be sent."""
        if not self.is_alive:
            return False
        self._outbox.append(m.encode(record, 0))
        return self.send_waiting() or self.is_alive

    def exchange(self, unsent: bytearray) -> bytes:
        """Send what the socket takes of these frames, cut off what was sent, and return the bytes that have arrived.

        For a session whose requests all go this way (see `promise_line`): `call` would read their answers. Does not wait.
        Raises DaemonUnreachable: the session has ended.
        """
        if not self.is_alive or not self._turn.acquire(blocking=False):
            raise DaemonUnreachable("the connection to the daemon has ended")
        fault = "a request was interrupted"
        try:
            received = self._connection.exchange(unsent)
            fault = ""
            return received
        except DaemonUnreachable as error:
            fault = str(error)
            raise
        finally:
            if fault:
                self._leave_broken(fault)
            else:
                self._turn.release()

    def wait_for_exchange(self, wait_s: float, *, has_more: bool) -> None:
        """Wait at most so long until `exchange` finds something, or takes more where it has more to send."""
        self._connection.wait_for_exchange(wait_s, has_more=has_more)

    def drop_leases(self, leases: Sequence[int]) -> None:
        """Have the daemon end leases, which an ended session has not any more. Does not wait."""
        if not self.is_alive:
            return
        try:
            failpoint.reach("client.release.before", failpoint.unreachable)
        except DaemonUnreachable:
            return  # as if the session had ended, and the leases with it
        for first in range(0, len(leases), m.RENEWALS_MAX):
            self.notify(one_way.DropLeases(columns.pack_numbers(leases[first : first + m.RENEWALS_MAX])))

    def drop_reservation(self, reservation: int) -> None:
        """Have the daemon end a reservation, to which this client writes nothing any more; as `drop_leases`."""
        self.notify(one_way.DropReservations(columns.pack_numbers([reservation])))

    def send_waiting(self) -> bool:
        """Send the outbox, unless a round trip is under way, whose end sends it. Whether the outbox is empty now."""
        while self._outbox and self.is_alive and self._turn.acquire(blocking=False):
            self._under_way, self._thread = _NO_ANSWER, threading.get_ident()
            fault, is_full = "a request was interrupted", False
            try:
                while self._outbox and not is_full:
                    is_full = not self._connection.notify(self._outbox[0])
                    if not is_full:
                        self._outbox.popleft()
                fault = ""
            except DaemonUnreachable as error:
                fault = str(error)
            finally:
                self._under_way = None
                if fault:
                    self._leave_broken(fault)
                else:
                    self._turn.release()
            if is_full:
                break
        return not self._outbox

    def adopt_save(self, run: Stoppable) -> bool:
        """Have `end` stop this save, unless `drop_save` comes first. False when the session has ended: then the caller stops
        it."""
        with self._state:
            if self._has_ended:
                return False
            self._saves.add(run)
            return True

    def drop_save(self, run: Stoppable) -> None:
        """This save has ended: it writes nothing any more."""
        with self._state:
            self._saves.discard(run)

    def end_session(self, reason: str) -> None:
        """Stop running saves and end the connection. Idempotent; any thread; waits for no answer."""
        with self._state:
            if self._has_ended:
                return
            self._has_ended = True
            self.end_reason = self.end_reason or reason
            self.is_alive = False
        if self.welcome.staging_bytes:
            self._connection.hang_up()
        self.stop_saves()
        self._connection.hang_up()
        has_turn = self._turn.acquire(
            timeout=self._timeout_s * TURN_FRACTION
        )  # else nobody has it: see `_wait_for_turn`
        self._connection.close()
        if has_turn:
            self._turn.release()
        self._on_end()

    def stop_saves(self) -> None:
        """Stop every save: when it returns, none writes any more. REQUIRES: the session has ended. Idempotent."""
        with self._state:
            assert self._has_ended
            saves = tuple(self._saves)
        for run in saves:
            run.cancel()
        with self._state:
            self._saves.difference_update(saves)
        add_ended(self._path, self.welcome)

    def abandon_in_child(self) -> None:
        """In a forked child: close the parent's socket and send nothing. The mappings are not inherited."""
        self.is_alive = False
        fd = self._connection.fileno()
        if fd >= 0:
            os.close(fd)

    def _wait_for_turn(self, limit_s: float) -> float:
        """Wait for the turn, which another thread has. Returns what is left of the caller's time. Raises DaemonUnreachable."""
        if not self.is_alive:
            raise DaemonUnreachable("the connection to the daemon has ended")
        deadline, turns = Deadline(limit_s), self._turns
        if not self._turn.acquire(timeout=limit_s * TURN_FRACTION):
            others = self._turns - turns
            if not others and self._under_way is None:
                # A signal's exception has ended a request between taking the turn and using it, or giving it back.
                self.end_session("a request was interrupted")
                raise DaemonUnreachable(self.end_reason)
            raise DaemonUnreachable(self._no_turn(limit_s * TURN_FRACTION, others))
        return deadline.remaining_s()

    def _no_turn(self, waited_s: float, others: int) -> str:
        """Why a request had no turn in this time, in which so many others had theirs."""
        if others:
            return f"requests of this Pool's other threads came first, {others} of them, for {waited_s:g} s"
        threads = {each.ident: each.name for each in threading.enumerate()}
        under_way = self._under_way
        name = under_way if isinstance(under_way, str) else type(under_way).__name__
        other = f"{name} of thread {threads.get(self._thread, self._thread)}"
        return f"the daemon has not answered another request, {other}, for {waited_s:g} s, and they go one by one"

    def _leave_broken(self, fault: str) -> None:
        """Give the turn back for good. `fault`: why the connection is unusable, which the waiting threads notice."""
        self.end_reason = self.end_reason or fault
        self.is_alive = False
        self._turn.release()
        self.end_session(fault)

    def _send_before(self, left_s: float) -> float:
        """Send the outbox while holding the turn, however long the daemon takes to read it. Returns what is left of the
        time."""
        deadline = Deadline(left_s)
        while self._outbox:
            self._connection.send(self._outbox[0], deadline)
            self._outbox.popleft()
        return deadline.remaining_s()

    def _map(self, former: "SharedArena | None") -> tuple[SharedArena, kvpool_native.IndexView]:
        if len(self.welcome.epoch) != EPOCH_BYTES:
            raise ProtocolError(f"epoch has {len(self.welcome.epoch)} bytes, expected {EPOCH_BYTES}")
        fds = self._connection.fds
        has_remote, has_life = self.welcome.remote_bytes > 0, self.welcome.life > 0
        if len(fds) != self.welcome.descriptors:
            raise ProtocolError(f"the welcome came with {len(fds)} descriptors, expected {self.welcome.descriptors}")
        try:
            is_writable = not self.welcome.staging_bytes
            arena = SharedArena.of(fds[0], self.welcome.arena_bytes, is_writable=is_writable, former=former)
            index = kvpool_native.Mapping.attach(fds[1], self.welcome.index_bytes, writable=False)
            self._remote = self._map_remote(fds[2]) if has_remote else None
            page = kvpool_native.Mapping.attach(fds[-1], PAGE_BYTES, writable=False) if has_life else None
            life_page = None if page is None else kvpool_native.LifePage(page)
            return arena, kvpool_native.IndexView(index, self._remote, life_page, self.welcome.life)
        except (ValueError, OSError, RuntimeError) as error:
            raise KVPoolError(f"the daemon's shared memory cannot be mapped: {error}") from error
        finally:
            while fds:
                os.close(fds.pop())

    def _map_remote(self, fd: int) -> kvpool_native.RemoteView | None:
        """The table of other nodes' chunks. None, and their chunks are misses, where it cannot be read."""
        try:
            return kvpool_native.RemoteView(kvpool_native.Mapping.attach(fd, self.welcome.remote_bytes, writable=False))
        except (ValueError, OSError, RuntimeError) as error:
            self.shortcoming = f"the table of other nodes' chunks cannot be read: {error}"
            return None
