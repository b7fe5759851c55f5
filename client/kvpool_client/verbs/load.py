"""Load: leased chunks on their way into engine memory, layer by layer, of every group of the layout.

    RUNNING ──every layer of every chunk good──► ENDED complete
       └──a chunk gone or corrupt, no progress, cancel, session lost before the start──► ENDED shorter

A prompt goes on from the last chunk that every group has. Full groups have it for each of their leading chunks; windows and
states are there for the end of the hit alone, so that with them a load that is not complete brings nothing.

The native threads copy, verify each layer's checksum and re-read the slot's generation after the bytes have moved; this
class waits and reports. Copies per byte: one, arena to engine memory. A Load is used from one thread at a time, but for
`cancel` and for `Lease.release`, which waits for it. In a forked child it has ended: nothing copies there, so the child waits
for nothing and takes no lock that may have been held at the fork.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from kvpool import failpoint
from kvpool.clock import Deadline
from kvpool.states import LoadReason
from kvpool_client.arguments import as_group, as_index
from kvpool_client.connection.stall import Stall
from kvpool_client.verbs.lease import LeaseHold
from kvpool_client.verbs.leased_rows import LeasedRows
from kvpool_client.verbs.results import LoadResult


class LoadRun(Protocol):
    """The copy behind a load: a native job, or a device's staged copy."""

    def wait_extent(self, extent: int, timeout_s: float) -> int:
        """1 when the extent of the first `chunks()` chunks is in place, 0 when the run ended before, -1 when time ran out."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until the run has ended; whether that happened within the time."""
        ...

    def done(self) -> bool:
        """Whether the run has ended."""
        ...

    def cancel(self) -> None:
        """End the run; when it has returned, it writes no byte."""
        ...

    def chunks(self) -> int:
        """Leading chunks that have not failed."""
        ...

    def reason(self) -> int:
        """A `LoadReason` code, COMPLETE while nothing has failed."""
        ...

    def reasons(self) -> bytes:
        """Of a set, a code of each chunk, CANCELLED for one without a verdict."""
        ...

    def progress(self) -> int:
        """Units finished so far; rises while the run makes progress."""
        ...


@dataclass(slots=True, eq=False)
class LoadedRun:
    """What a load brings of the chunks of one group, which are `rows`. `layers`: of the engine; `head_groups`: of a layer, each
    of which is an extent of the run. `run`: copies them; None where there are none, or it did not begin. `reason`: why it did
    not, or why the load has ended it; else COMPLETE."""

    rows: LeasedRows
    layers: int
    head_groups: int
    run: LoadRun | None
    reason: LoadReason

    @property
    def good(self) -> int:
        """How many leading chunks no check has failed yet."""
        return self.run.chunks() if self.run is not None else 0

    @property
    def end_reason(self) -> LoadReason:
        """Why it has ended, where it has."""
        found = LoadReason(self.run.reason()) if self.run is not None else self.reason
        return self.reason if found == LoadReason.CANCELLED and self.reason != LoadReason.COMPLETE else found

    def stop(self, reason: LoadReason) -> None:
        """End it."""
        if self.run is not None:
            self.run.cancel()
            if self.run.reason() == LoadReason.CANCELLED:
                self.reason = reason


@dataclass(slots=True, eq=False)
class BegunLoad:
    """What a load begins with. `lease`: does not end before it; it has `chunks` chunks. `runs`: of each group from
    `first_group` on; `has_windows`: some are of windows or states."""

    lease: LeaseHold
    runs: Sequence[LoadedRun]
    first_chunk: int
    chunks: int
    chunk_tokens: int
    has_groups: bool
    has_windows: bool
    timeout_s: float
    on_end: "Callable[[Load, LoadResult], None]"
    first_group: int = 0


class Load:
    """Leased chunks on their way into engine memory: what `Pool.load` answers at once, while native threads copy.

        for layer in range(layout.layers):
            is_whole = load.wait_layer(layer)         # False: it has ended shorter; `wait` has the number of chunks
        result = load.wait()                          # LoadResult(chunks, tokens, reason)

    Nothing raises because of the daemon: a load of which a chunk is gone or corrupt, or that makes no progress for the Pool's
    timeout, ends with fewer chunks, and the contents of the blocks behind them are undefined; with windows or states no more
    count then than the engine had before. Of a layout with groups it is a load of them all. Leaving it as a context waits for
    it, or cancels it where an exception leaves it. `chunks`: what is leased, counted from the root. Threads: one at a time, but
    for `cancel`.
    """

    def __init__(self, begun: BegunLoad) -> None:
        self.lease = begun.lease
        self.first_chunk = begun.first_chunk
        self.chunks = begun.chunks
        self.runs = begun.runs
        self._pid = os.getpid()
        self._begun = begun
        self._running = [loaded.run for loaded in begun.runs if loaded.run is not None]
        self._result: LoadResult | None = None
        self._ending = threading.RLock()  # whoever has it and the release of its lease wait for it at once

    def __repr__(self) -> str:
        return f"<Load {self.chunks_so_far} chunks, {self._result.reason if self._result else 'running'}>"

    def __enter__(self) -> "Load":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.cancel()
        self.wait()

    @property
    def is_begun(self) -> bool:
        """Whether it copies, or has copied: else there was nothing to load."""
        return bool(self._running)

    @property
    def chunks_so_far(self) -> int:
        """Leading chunks, counted from the root, that no check has failed yet."""
        if self._result is not None:
            return self._result.chunks
        return self.first_chunk if self._is_inherited else self._good_chunks([loaded.good for loaded in self.runs])

    def wait_layer(self, layer: int, timeout_s: float | None = None, group: int | None = None) -> bool:
        """Wait until layer `layer` of the first `chunks_so_far` chunks is in place and its checksums were good. `group`: of
        which it is, where the layout has groups; None: the first one, or a set's own; of a window or a state all its chunks
        have to be.

        False: the load ended before that. A load that makes no progress for the Pool's timeout, or is not complete after
        `timeout_s` seconds, is ended. Raises InvalidArgument for a layer or a group that is not there.
        """
        first = self._begun.first_group
        loaded = self.runs[as_group(group, range(first, first + len(self.runs))) - first]
        layer = as_index("layer", layer, loaded.layers - 1)
        run = loaded.run
        if self._is_inherited:
            return False
        if run is None:
            return loaded.reason == LoadReason.COMPLETE
        deadline = Deadline(timeout_s) if timeout_s is not None else None
        stalled = Stall(self, self._begun.timeout_s)
        extents = range(layer * loaded.head_groups, (layer + 1) * loaded.head_groups)
        is_in_place = all(self._wait_extent(run, extent, stalled, deadline) for extent in extents)
        return is_in_place and (not self._begun.has_windows or loaded.good == len(loaded.rows))

    def _wait_extent(self, run: LoadRun, extent: int, stalled: Stall, deadline: Deadline | None) -> bool:
        code = -1
        while code == -1:
            code = run.wait_extent(extent, _slice_s(stalled, deadline))
            if code == -1 and (stalled.has_lasted() or (deadline is not None and deadline.has_passed())):
                self._stop(LoadReason.TIMEOUT)
                return False
        return code == 1

    def done(self) -> bool:
        """Whether the load has ended."""
        return self._result is not None or self._is_inherited or all(run.done() for run in self._running)

    def wait(self, timeout_s: float | None = None) -> LoadResult:
        """Wait until the load has ended; one that is not complete after `timeout_s` seconds is ended, with reason
        `timeout`. Again: the same result."""
        return self.wait_watched(self.watch(), None if timeout_s is None else Deadline(timeout_s))

    def watch(self) -> Stall | None:
        """A watch for a load that makes no progress from now on; None where the load has ended."""
        if self._result is not None or not self._running or self._is_inherited:
            return None
        return Stall(self, self._begun.timeout_s)

    def progress(self) -> int:
        """Units finished so far, of all groups; rises while it makes progress."""
        return sum([run.progress() for run in self._running])

    def wait_watched(self, stall: Stall | None, deadline: Deadline | None = None) -> LoadResult:
        """As `wait`, with a watch that was started before: loads that stall together are waited for once."""
        if stall is not None and self._result is None and not self._is_inherited:
            for run in self._running:
                while not run.wait(_slice_s(stall, deadline)):
                    if stall.has_lasted() or (deadline is not None and deadline.has_passed()):
                        self._stop(LoadReason.TIMEOUT)
        return self._finish()

    def cancel(self) -> None:
        """End the load. After it returns no byte is written to engine memory."""
        if self._result is None and self._running and not self._is_inherited:
            self._stop(LoadReason.CANCELLED)

    def loaded_levels(self) -> bytes:
        """The level that each loaded chunk had when it was leased. REQUIRES: it has ended."""
        assert self._result is not None
        return self.lease.tiers.tobytes()[self.first_chunk : self._result.chunks]

    def corrupt_places(self) -> list[tuple[int, int]]:
        """Which chunks had other checksums than their bytes: the daemon's numbers of the lease and of the rows."""
        return [loaded.rows.place_of(loaded.good) for loaded in self.runs if loaded.end_reason == LoadReason.CHECKSUM]

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's load."""
        return os.getpid() != self._pid

    def _stop(self, reason: LoadReason) -> None:
        for loaded in self.runs:
            loaded.stop(reason)

    def _good_chunks(self, good: Sequence[int]) -> int:
        """Leading chunks, counted from the root, where each group has so many of its own."""
        missing = max([len(loaded.rows) - count for loaded, count in zip(self.runs, good, strict=True)])
        return self.first_chunk if missing and self._begun.has_windows else self.chunks - missing

    def _finish(self) -> LoadResult:
        if self._result is None and self._is_inherited:
            reason = LoadReason.DISCONNECTED if self._running else self._reason_of([each.reason for each in self.runs])
            self._result = self._result_of(self.first_chunk, reason)
        elif self._result is None:
            with self._ending:
                return self._result or self._end()
        return self._result

    def _end(self) -> LoadResult:
        good = [loaded.good for loaded in self.runs]
        reasons = [loaded.end_reason for loaded in self.runs]
        failpoint.reach("client.load.before_result")
        result = self._result_of(self._good_chunks(good), self._reason_of(reasons))
        if self._begun.has_groups:
            ends = [self.chunks - len(loaded.rows) + count for loaded, count in zip(self.runs, good, strict=True)]
            result = replace(result, groups=tuple(map(self._result_of, ends, reasons)))
        self._result = result
        self._begun.on_end(self, result)
        return result

    @staticmethod
    def _reason_of(reasons: Sequence[LoadReason]) -> LoadReason:
        """Reason of the first group that is not complete."""
        return next((reason for reason in reasons if reason != LoadReason.COMPLETE), LoadReason.COMPLETE)

    def _result_of(self, chunks: int, reason: LoadReason) -> LoadResult:
        return LoadResult(chunks, chunks * self._begun.chunk_tokens, reason.name.lower())


def _slice_s(stall: Stall, deadline: Deadline | None) -> float:
    slice_s = stall.slice_s()
    return slice_s if deadline is None else min(slice_s, deadline.remaining_s())
