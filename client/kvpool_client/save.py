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
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Protocol, overload

import numpy as np

from kvpool import failpoint
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.protocol.records import groups as gm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.types import SaveState
from kvpool_client.arguments import as_index
from kvpool_client.connection.batching import call_each
from kvpool_client.connection.session import Session
from kvpool_client.connection.stall import Stall
from kvpool_client.pending import PendingChunks
from kvpool_client.results import SaveResult, save_state_of

CHECKSUM_BYTES = 4
CommitRequest = m.Commit | gm.CommitGroup


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


class Save:
    """Chunks on their way out of engine memory: what `Pool.save` answers, with room reserved for those that the pool lacks.

        with pool.save(keys, cache, block_ids) as save:
            save.layer(0)                       # as each layer is written: native threads copy it meanwhile
            result = save.commit()              # copies the others, then publishes; SaveResult

    `layers`: of the engine, each to be announced or committed; `end_token`: behind the last token of its chunks, counted from
    the prompt's begin. Blocks must not change from a layer's announcement, or the commit, to the result. Leaving it as a
    context without a commit aborts it; so does the garbage collector, with a ResourceWarning. Nothing raises because of the
    daemon: what is not stored is declined, with a reason. Threads: one at a time.
    """

    def __init__(
        self,
        session: Session | None,
        reservation: int,
        states: list[SaveState],
        run: SaveRun | None,
        *,
        tokens: bytes,
        scope: bytes,
        retained: bytes,
        pending: PendingChunks,
        end_token: int,
        layers: int,
        groups: int,
        extents: int,
        timeout_s: float,
        on_end: Callable[[SaveResult], None],
        group: int | None = None,
        is_part: bool = False,
    ) -> None:
        """`tokens`: the token ids of the RESERVED chunks, i32, or none; `scope`: adapter and salt tag for events. `retained`: a
        RetainState for each chunk, or none. `end_token`: behind the last chunk asked. `layers`: of the engine, each to be
        announced; `groups`: head groups of a layer, each of which is an extent of the run; `extents`: of a stored chunk, each
        with a checksum. `group`: that of the chunks, where the layout has groups. `is_part`: the layers, groups and extents are
        those of a share."""
        assert (run is None) == (SaveState.RESERVED not in states)
        self._pid = os.getpid()
        self._session = session
        self._reservation = reservation
        self._states = states
        self._run = run
        self._tokens = tokens
        self._scope = scope
        self._retained = retained
        self._pending = pending
        self.end_token = end_token
        self.layers = layers
        self._groups = groups
        self._extents = extents
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._group = group
        self._is_part = is_part
        self._announced: set[int] = set()
        self._landed = 0  # layers that were reported to the daemon, for other nodes
        self._is_expired = False  # set by the Pool's own thread
        self._result: SaveResult | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        state = "ended" if self._result else "expired" if self._is_expired else "under way"
        return f"<Save {len(self._states)} chunks, {state}>"

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
        if self._result is not None or self._run is None or self._session is None or sys.is_finalizing():
            return
        if self._session.is_alive:
            self._session.endings.add_forgotten("neither committed nor aborted; it is aborted now", self, self.abort)

    def layer(self, layer: int) -> None:
        """The engine's bytes of this layer may be read from now on. Any order, once each. Raises InvalidArgument."""
        layer = as_index("layer", layer, self.layers - 1)
        if layer in self._announced:
            raise InvalidArgument(f"layer {layer} was announced before, expected once each")
        if self._result is not None or self._thread is not None:
            raise InvalidArgument(f"layer {layer} comes after the end of {self!r}, expected before commit and abort")
        self._announced.add(layer)
        if self._run is not None and self._result is None and not self._is_inherited:
            for group in range(self._groups):
                self._run.announce(layer * self._groups + group)
            self._land_copied(self._run)

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
        if self._run is not None:
            self._run.announce_all()
        if wait:
            return self.wait()
        if self._thread is None:
            self._thread = started_commit(self._publish)
        return None if self._thread is not None else self.wait()

    def wait(self) -> SaveResult:
        """Wait for the result of a commit."""
        if self._is_inherited:
            return self._end_inherited(SaveState.DISCONNECTED)
        if self._thread is not None:
            self._thread.join()
        if self._result is None:
            self._publish()
        assert self._result is not None
        return self._result

    def wait_pending(self, timeout_s: float) -> bool:
        """Wait until the chunks that were pending when this save began are here or have failed, or the time is over: others
        were saving them, or they were on their way from another tier.

        True: all of them are stored, also where there were none, and with them what this save has stored behind them. False:
        late, given up, or the daemon is away; what was given up takes along what follows it, which can be saved by a new save.
        Reads shared memory; no request.
        """
        return self._pending.wait(timeout_s)

    def has_pending(self) -> bool:
        """Whether chunks that were pending when this save began still are. Never waits."""
        return self._pending.are_under_way()

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
        if self._result is None and self._run is not None and not self._is_inherited:
            self._is_expired = True
            self._run.cancel()
            self._acknowledge_end()

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's save."""
        return os.getpid() != self._pid

    def _end_inherited(self, state: SaveState) -> SaveResult:
        """The result in a forked child: only the parent can store what was reserved, and only the parent counts it."""
        if self._result is None:
            self._states = [state if entry == SaveState.RESERVED else entry for entry in self._states]
            self._result = SaveResult.of(self._states, self._retained)
        return self._result

    def _publish(self) -> None:
        if self._run is not None and self._copied():
            self._commit_reserved(self._run.checksums())
        self._end()

    def _copied(self) -> bool:
        """Whether every byte has been copied; else the save is given up."""
        assert self._run is not None
        stall = Stall(self._run, self._timeout_s)
        while not self._run.wait(stall.slice_s()):
            if stall.has_lasted():
                self._give_up(SaveState.TIMEOUT)
                return False
        if self._is_expired or self._run.is_cancelled():
            self._give_up(SaveState.DISCONNECTED)
            return False
        return True

    def _land_copied(self, run: SaveRun) -> None:
        """Report the layers copied so far, which other nodes may read before the commit; the last one comes with it."""
        assert self._session is not None
        if not self._session.welcome.remote_bytes or self._is_part:
            return  # there are no other nodes, or nobody can read a chunk before its other parts are there
        if self._landed >= min(run.copied_extents(), self.layers * self._groups - 1):
            return
        chunks = self._states.count(SaveState.RESERVED)
        sums = np.frombuffer(run.checksums_from(self._landed), "<u4").reshape(chunks, -1)
        at_once = m.COMMIT_BYTES_MAX // (CHECKSUM_BYTES * chunks)  # layers of one record
        for first in range(0, sums.shape[1] if at_once else 0, at_once or 1):
            part = sums[:, first : first + at_once]
            # Layers count only in order: without these, later ones would not.
            if not self._session.notify(one_way.LandSaved(self._reservation, self._landed, part.tobytes())):
                return
            self._landed += part.shape[1]

    @property
    def _chunks_reserved(self) -> list[int]:
        return [number for number, state in enumerate(self._states) if state == SaveState.RESERVED]

    def _announce_all(self) -> None:
        if self._result is None and self._run is not None and not self._is_inherited:
            self._run.announce_all()

    def _commit_of(self, checksums: bytes, tokens: bytes) -> CommitRequest:
        if self._group is None:
            return m.Commit(self._reservation, checksums, tokens, self._scope)
        return gm.CommitGroup(self._group, self._reservation, checksums, tokens, self._scope)

    def _as_one_commit(self) -> "tuple[Session, CommitRequest] | None":
        """The one request that publishes this save, once everything is copied; None where there is nothing to publish."""
        if self._result is not None or self._thread is not None or self._run is None or self._is_inherited:
            return None
        if not self._copied():
            return None
        assert self._session is not None
        commit = self._commit_of(self._run.checksums(), self._tokens)
        fits = len(commit.checksums) + len(commit.tokens) + len(commit.scope) <= m.COMMIT_BYTES_MAX
        return (self._session, commit) if fits else None

    def _note_committed(self, answer: m.Committed | None) -> None:
        """Take the answer to a commit of the whole save, or its absence."""
        if answer is None:
            self._give_up(SaveState.DISCONNECTED)
        else:
            for number, state in zip(self._chunks_reserved, answer.states, strict=True):
                self._states[number] = save_state_of(state)
            if SaveState.EXPIRED in self._states:
                self._acknowledge_end()
        self._end()

    def _commit_reserved(self, checksums: bytes) -> None:
        assert self._session is not None
        reserved = self._chunks_reserved
        chunk_bytes = CHECKSUM_BYTES * self._extents
        token_bytes = len(self._tokens) // max(1, len(reserved))
        batch = max(1, (m.COMMIT_BYTES_MAX - len(self._scope)) // (chunk_bytes + token_bytes))
        for first in range(0, len(reserved), batch):
            part = reserved[first : first + batch]
            data = checksums[first * chunk_bytes : (first + len(part)) * chunk_bytes]
            tokens = self._tokens[first * token_bytes : (first + len(part)) * token_bytes]
            try:
                failpoint.reach("client.save.before_commit", failpoint.unreachable)
                answer = self._session.call(self._commit_of(data, tokens), m.Committed)
                failpoint.reach("client.save.after_commit", failpoint.unreachable)
            except KVPoolError:
                self._give_up(SaveState.DISCONNECTED)
                return
            for number, state in zip(part, answer.states, strict=True):
                self._states[number] = save_state_of(state)
        if SaveState.EXPIRED in self._states:
            self._acknowledge_end()

    def _give_up(self, state: SaveState) -> None:
        if self._run is not None:
            self._run.cancel()
        state = SaveState.EXPIRED if self._is_expired else state
        self._states = [state if entry == SaveState.RESERVED else entry for entry in self._states]
        self._acknowledge_end()

    def _acknowledge_end(self) -> None:
        """Report that this client writes no longer to the reservation, so that its slots can be reused.

        If that fails, the connection ends, which has the same effect.
        """
        if self._reservation and self._session is not None and self._session.is_alive:
            try:
                failpoint.reach("client.end.before", failpoint.unreachable)
                self._session.drop_reservation(self._reservation)
            except KVPoolError as error:
                self._session.end(f"the end of a save could not be reported: {error}")

    def _end(self) -> None:
        if self._run is not None and self._session is not None:
            self._session.drop_save(self._run)
        if SaveState.PENDING in self._states:  # another save may have stored them meanwhile, of the same batch perhaps
            stored = iter(self._pending.are_stored())
            self._states = [
                SaveState.PRESENT if entry == SaveState.PENDING and next(stored) else entry for entry in self._states
            ]
        self._result = SaveResult.of(self._states, self._retained)
        self._on_end(self._result)


def started_commit(publish: Callable[[], None]) -> threading.Thread | None:
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
        mine = [save for save, (of, _) in commits.items() if of is session]
        answers: list[m.Committed | None] = [None] * len(mine)
        with contextlib.suppress(KVPoolError):  # each is declined: a commit that is not answered stored nothing
            failpoint.reach("client.save.before_commit", failpoint.unreachable)
            answers = call_each(session, [commits[save][1] for save in mine], m.Committed)
            failpoint.reach("client.save.after_commit", failpoint.unreachable)
        for save, answer in zip(mine, answers, strict=True):
            save._note_committed(answer)
    return [save.wait() for save in saves]
