"""Save: reserved slots, filled layer by layer, then published.

    RESERVED ──layer(i)…──► COPYING ──commit──► ENDED (SaveResult)
        ├──abort, error, leaving the context without commit──► ENDED, nothing stored
        └──its reservation's time is over──► ENDED by the next call, nothing more stored: `expired`

Chunks that the pool has already, or declines, are not copied. Copies per byte: one, engine memory to arena; the
checksum is computed in the same pass. A commit that is not answered counts as declined: absent means failed. A Save is used
from one thread at a time. One that is collected before it has ended is aborted by the Pool, with a ResourceWarning. In a forked
child it has ended with nothing stored, like a load (see `load`). Of a Pool with a share all this is about its part of each
chunk.
"""

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, overload

import numpy as np

from kvpool import failpoint
from kvpool.clock import Deadline
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.ids import CHECKSUM_BYTES
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.states import SaveState
from kvpool_client.arguments import as_group, as_index
from kvpool_client.connection.batching import call_each
from kvpool_client.connection.session import Session
from kvpool_client.connection.stall import Stall
from kvpool_client.verbs.pending import PendingChunks
from kvpool_client.verbs.results import SaveResult, known_states

# Their numbers alone, as columns have them.
_RESERVED, _STORED, _PRESENT = int(SaveState.RESERVED), int(SaveState.STORED), int(SaveState.PRESENT)
_RESERVED_ALONE, _EXPIRED_ALONE, _PENDING_ALONE = (
    bytes([state]) for state in (SaveState.RESERVED, SaveState.EXPIRED, SaveState.PENDING)
)


class SaveRun(Protocol):
    """The copy behind a save: a native job, or a device's staged copy."""

    def announce(self, layer: int) -> bool:
        """Copy this layer from now on; False if it was announced before."""
        ...

    def announce_all(self) -> None:
        """Copy every layer that was not announced."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until every announced layer is copied; whether that happened within the time."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the run was cancelled."""
        ...

    def progress(self) -> int:
        """Units finished so far; rises while the run makes progress."""
        ...

    def checksums(self) -> bytes:
        """CRC-32C of every layer, and of a chunk's summaries behind them, u32 little endian [chunk][extent]. Only after
        everything was copied."""
        ...

    def copied_extents(self) -> int:
        """Extents copied, from the first one up to one that is not."""
        ...

    def checksums_from(self, layer: int) -> bytes:
        """CRC-32C of the extents from this one on that `copied_extents` counts, u32 little endian [chunk][extent]."""
        ...

    def cancel(self) -> None:
        """End the run; when it has returned, it writes no byte of the slots."""
        ...


@dataclass(slots=True, eq=False)
class SavedRun:
    """What a save has of the chunks of one group. `states`: a SaveState for each. `retained`: a RetainState for each, or none.
    `layers`: of the engine, each to be announced; `head_groups`: of a layer, each of which is an extent of the run; `extents`:
    of a stored chunk, each with a checksum. `is_part`: these are a share's. `run`: copies the RESERVED ones, where there are
    any, of the reservation's run of this `number`; `tokens`: their token ids, i32, or none; `landed`: extents of them that were
    reported to the daemon, for other nodes."""

    group: int
    states: bytearray
    retained: bytes
    layers: int
    head_groups: int
    extents: int
    is_part: bool
    run: SaveRun | None = None
    number: int = 0
    tokens: bytes = b""
    landed: int = 0

    @property
    def reserved(self) -> Sequence[int]:
        """Which of the chunks are RESERVED, in order; a range where all are."""
        if self.states.count(_RESERVED) == len(self.states):
            return range(len(self.states))
        return [number for number, state in enumerate(self.states) if state == _RESERVED]

    def give_up(self, state: SaveState) -> None:
        """Its RESERVED chunks end in this state."""
        self.states = self.states.replace(_RESERVED_ALONE, bytes([state]))


@dataclass(slots=True, eq=False)
class ReservedSave:
    """What a save begins with. `runs`: in the order in which they are committed; `scope`: adapter and salt tag for events;
    `pending`: chunks that others are writing; `end_token`: behind the last chunk asked; `places`: of a set, which chunk
    answers for each key of the caller's, where that is not the one at its own place."""

    session: Session | None
    reservation: int
    runs: tuple[SavedRun, ...]
    scope: bytes
    pending: PendingChunks
    end_token: int
    has_groups: bool
    timeout_s: float
    on_end: Callable[[SaveResult], None]
    places: Sequence[int] | None = None


class _Commit:
    """A commit of some chunks of a save, and whose they are. `parts`: of each run its chunks' numbers in it. `room`: bytes of
    checksums and token ids that it may have yet."""

    def __init__(self, reserved: ReservedSave) -> None:
        self._reserved = reserved
        self._checksums: list[bytes] = []
        self._tokens: list[bytes] = []
        self.parts: list[tuple[SavedRun, Sequence[int]]] = []
        self.room = m.COMMIT_BYTES_MAX - len(reserved.scope)
        self.is_answered = False

    @property
    def request(self) -> m.Commit:
        """The request. Where it has all of one run nothing is copied."""
        tokens = b"".join(self._tokens)
        scope = self._reserved.scope if tokens else b""
        return m.Commit(self._reserved.reservation, b"".join(self._checksums), tokens, scope)

    def add_chunks(self, saved: SavedRun, numbers: Sequence[int], checksums: bytes, tokens: bytes) -> None:
        """Commit these chunks of a run, too."""
        self._checksums.append(checksums)
        self._tokens.append(tokens)
        self.parts.append((saved, numbers))
        self.room -= len(checksums) + len(tokens)

    def note_states(self, states: bytes) -> None:
        """Take the answer: a state for each chunk, or none where the reservation has ended."""
        self.is_answered = True
        left = known_states(states)
        for saved, numbers in self.parts:
            of_run, left = left[: len(numbers)], left[len(numbers) :]
            of_run += _EXPIRED_ALONE * (len(numbers) - len(of_run))
            if isinstance(numbers, range):
                saved.states[numbers.start : numbers.stop] = of_run
                continue
            for number, state in zip(numbers, of_run, strict=True):
                saved.states[number] = state


class Save:
    """Chunks on their way out of engine memory: what `Pool.save` answers, with room reserved for those that the pool lacks.

        with pool.save(keys, cache, block_ids) as save:
            save.layer(0)                       # as each layer is written: native threads copy it meanwhile
            result = save.commit()              # copies the others, then publishes; SaveResult

    Of a layout with groups it is a save of them all, each with the chunks that it was to store: windows and states first, they
    are few, and without them the others are no hit. `layers`: of the engine, each to be announced or committed; with groups
    those of the first. `end_token`: behind the last token of its chunks, counted from the prompt's begin. Blocks must not
    change from a layer's announcement, or the commit, to the result. Leaving it as a context without a commit aborts it; so
    does the garbage collector, with a ResourceWarning. Nothing raises because of the daemon: what is not stored is declined,
    with a reason. Threads: one at a time.
    """

    def __init__(self, reserved: ReservedSave) -> None:
        self._pid = os.getpid()
        self._reserved = reserved
        self._session = reserved.session
        self._copying = [(saved, saved.run) for saved in reserved.runs if saved.run is not None]
        self._layers = {saved.group: saved.layers for saved in reserved.runs}
        self._groups = range(min(self._layers), max(self._layers) + 1)  # of a set its own alone
        self.layers = self._layers[self._groups.start]
        self.end_token = reserved.end_token
        self._announced: set[tuple[int, int]] = set()
        self._is_expired = False  # set by the Pool's own thread
        self._result: SaveResult | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        state = "ended" if self._result else "expired" if self._is_expired else "under way"
        return f"<Save {sum(len(saved.states) for saved in self._reserved.runs)} chunks, {state}>"

    def __enter__(self) -> "Save":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._result is None and self._thread is None:
            self.abort()

    @property
    def is_announced(self) -> bool:
        """Whether a layer was announced: the engine's bytes of it may be copied already."""
        return bool(self._announced)

    def __del__(self) -> None:
        # A finalizer, also of an interpreter that ends: see `endings`.
        if self._result is not None or self._session is None or sys.is_finalizing():
            return
        if self._session.is_alive:
            self._session.endings.add_forgotten("neither committed nor aborted; it is aborted now", self, self.abort)

    def layer(self, layer: int, group: int | None = None) -> None:
        """The engine's bytes of this layer may be read from now on. Any order, once each. `group`: of which it is, where the
        layout has groups; None: the first one, or a set's own. Raises InvalidArgument."""
        group = as_group(group, self._groups)
        layer = as_index("layer", layer, self._layers[group] - 1)
        if (group, layer) in self._announced:
            raise InvalidArgument(f"layer {layer} was announced before, expected once each")
        if self._result is not None or self._thread is not None:
            raise InvalidArgument(f"layer {layer} comes after the end of {self!r}, expected before commit and abort")
        self._announced.add((group, layer))
        if self._result is not None or self._is_inherited:
            return
        for saved, run in self._copying:
            if saved.group == group:
                for head_group in range(saved.head_groups):
                    run.announce(layer * saved.head_groups + head_group)
                self._land_copied(saved, run)

    def copy(self, deadline: Deadline) -> bool:
        """Copy the layers not announced and wait, until `deadline`: for a caller that looks at engine memory once more before
        the commit, which does the same with the Pool's time. Whether every byte was copied; else the save has ended."""
        if self._result is None and self._thread is None and not self._is_inherited:
            self._announce_all()
            if not self._copied(deadline):
                self._end()
        return self._result is None

    @overload
    def commit(self, wait: Literal[True] = True) -> SaveResult:
        """Copy, publish and wait."""

    @overload
    def commit(self, wait: bool) -> SaveResult | None:
        """Copy and publish; wait if that is asked for."""

    def commit(self, wait: bool = True) -> SaveResult | None:
        """Copy the layers not announced and publish. When it returns a result, every client sees the stored chunks.

        With `wait=False` it returns None at once and the rest goes on in the background: `wait` gives the result, and
        engine memory must not be touched before that.
        """
        if self._result is not None or self._is_inherited:
            return self.wait()
        if self._thread is None:
            self._announce_all()
            self._thread = None if wait else _started_commit(self._publish)
            if self._thread is None:
                self._publish()
                return self._result
        return self.wait() if wait else None

    def wait(self) -> SaveResult:
        """Wait for the result of a commit. Raises InvalidArgument before one."""
        if self._is_inherited:
            return self._end_inherited(SaveState.DISCONNECTED)
        if self._thread is not None:
            self._thread.join()
        elif self._result is None:
            raise InvalidArgument(f"wait comes before the commit of {self!r}, expected after it")
        assert self._result is not None
        return self._result

    def wait_pending(self, timeout_s: float) -> bool:
        """Wait until the chunks that were pending when this save began are here or have failed, or the time is over: others
        were saving them, or they were on their way from another tier.

        True: all of them are stored, also where there were none, and with them what this save has stored behind them. False:
        late, given up, or the daemon is away; what was given up takes along what follows it, which can be saved by a new save.
        Reads shared memory; no request.
        """
        return self._reserved.pending.wait(timeout_s)

    def has_pending(self) -> bool:
        """Whether chunks that were pending when this save began still are. Never waits."""
        return self._reserved.pending.are_under_way()

    def done(self) -> bool:
        """Whether the save has ended."""
        return self._result is not None

    def abort(self) -> None:
        """Give the save up: nothing more is read or written, nothing is stored. Idempotent."""
        if self._is_inherited:
            self._end_inherited(SaveState.ABORTED)
            return
        if self._thread is not None:
            self._thread.join()
        if self._result is None:
            self._give_up(SaveState.ABORTED)
            self._end()

    def expire(self) -> None:
        """Give the reservation back, whose time is over: other saves may have the slots. On a thread of the Pool's own; whoever
        has the save learns it from its result."""
        if self._result is None and self._copying and not self._is_inherited:
            self._is_expired = True
            self._cancel_copies()
            self._acknowledge_end()

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's save."""
        return os.getpid() != self._pid

    def _end_inherited(self, state: SaveState) -> SaveResult:
        """The result in a forked child: only the parent can store what was reserved, and only the parent counts it."""
        if self._result is None:
            for saved in self._reserved.runs:
                saved.give_up(state)
            self._result = self._collected()
        return self._result

    def _publish(self) -> None:
        if self._copying and self._copied():
            self._commit_reserved()
        self._end()

    def _copied(self, deadline: Deadline | None = None) -> bool:
        """Whether every byte has been copied; else the save is given up. `deadline`: in place of the Pool's time without
        progress."""
        for _, run in self._copying:
            stall = Stall(run, self._reserved.timeout_s if deadline is None else deadline.remaining_s())
            while not run.wait(stall.slice_s()):
                if stall.has_lasted() or (deadline is not None and deadline.has_passed()):
                    self._give_up(SaveState.TIMEOUT)
                    return False
        if self._is_expired or any(run.is_cancelled() for _, run in self._copying):
            self._give_up(SaveState.DISCONNECTED)
            return False
        return True

    def _land_copied(self, saved: SavedRun, run: SaveRun) -> None:
        """Report the layers copied so far, which other nodes may read before the commit; the last one comes with it."""
        assert self._session is not None
        if not self._session.welcome.remote_bytes or saved.is_part:
            return  # there are no other nodes, or nobody can read a chunk before its other parts are there
        if saved.landed >= min(run.copied_extents(), saved.layers * saved.head_groups - 1):
            return
        chunks = len(saved.reserved)
        sums = np.frombuffer(run.checksums_from(saved.landed), "<u4").reshape(chunks, -1)
        at_once = m.COMMIT_BYTES_MAX // (CHECKSUM_BYTES * chunks)  # extents of one record
        for first in range(0, sums.shape[1] if at_once else 0, at_once or 1):
            part = sums[:, first : first + at_once]
            # Extents count only in order: without these, later ones would not.
            landed = one_way.LandSaved(self._reserved.reservation, saved.landed, part.tobytes(), saved.number)
            if not self._session.notify(landed):
                return
            saved.landed += part.shape[1]

    def _announce_all(self) -> None:
        if self._result is None and not self._is_inherited:
            for _, run in self._copying:
                run.announce_all()

    def _commits(self) -> Iterator[_Commit]:
        """The requests that publish this save, once everything is copied: as few as have room for it."""
        whole = _Commit(self._reserved)
        for saved, run in self._copying:
            reserved, checksums = saved.reserved, run.checksums()
            row, token_row = CHECKSUM_BYTES * saved.extents, len(saved.tokens) // len(reserved)
            at = 0
            while at < len(reserved):
                count = min(len(reserved) - at, max(whole.room // (row + token_row), 0 if whole.parts else 1))
                if not count:
                    yield whole
                    whole = _Commit(self._reserved)
                    continue
                end = at + count
                whole.add_chunks(
                    saved,
                    reserved[at:end],
                    checksums[at * row : end * row],
                    saved.tokens[at * token_row : end * token_row],
                )
                at = end
        yield whole

    def _as_one_commit(self) -> "tuple[Session, _Commit] | None":
        """The one request that publishes this save, once everything is copied; None where there is nothing to publish, or one
        is not enough."""
        if self._result is not None or self._thread is not None or not self._copying or self._is_inherited:
            return None
        if not self._copied():
            return None
        assert self._session is not None
        commits = list(itertools.islice(self._commits(), 2))
        return (self._session, commits[0]) if len(commits) == 1 else None

    def _commit_reserved(self) -> None:
        assert self._session is not None
        for commit in self._commits():
            _commit_each(self._session, [(self, commit)])
            if not commit.is_answered:
                return
        self._acknowledge_expiry()

    def _acknowledge_expiry(self) -> None:
        if any(_EXPIRED_ALONE in saved.states for saved in self._reserved.runs):
            self._acknowledge_end()

    def _cancel_copies(self) -> None:
        for _, run in self._copying:
            run.cancel()

    def _give_up(self, state: SaveState) -> None:
        self._cancel_copies()
        for saved in self._reserved.runs:
            saved.give_up(SaveState.EXPIRED if self._is_expired else state)
        self._acknowledge_end()

    def _acknowledge_end(self) -> None:
        """Report that this client writes no longer to the reservation, so that its slots can be reused.

        If that fails, the connection ends, which has the same effect.
        """
        if self._reserved.reservation and self._session is not None and self._session.is_alive:
            try:
                failpoint.reach("client.end.before", failpoint.unreachable)
                self._session.drop_reservation(self._reserved.reservation)
            except KVPoolError as error:
                self._session.end_session(f"the end of a save could not be reported: {error}")

    def _end(self) -> None:
        if self._session is not None:
            for _, run in self._copying:
                self._session.drop_save(run)
        if any(_PENDING_ALONE in saved.states for saved in self._reserved.runs):
            # Another save may have stored them meanwhile, of the same batch perhaps.
            stored = iter(self._reserved.pending.are_stored())
            for saved in self._reserved.runs:
                for number, state in enumerate(saved.states):
                    if state == SaveState.PENDING and next(stored):
                        saved.states[number] = SaveState.PRESENT
        self._result = self._collected()
        self._reserved.on_end(self._result)

    def _collected(self) -> SaveResult:
        if not self._reserved.has_groups:
            (saved,) = self._reserved.runs
            places = self._reserved.places
            if places is None:
                return SaveResult.of(saved.states, saved.retained)
            retained = bytes([saved.retained[at] for at in places]) if saved.retained else b""
            return SaveResult.of(_states_at(places, saved.states), retained)
        by_group = sorted(self._reserved.runs, key=lambda saved: saved.group)
        return SaveResult.joined([SaveResult.of(saved.states, saved.retained) for saved in by_group])


def _states_at(places: Sequence[int], states: bytearray) -> bytes:
    """The state of each key by the place of its chunk. One that was named before is present where that is stored."""
    found, seen = bytearray(), set[int]()
    for at in places:
        found.append(_PRESENT if at in seen and states[at] == _STORED else states[at])
        seen.add(at)
    return bytes(found)


def _started_commit(publish: Callable[[], None]) -> threading.Thread | None:
    """The thread that publishes a save in the background; None where this process may have no further thread."""
    thread = threading.Thread(target=publish, name="kvpool-commit", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def publish_each(saves: Sequence[Save]) -> list[SaveResult]:
    """Copy and publish saves of one connection, in their order, with one round trip for all. The result of each."""
    for save in saves:
        save._announce_all()
    commits = {save: ready for save in saves if (ready := save._as_one_commit()) is not None}
    for session in {session for session, _ in commits.values()}:
        mine = [(save, commit) for save, (of, commit) in commits.items() if of is session]
        _commit_each(session, mine)
        for save, commit in mine:
            if commit.is_answered:
                save._acknowledge_expiry()
            save._end()
    return [save.commit() for save in saves]


def _commit_each(session: Session, commits: Sequence[tuple[Save, _Commit]]) -> None:
    """Send commits with one round trip for all. A save of which one is not answered is given up: that stored nothing."""
    answers: list[m.Committed | None] = [None] * len(commits)
    with contextlib.suppress(KVPoolError):
        failpoint.reach("client.save.before_commit", failpoint.unreachable)
        received = call_each(session, [commit.request for _, commit in commits], m.Committed)
        failpoint.reach("client.save.after_commit", failpoint.unreachable)
        answers = received
    for (save, commit), answer in zip(commits, answers, strict=True):
        if answer is None:
            save._give_up(SaveState.DISCONNECTED)
        else:
            commit.note_states(answer.states)
