"""Load: leased chunks on their way into engine memory, layer by layer.

    RUNNING ──every layer of every chunk good──► ENDED complete
       └──a chunk gone or corrupt, no progress, cancel, session lost before the start──► ENDED shorter

The native threads copy, verify each layer's checksum and re-read the slot's generation after the bytes have moved; this
class waits and reports. Copies per byte: one, arena to engine memory. A Load is used from one thread at a time, but for
`cancel` and for `Lease.release`, which waits for it. In a forked child it has ended: nothing copies there, so the child waits
for nothing and takes no lock that may have been held at the fork.
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from kvpool import failpoint
from kvpool.clock import Deadline
from kvpool.types import LoadReason
from kvpool_client.arguments import as_index
from kvpool_client.connection.stall import Stall
from kvpool_client.verbs.lease import LeaseHold
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

    def progress(self) -> int:
        """Units finished so far; rises while the run makes progress."""
        ...


class Load:
    """Leased chunks on their way into engine memory: what `Pool.load` answers at once, while native threads copy.

        for layer in range(layout.layers):
            is_whole = load.wait_layer(layer)         # False: it has ended shorter; `wait` has the number of chunks
        result = load.wait()                          # LoadResult(chunks, tokens, reason)

    Nothing raises because of the daemon: a load of which a chunk is gone or corrupt, or that makes no progress for the Pool's
    timeout, ends with fewer chunks, and the contents of the blocks behind them are undefined. Leaving it as a context waits for
    it, or cancels it where an exception leaves it. Threads: one at a time, but for `cancel`.
    """

    def __init__(
        self,
        lease: LeaseHold,
        run: LoadRun | None,
        *,
        first_chunk: int,
        chunk_tokens: int,
        layers: int,
        groups: int,
        timeout_s: float,
        ended_early: LoadReason = LoadReason.COMPLETE,
        on_end: Callable[["Load", LoadResult], None],
    ) -> None:
        """`groups`: head groups of a layer, each of which the run counts as a layer."""
        self.lease = lease
        self.first_chunk = first_chunk
        self._pid = os.getpid()
        self._run = run
        self._chunk_tokens = chunk_tokens
        self._layers = layers
        self._groups = groups
        self._timeout_s = timeout_s
        self._reason = ended_early
        self._result: LoadResult | None = None
        self._on_end = on_end
        self._ending = threading.RLock()  # releases of several leases that it was joined of wait for it at once

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
        return self._run is not None

    @property
    def chunks_so_far(self) -> int:
        """Leading chunks, counted from the root, that no check has failed yet."""
        if self._result is not None:
            return self._result.chunks
        return self.first_chunk + (self._run.chunks() if self._run is not None and not self._is_inherited else 0)

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until layer `layer` of the first `chunks_so_far` chunks is in place and its checksums were good.

        False: the load ended before that. A load that makes no progress for the Pool's timeout, or is not complete after
        `timeout_s` seconds, is ended. Raises InvalidArgument for a layer that is not there.
        """
        layer = as_index("layer", layer, self._layers - 1)
        run = self._run
        if run is None or self._is_inherited:
            return False
        deadline = Deadline(timeout_s) if timeout_s is not None else None
        stalled = Stall(run, self._timeout_s)
        extents = range(layer * self._groups, (layer + 1) * self._groups)
        return all(self._wait_extent(run, extent, stalled, deadline) for extent in extents)

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
        return self._result is not None or self._run is None or self._is_inherited or self._run.done()

    def wait(self, timeout_s: float | None = None) -> LoadResult:
        """Wait until the load has ended; one that is not complete after `timeout_s` seconds is ended, with reason
        `timeout`. Again: the same result."""
        return self.wait_watched(self.watch(), None if timeout_s is None else Deadline(timeout_s))

    def watch(self) -> Stall | None:
        """A watch for a load that makes no progress from now on; None where the load has ended."""
        if self._result is not None or self._run is None or self._is_inherited:
            return None
        return Stall(self._run, self._timeout_s)

    def wait_watched(self, stall: Stall | None, deadline: Deadline | None = None) -> LoadResult:
        """As `wait`, with a watch that was started before: loads that stall together are waited for once."""
        if stall is not None and self._result is None and self._run is not None and not self._is_inherited:
            while not self._run.wait(_slice_s(stall, deadline)):
                if stall.has_lasted() or (deadline is not None and deadline.has_passed()):
                    self._stop(LoadReason.TIMEOUT)
        return self._finish()

    def cancel(self) -> None:
        """End the load. After it returns no byte is written to engine memory."""
        if self._result is None and self._run is not None and not self._is_inherited:
            self._stop(LoadReason.CANCELLED)

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's load."""
        return os.getpid() != self._pid

    def _stop(self, reason: LoadReason) -> None:
        assert self._run is not None
        self._run.cancel()
        if self._run.reason() == LoadReason.CANCELLED:
            self._reason = reason

    def _finish(self) -> LoadResult:
        if self._result is None and self._is_inherited:
            reason = self._reason if self._run is None else LoadReason.DISCONNECTED
            self._result = LoadResult(self.first_chunk, self.first_chunk * self._chunk_tokens, reason.name.lower())
        elif self._result is None:
            with self._ending:
                return self._result or self._end()
        return self._result

    def _end(self) -> LoadResult:
        chunks, reason = 0, self._reason
        if self._run is not None:
            chunks, code = self._run.chunks(), LoadReason(self._run.reason())
            reason = code if code != LoadReason.CANCELLED or reason == LoadReason.COMPLETE else reason
        failpoint.reach("client.load.before_result")
        total = self.first_chunk + chunks
        result = self._result = LoadResult(total, total * self._chunk_tokens, reason.name.lower())
        self._on_end(self, result)
        return result


def _slice_s(stall: Stall, deadline: Deadline | None) -> float:
    slice_s = stall.slice_s()
    return slice_s if deadline is None else min(slice_s, deadline.remaining_s())
