"""Save with summaries: the KV first, then the summaries that are built from it where it lies.

    KV ──every layer in its slot──► summaries ──► in the slots, behind the layers
                                        └──saves by copy──► an array ──staging──► in the slots, behind the layers

A summary needs whole layers of a chunk, so nothing of it begins before the last layer was copied; whoever waits for the save
begins it. Has the methods of `save.SaveRun`. Copies per byte of a summary: none in place, two through staging.

Any thread. Lock: `_lock` guards which runs have begun, and is not held while anything is waited for.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool.layout import Layout
from kvpool_client.verbs.save import SaveRun

# Where saves are by copy, summaries are built here: uint8 [chunk][bytes of its summary extents].
SummaryBytes = npt.NDArray[np.uint8]


class SummaryRun(Protocol):
    """A run behind that of the KV: the summaries being built, or being copied through staging."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        ...

    def is_cancelled(self) -> bool:
        """Whether it ended without all its bytes."""
        ...

    def progress(self) -> int:
        """Units finished so far."""
        ...

    def checksums(self) -> bytes:
        """CRC-32C of the summary extents, u32 [chunk][extent]. Only after all of it was done."""
        ...

    def cancel(self) -> None:
        """End it; when it has returned, it writes nothing."""
        ...


class Summarizer(Protocol):
    """Native threads that build summaries: a `kvpool_native.CopyPool`."""

    def summarize(
        self,
        arena: kvpool_native.Mapping,
        offsets: bytes,
        target: SummaryBytes | None,
        *,
        form: str,
        dtype: str,
        head_dim: int,
        kv_heads: int,
        layers: int,
        layer_bytes: int,
        chunk_tokens: int,
        block_tokens: int,
        extents: int,
    ) -> SummaryRun:
        """Begin to build the summaries of the chunks at `offsets` of the arena into `extents` extents of each: behind its
        layers, or in `target`, which has one dimension."""
        ...


def begin_summaries(
    threads: Summarizer,
    arena: kvpool_native.Mapping,
    layout: Layout,
    *,
    offsets: npt.NDArray[np.uint64],
    target: SummaryBytes | None,
) -> SummaryRun:
    """Begin to build the summaries of chunks whose layers lie in the arena. `target`: None for behind these."""
    return threads.summarize(
        arena,
        offsets.tobytes(),
        None if target is None else target.reshape(-1),
        form=layout.summaries,
        dtype=layout.dtype,
        head_dim=layout.head_dim,
        kv_heads=layout.kv_heads,
        layers=layout.layers,
        layer_bytes=layout.layer_bytes,
        chunk_tokens=layout.chunk_tokens,
        block_tokens=layout.summary_block_tokens,
        extents=layout.summary_extents,
    )


class SummarizedSave:
    """The run of one save with summaries.

    Invariant: `_begun` are the first ones of `further`, each begun when the one before it had done everything; none begins
    once the save is cancelled.
    """

    def __init__(self, kv: SaveRun, further: Sequence[Callable[[], SummaryRun]], layout: Layout) -> None:
        """`further`: what begins each run behind that of the KV. The checksums of summaries are those of the last one."""
        assert further
        self._kv = kv
        self._further = further
        self._layers = layout.layers
        self._summary_extents = layout.summary_extents
        self._lock = threading.Lock()
        self._announced: set[int] = set()  # guarded by _lock
        self._begun: list[SummaryRun] = []  # guarded by _lock
        self._is_cancelled = False  # guarded by _lock

    def __repr__(self) -> str:
        return f"<SummarizedSave {len(self._begun)} of {len(self._further)} runs begun behind the KV>"

    def announce(self, layer: int) -> bool:
        """Copy this layer from now on; False if it was announced before."""
        with self._lock:
            self._announced.add(layer)
        return self._kv.announce(layer)

    def announce_all(self) -> None:
        """Copy every layer that was not announced."""
        with self._lock:
            self._announced.update(range(self._layers))
        self._kv.announce_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether every announced layer was copied and, once all are announced, the summaries were built; or the save was
        cancelled. Begins what is due."""
        deadline = Deadline(timeout_s)
        if not self._kv.wait(timeout_s):
            return False
        for number in range(len(self._further)):
            run = self._run(number)
            if run is None:
                return True
            if not run.wait(deadline.remaining_s()):
                return False
        return True

    def is_cancelled(self) -> bool:
        """Whether the save was cancelled, or ended without all its bytes."""
        with self._lock:
            runs = list(self._begun)
            if self._is_cancelled:
                return True
        return self._kv.is_cancelled() or any(run.is_cancelled() for run in runs)

    def progress(self) -> int:
        """Units finished so far, of all runs."""
        with self._lock:
            runs = list(self._begun)
        return self._kv.progress() + sum(run.progress() for run in runs)

    def checksums(self) -> bytes:
        """CRC-32C of every extent, u32 [chunk][extent]: layers, then summaries. Only after everything was copied."""
        with self._lock:
            if len(self._begun) < len(self._further):
                return b""
            last = self._begun[-1]
        layers = np.frombuffer(self._kv.checksums(), "<u4").reshape(-1, self._layers)
        summaries = np.frombuffer(last.checksums(), "<u4").reshape(-1, self._summary_extents)
        return np.concatenate((layers, summaries), axis=1).tobytes()

    def copied_extents(self) -> int:
        """Extents copied, from the first one up to one that is not; summaries are not counted."""
        return self._kv.copied_extents()

    def checksums_from(self, layer: int) -> bytes:
        """CRC-32C of the extents from this one on that `copied_extents` counts, u32 [chunk][extent]."""
        return self._kv.checksums_from(layer)

    def cancel(self) -> None:
        """End the save; when it has returned, it writes no byte of the slots."""
        with self._lock:
            self._is_cancelled = True
            runs = list(self._begun)
        self._kv.cancel()
        for run in runs:
            run.cancel()

    def _run(self, number: int) -> SummaryRun | None:
        """The run with this number behind the KV's, begun where it was not; None where it may not begin: layers are not
        announced yet, or the save is cancelled. REQUIRES: what was announced is copied, and the runs before have ended."""
        with self._lock:
            if self._is_cancelled or len(self._announced) < self._layers or self._has_failed():
                return None
            if number == len(self._begun):
                try:
                    self._begun.append(self._further[number]())
                except (
                    KVPoolError,
                    ValueError,
                ):  # a reservation that names memory which is not there: nothing is published
                    self._is_cancelled = True
                    return None
            return self._begun[number]

    def _has_failed(self) -> bool:
        return self._kv.is_cancelled() or any(run.is_cancelled() for run in self._begun)
