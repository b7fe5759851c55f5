"""Blocking connection to the daemon: one request at a time, each with a deadline.

Used by the client library and by kvpoolctl. It is not thread-safe: its owner serialises calls. After any exception
but Refused the connection is unusable and must be closed: an answer may still be on its way.
"""

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import kvpool_native
from kvpool.clock import Deadline
from kvpool.errors import DaemonUnreachable, DaemonUnresponsive, ProtocolError, Refused
from kvpool.key_column import KeyColumn
from kvpool.ownership import fault_of_daemon, missing_right, peer_of
from kvpool.protocol import frames, hit_curve, versions
from kvpool.protocol.records import events as em
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import operator as om
from kvpool.protocol.records import peers as pm
from kvpool.router_events.columns import NamespaceNames, unpack_namespaces

Answer = TypeVar("Answer")
# Beside the time for any answer. The daemon's own limit for a slice is shorter, and that for all chunks as long.
SLICE_TIMEOUT_S = 30.0
ALL_CHUNKS_TIMEOUT_S = 120.0
_FDS_MAX = 3
_BUFFER_BYTES = 64 << 10
_TIMEVAL = struct.Struct("ll")
_TIMEOUT_S_MIN = 1e-3
# How often a wait for a welcome looks whether it is still wanted.
_LOOK_S = 0.05


class BlockingConnection:
    """A handshaken connection. `fds` are the descriptors that came with the welcome; the owner closes them."""

    def __init__(
        self,
        path: str,
        hello: m.Hello,
        timeout_s: float,
        *,
        welcome_s: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Of the newest version that the daemon speaks too. `timeout_s` bounds each request, and reaching the daemon;
        `welcome_s` (None: the same) all of the handshake, which ends too when it is no longer wanted. Raises DaemonUnreachable,
        Refused or ProtocolError; then nothing is left open."""
        self._timeout_s = timeout_s
        self._welcome_s = timeout_s if welcome_s is None else welcome_s
        self._is_wanted = is_wanted
        self._sequence = 0
        self.fds: list[int] = []
        deadline = Deadline(self._welcome_s)
        greetings = versions.greetings()
        for version in greetings:
            if hello.oldest > version:
                spoken = (
                    f"this client speaks protocol {hello.oldest} to {hello.version}, the daemon at {path} an older one"
                )
                raise Refused("version", f"{spoken}: update the daemon")
            try:
                self._greet(path, hello, version, deadline)
            except Refused as error:
                if error.code != "protocol" or version == greetings[-1]:
                    raise
            else:
                return

    def _greet(self, path: str, hello: m.Hello, version: int, deadline: Deadline) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = kvpool_native.FrameSocket(self._socket.fileno())
        limit_s = min(self._timeout_s, deadline.remaining_s())
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(limit_s))
            self._socket.connect(path)
            limit_s = self._welcome_s
            fault = fault_of_daemon(path, peer_of(self._socket)[1])
            if fault:
                raise DaemonUnreachable(fault)
            with contextlib.suppress(
                BrokenPipeError
            ):  # refused before the hello, as by a full daemon: its reason can be read
                self._frames.send(versions.encode_for(hello, 0, version), deadline.remaining_s())
            self._await_welcome(deadline)
            self.welcome = self._receive_welcome(deadline)
        except (BlockingIOError, TimeoutError) as error:
            pid = peer_of(self._socket)[0]  # the listening process; 0 where nobody accepts
            self.close()
            raise DaemonUnresponsive(_silence(path, pid, limit_s)) from error
        except PermissionError as error:
            self.close()
            raise DaemonUnreachable(f"no right to connect to {path}: {missing_right(path) or error}") from error
        except OSError as error:
            self.close()
            is_other = os.path.exists(path) and not Path(path).is_socket()
            raise DaemonUnreachable(
                f"no daemon answers at {path}: {'it is no socket' if is_other else error}"
            ) from error
        except ProtocolError as error:
            self.close()
            raise ProtocolError(f"no daemon of this kvpool answers at {path}: {error}") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def admin(cls, path: str, timeout_s: float, name: str = "") -> "BlockingConnection":
        """A connection for an operator: no model, no shared memory. `name`: for people, in the daemon's list and log."""
        hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ADMIN, "", [], name=name.encode())
        return cls(path, hello, timeout_s)

    def __enter__(self) -> "BlockingConnection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """The socket's descriptor, -1 when closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection and close descriptors that were not taken over. Idempotent."""
        self._frames.forget()
        self._socket.close()
        for fd in self.fds:
            socket.close(fd)
        self.fds = []

    def hang_up(self) -> None:
        """Shut the connection down but leave its descriptor open, so that a thread that waits for an answer wakes now."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def call(
        self, request: Any, answer: type[Answer], timeout_s: float | None = None, fds: list[int] | None = None
    ) -> Answer:
        """One round trip. Raises Refused, also for what the daemon is too old for, DaemonUnreachable (also when time runs out)
        or ProtocolError. `fds`: gets the descriptor that is to come with the answer; the caller closes what is in it, also
        where this raises."""
        protocol = self.welcome.protocol
        if protocol >= versions.NEWEST:
            names = request.__slots__
        elif versions.SINCE.get(type(request), versions.OLDEST) <= protocol:
            names = versions.names_for(type(request), protocol)
        else:
            raise Refused(
                "version", f"the daemon is kvpoold {self.welcome.version}, which cannot do this yet: update it"
            )
        self._sequence = sequence = self._sequence + 1
        try:
            body = self._frames.ask(
                request.KIND,
                sequence,
                request,
                names,
                self._timeout_s if timeout_s is None else timeout_s,
                0 if fds is None else 1,
            )
        except (BrokenPipeError, ConnectionResetError) as error:
            raise DaemonUnreachable(
                f"no answer to {type(request).__name__}: the daemon closed the connection"
            ) from error
        except OSError as error:
            raise DaemonUnreachable(f"no answer to {type(request).__name__}: {error}") from error
        except kvpool_native.MalformedFrame as error:
            raise ProtocolError(str(error)) from error
        if fds is not None:
            fds += self._frames.take_descriptors()
        kind, found, fields = frames.decode(body)
        if kind != answer.KIND or found != sequence:  # type: ignore[attr-defined]
            raise self._misfit(answer, kind, found, fields)
        if fds is not None and len(fds) != 1:
            raise ProtocolError(f"the answer came with {len(fds)} descriptors, expected 1")
        return m.decode_as(answer, fields) if protocol >= versions.NEWEST else versions.decode_of_any(answer, fields)

    def call_for_descriptor(
        self, request: object, answer: type[Answer], timeout_s: float | None = None
    ) -> tuple[Answer, int]:
        """One round trip whose answer carries a descriptor; the caller closes it. Raises as `call` does."""
        fds: list[int] = []
        try:
            return self.call(request, answer, timeout_s, fds), fds.pop()
        finally:
            for fd in fds:
                socket.close(fd)

    def send(self, frame: bytes, deadline: Deadline) -> None:
        """Send a frame that is never answered. Raises DaemonUnreachable, also when the daemon does not read it in time."""
        try:
            self._frames.send(frame, deadline.remaining_s())
        except OSError as error:
            raise DaemonUnreachable(f"a frame without an answer cannot be sent: {error}") from error

    def notify(self, frame: bytes) -> bool:
        """Send a frame that is never answered, without waiting. False if the socket is full: then nothing was sent.

        Raises DaemonUnreachable.
        """
        try:
            return self._frames.post(frame)
        except OSError as error:
            raise DaemonUnreachable(f"a frame without an answer cannot be sent: {error}") from error

    def exchange(self, unsent: bytearray) -> bytes:
        """Send what the socket takes of `unsent`, which loses it, and return what has arrived: frames without a caller that
        waits. Does not wait. Raises DaemonUnreachable.
        """
        try:
            with contextlib.suppress(BlockingIOError):
                while unsent:
                    del unsent[: self._socket.send(unsent, socket.MSG_DONTWAIT)]
            received = self._socket.recv(_BUFFER_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise DaemonUnreachable(f"the connection to the daemon has failed: {error}") from error
        if not received:
            raise DaemonUnreachable("the daemon closed the connection")
        return received

    def wait_for_exchange(self, wait_s: float, *, has_more: bool) -> None:
        """Wait at most so long until `exchange` finds something, or takes more where it has more to send."""
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):  # it has been closed: `exchange` says so
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if has_more else 0))
            poll.poll(wait_s * 1000)

    def info(self) -> dict[str, Any]:
        """The daemon's identity and resources."""
        return self.call(m.AskInfo(), m.Report).values

    def stats(self) -> dict[str, dict[str, int | float | str]]:
        """Counters by section."""
        return self.call(m.AskStats(), m.Report).values

    def flush(
        self, model: str | None, older_than_s: float | None, tier: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Drop chunks; answers `chunks` and `bytes` dropped and chunks `skipped` because they are held.

        `durable`: no restart brings one back.
        """
        request = m.Flush(model or "", -1.0 if older_than_s is None else float(older_than_s), tier)
        return self.call(
            request, m.Report, ALL_CHUNKS_TIMEOUT_S + self._timeout_s if timeout_s is None else timeout_s
        ).values

    def demote_all(self, timeout_s: float, *, is_forced: bool = True) -> dict[str, Any]:
        """Write chunks that only DRAM has to the SSD tier, within the write budget or (`is_forced`) beyond it.

        Answers `chunks` written that are still on disk, and `left` in DRAM alone.

        `durable`: a power cut now would lose no chunk of the pool. False when any are left, or a sync of the data or of the
        catalogue failed or came late.
        """
        return self.call(m.DemoteAll(timeout_s, is_forced), m.Report, timeout_s + self._timeout_s).values

    def drain(self, *, is_on: bool) -> bool:
        """Have the daemon decline new saves, or take them again; whether it declined them before."""
        return bool(self.call(om.Drain(is_on), m.Report).values["before"])

    def models(self) -> dict[str, Any]:
        """Models by layout, those with the most bytes first (`models`), and how many are `left_out`."""
        return self.call(om.AskModels(), m.Report, ALL_CHUNKS_TIMEOUT_S + self._timeout_s).values

    def connections(self) -> dict[str, Any]:
        """All connections and what each holds (`connections`, those that hold the most first), and how many are `left_out`."""
        return self.call(om.AskConnections(), m.Report).values

    def disconnect(self, connection: int) -> bool:
        """End a connection. False where there is none of that number."""
        return bool(self.call(om.Disconnect(connection), m.Report).values["disconnected"])

    def peers(self) -> dict[str, Any]:
        """This node among others (`here`, None where it has no peers), what is wrong with its fleet (`problems`), and the known
        members and what is known of each (`peers`), in the order of their addresses."""
        report = self.call(pm.AskPeers(0), m.Report).values
        rows = report["peers"]
        while page := self.call(pm.AskPeers(len(rows)), m.Report).values["peers"]:
            rows += page
        return report

    def log_level(self, level: str = "") -> dict[str, Any]:
        """Have the daemon log from a level on (empty: as it does); the `level`, and the one `before`."""
        return self.call(om.LogLevel(level), m.Report).values

    def config(self) -> dict[str, dict[str, Any]]:
        """The configuration in force: of each option its `value` as it was written, and the `source` of that, by its name."""
        options: dict[str, dict[str, Any]] = self.call(om.AskConfig(), m.Report).values["options"]
        return options

    def reload(self) -> dict[str, Any]:
        """Have the daemon read its configuration again: `changed` lines, and the options that are `needs_restart`.

        Raises Refused with every fault.
        """
        return self.call(om.Reload(), m.Report).values

    def hit_curve(self, capacities: Sequence[int]) -> dict[str, Any]:
        """Hit rates that LRU of each capacity would have for the daemon's requests (`hit_rates`), and the sample behind
        them."""
        return self.call(m.AskHitCurve(hit_curve.pack(capacities)), m.Report).values

    def events(self, incarnation: bytes, last: int, wait_s: float = 0.0) -> em.Events:
        """The events after id `last` of an incarnation; see `em.AskEvents`."""
        return self.call(em.AskEvents(incarnation, last, wait_s), em.Events, wait_s + self._timeout_s)

    def snapshot(self, cursor: int) -> em.SnapshotPage:
        """A page of the stored chunks; see `em.AskSnapshot`."""
        return self.call(em.AskSnapshot(cursor), em.SnapshotPage, SLICE_TIMEOUT_S + self._timeout_s)

    def chunk_history(self, keys: Sequence[bytes]) -> list[dict[str, Any]]:
        """The history of each chunk in the daemon's journal."""
        found: list[dict[str, Any]] = []
        for part in KeyColumn.of(keys).parts(em.HISTORY_KEYS_MAX):
            found += self.call(em.AskChunkHistory(part.packed), m.Report).values["chunks"]
        return found

    def namespaces(self) -> NamespaceNames:
        """Every model and layout that the daemon knows, by its number."""
        names: NamespaceNames = {}
        first = 0
        while more := unpack_namespaces(self.call(em.AskNamespaces(first), em.NamespaceList).namespaces):
            names.update(more)
            first = max(more) + 1
        return names

    def retain(self, keys: KeyColumn, priority: int, duration_s: float) -> bytes:
        """Set the priority of chunks of any model (duration 0: no end); a `RetainState` for each key."""
        return self.call(m.RetainKeys(keys.packed, priority, float(duration_s)), m.Retained).states

    def check(self) -> dict[str, Any]:
        """Recount invariants inside the daemon: `problems` (lines), `chunks` seen, by tier too (`tiers`)."""
        return dict(self.call(m.Check(), m.Report, ALL_CHUNKS_TIMEOUT_S + self._timeout_s).values)

    def verify_bytes(self, column: bytes, chunks: int) -> dict[str, Any]:
        """Have the daemon verify a slice of chunks; see `m.VerifyBytes`. `verify_walk.read_all` requests all slices."""
        return self.call(m.VerifyBytes(column, chunks), m.Report, SLICE_TIMEOUT_S + self._timeout_s).values

    def _misfit(self, answer: type[Any], kind: int, sequence: int, values: list[object]) -> Refused | ProtocolError:
        """What a frame means that is not the answer to the latest request, or the welcome."""
        if kind == m.Failure.KIND:
            failure = m.decode_as(m.Failure, values)
            return Refused(failure.code, failure.message)
        return ProtocolError(
            f"answer is kind {kind} number {sequence}, expected {answer.__name__} number {self._sequence}"
        )

    def _await_welcome(self, deadline: Deadline) -> None:
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while not readable.poll(min(_LOOK_S, deadline.remaining_s()) * 1000):
            if deadline.has_passed():
                raise TimeoutError("the daemon did not answer in time")
            if not self._is_wanted():
                raise DaemonUnreachable("the connection was given up before the daemon answered")

    def _receive_welcome(self, deadline: Deadline) -> m.Welcome:
        try:
            # It has begun to come: a daemon that is there sends the rest at once.
            body = self._frames.receive(min(self._timeout_s, deadline.remaining_s()), _FDS_MAX)
        except ConnectionResetError as error:
            raise ConnectionResetError("it closed the connection during the handshake") from error
        except kvpool_native.MalformedFrame as error:
            raise ProtocolError(str(error)) from error
        self.fds = self._frames.take_descriptors()
        kind, sequence, values = frames.decode(body)
        if kind != m.Welcome.KIND:
            raise self._misfit(m.Welcome, kind, sequence, values)
        return versions.decode_of_any(m.Welcome, values)


def _silence(path: str, pid: int, timeout_s: float) -> str:
    return (
        f"a daemon listens at {path}{f' (pid {pid})' if pid else ''} but has not answered within {timeout_s:.3g} s: it is "
        f"stopped (kill -CONT {pid or 'PID'} has it go on), overloaded or hanging: read its log, and restart it if it stays so"
    )


def _timeval(seconds: float) -> bytes:
    bound_s = max(seconds, _TIMEOUT_S_MIN)
    whole = int(bound_s)
    return _TIMEVAL.pack(whole, int((bound_s - whole) * 1e6))
