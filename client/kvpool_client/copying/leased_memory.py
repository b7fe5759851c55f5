"""Leased memory: the chunks of a lease where they lie in the pool, for readers that copy only a part of them, or
nothing.

    leased ──verify──► good chunks ──read──► are_current: what was read counts ──…──► close

A lease keeps its chunks in their places; it is renewed until `close`, however long that takes. But a daemon that
ends, or that hears nothing of this client for too long, gives the slots away, and where saves are in place another
client may overwrite them by mistake. So bytes count only when they were verified once, and when the chunk's
generation stands after each read of them.

The memory stays mapped as long as this object lives, when the session has ended too: reading it is never a fault. But
in a forked child it is not mapped. Any thread, but for `close`. Holds no lock of its own.
"""

import os
import sys
from collections.abc import Callable
from types import TracebackType

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool_client.arguments import as_index
from kvpool_client.connection.link import Link
from kvpool_client.verbs.lease import LeaseHold
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.results import LoadResult

Addresses = npt.NDArray[np.uint64]
# In the number of layers that have landed: no more of the chunk come.
_LANDING_FAILED = 1 << 31


class LeasedMemory:
    """The `chunks` chunks of a lease where they lie in the pool, to be read there: what `Pool.leased_memory` answers. 0 chunks
    where the lease had ended before.

    Bytes count only where `verify` found them good, and where `are_current` counts their chunk after they were read: the daemon
    may give the memory away when it ends. The lease is renewed until `close`; the memory stays mapped, but not in a forked
    child. Threads: any, but for `close`.
    """

    def __init__(self, link: Link, lease: LeaseHold, begin_check: Callable[[LeaseHold, int], Load]) -> None:
        """`begin_check`: begins to compare a lease's KV with its checksums where it lies. Raises InvalidArgument
        where the lease names memory that is not there."""
        session = lease.session
        self.lease = lease
        self.layout = lease.layout
        self.chunks = lease.chunks if session is not None and lease.is_live else 0
        self._link = link
        self._pid = os.getpid()
        self._begin_check = begin_check
        rows = lease.rows
        self._offsets, self._slots = rows.offsets[: self.chunks], rows.slots[: self.chunks]
        self._generations = rows.generations[: self.chunks]
        self._is_closed = True
        if session is None or not self.chunks:
            return
        self._arena: kvpool_native.Mapping = session.arena
        self._index: kvpool_native.IndexView = session.index
        self._bytes = self._arena.view()  # keeps the arena mapped
        if int(self._offsets.max()) > self._arena.size - self.layout.stored_bytes:
            raise InvalidArgument(f"the lease names memory that is not there: {lease!r}")
        link.use_lease(session, lease.id, lease.renewal)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LeasedMemory {self.chunks} chunks, {'closed' if self._is_closed else 'open'}>"

    def __enter__(self) -> "LeasedMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A finalizer, also of an interpreter that ends: see `endings`.
        session = self.lease.session
        if not self._is_closed and session is not None and session.is_alive and not sys.is_finalizing():
            session.endings.add_forgotten("never closed; its lease is not renewed for it any more", self, self._end_use)

    @property
    def layers(self) -> Addresses:
        """Addresses at which the chunks' layers begin, uint64 [chunks]: KV, layer by layer, `layout.layer_bytes` each."""
        if not self.chunks:
            return np.empty(0, np.uint64)
        return self._offsets + np.uint64(self._bytes.ctypes.data)

    @property
    def summaries(self) -> Addresses:
        """Addresses at which the chunks' summaries begin, uint64 [chunks], each with [layer][block][KV head]; at the end of the
        chunk in a layout without them."""
        return self.layers + np.uint64(self.layout.chunk_bytes)

    def verify(self, first_chunk: int = 0, timeout_s: float | None = None) -> LoadResult:
        """Compare the KV of chunks from `first_chunk` on with its checksums where it lies; the leading ones that are
        good, and why no more. Those before were verified already.

        Waits for chunks that are still on their way from another tier or node, as a load does, `timeout_s` seconds at most;
        counts as a load of them. Raises InvalidArgument.
        """
        first_chunk = as_index("first_chunk", first_chunk, self.lease.chunks)
        return self._begin_check(self.lease, first_chunk).wait(timeout_s)

    def good_summaries(self, first_chunk: int = 0) -> npt.NDArray[np.bool_]:
        """Whether the summaries of each chunk from `first_chunk` on have their checksums, bool [chunks]. Waits for nothing:
        those of a chunk that is still on its way are not good yet. Raises InvalidArgument for a layout without summaries."""
        layout = self.layout
        if not layout.summaries:
            raise InvalidArgument("the layout has no summaries")
        return np.fromiter((self._has_good_summaries(number) for number in range(first_chunk, self.chunks)), np.bool_)

    def are_current(self) -> int:
        """How many leading chunks still have the generation that was leased: what was read of them before counts."""
        if not self.chunks or os.getpid() != self._pid:
            return 0  # in a forked child nothing is mapped
        return self._index.count_current(self._slots.tobytes(), self._generations.tobytes())

    def close(self) -> None:
        """Renew the lease no longer, and release it. Idempotent. The memory stays mapped."""
        if not self._is_closed:
            self._end_use()
            self.lease.release()

    def _end_use(self) -> None:
        self._is_closed = True
        if self.lease.session is not None:
            self._link.unuse_lease(self.lease.session, self.lease.id)

    def _has_good_summaries(self, number: int) -> bool:
        if os.getpid() != self._pid:
            return False
        layout, index, slot = self.layout, self._index, int(self._slots[number])
        if not layout.extents <= index.landed_at(slot) < _LANDING_FAILED:
            return False
        start = int(self._offsets[number]) + layout.chunk_bytes
        found = kvpool_native.extent_checksums(self._arena, start, layout.layer_bytes, layout.summary_extents)
        expected = [index.checksum_at(slot, extent) for extent in range(layout.layers, layout.extents)]
        one = slice(number, number + 1)
        is_current = index.count_current(self._slots[one].tobytes(), self._generations[one].tobytes()) == 1
        return is_current and np.frombuffer(found, "<u4").tolist() == expected
