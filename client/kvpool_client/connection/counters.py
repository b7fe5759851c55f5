"""Counters of one Pool: totals by name for `Pool.stats()`, and changes since the last report for the daemon's metrics.

Counting costs an engine's call one short lock and no request: the link's thread sends the changes, at most once a second. While
the daemon is away they add up here, in constant memory. What is counted far more often is counted elsewhere first, and added
here when `reports_taken` has risen, which costs a comparison.

Any thread. Lock: `_lock` guards both tables; never held across a request.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence

from kvpool.protocol import usage
from kvpool.states import CLIENT_DECLINES, LEVELS, Level, LoadReason
from kvpool_client.verbs.results import LoadResult, SaveResult

_DRAM = int(Level.DRAM)
_DRAM_ALONE = bytes([_DRAM])
_DECLINES = {state.reason: usage.DECLINED_CHUNKS + index for index, state in enumerate(CLIENT_DECLINES)}


class Counters:
    """The counters of one Pool. Invariant: `_unsent` has `usage.COUNTS` numbers, none negative."""

    def __init__(self, *, counts_chunks: bool = True) -> None:
        """`counts_chunks`: whether the daemon is to count the chunks of lookups and loads; not for a rank whose share of them
        another rank counts with its own."""
        self._counts_chunks = counts_chunks
        self._lock = threading.Lock()
        self._totals: dict[str, int] = defaultdict(int)  # guarded by _lock
        self._unsent = [0] * usage.COUNTS  # guarded by _lock
        self._has_unsent = False  # guarded by _lock
        self.reports_taken = 0  # how often changes were taken for a report; written under _lock, read without

    def totals(self) -> dict[str, int]:
        """Every counter since the Pool was made."""
        with self._lock:
            return dict(self._totals)

    def count(self, name: str, amount: int) -> None:
        """Add to a counter that only this Pool shows."""
        with self._lock:
            self._totals[name] += amount

    def count_lookup(self, asked: int, tiers: bytes) -> None:
        """A lookup of `asked` chunks found `tiers`: the level of each chunk of the hit."""
        with self._lock:
            totals, unsent = self._totals, self._unsent
            totals["lookups"] += 1
            totals["lookup_hit_chunks"] += len(tiers)
            unsent[usage.LOOKUPS] += 1
            if self._counts_chunks:
                unsent[usage.LOOKUP_CHUNKS] += asked
                if tiers:
                    self._add_levels(usage.HIT_CHUNKS, tiers)
            self._has_unsent = True

    def count_load(self, tiers: bytes, result: LoadResult) -> None:
        """A load has ended. `tiers`: the level of each chunk that was loaded."""
        with self._lock:
            totals = self._totals
            totals["loads"] += 1
            totals["loaded_chunks"] += len(tiers)
            totals[f"loads_{result.reason}"] += 1
            self._unsent[usage.LOADS] += 1
            if self._counts_chunks:
                self._add_levels(usage.LOADED_CHUNKS, tiers)
            reason = LoadReason[result.reason.upper()]
            self._unsent[usage.FAILED_LOADS + reason] += reason is not LoadReason.COMPLETE
            self._has_unsent = True

    def count_save(self, result: SaveResult) -> None:
        """A save has ended."""
        with self._lock:
            totals = self._totals
            totals["saves"] += 1
            totals["saved_chunks"] += result.stored
            totals["present_chunks"] += result.present
            totals["part_chunks"] += result.part
            totals["clipped_chunks"] += result.clipped
            for reason, count in result.reasons.items():
                totals[f"declined_{reason.replace('-', '_')}"] += count
                place = _DECLINES.get(reason)
                if place is not None:
                    self._unsent[place] += count
                    self._has_unsent = True

    def count_sparse(self, changes: Sequence[int]) -> None:
        """Steps of a sparse sequence since it last counted any, as `SPARSE_COUNTS`."""
        with self._lock:
            for place, change in enumerate(changes, usage.SPARSE):
                self._unsent[place] += change
            self._has_unsent = True

    def take_unsent(self) -> list[int]:
        """Changes since the last report, for `usage.pack`; empty if there are none."""
        with self._lock:
            self.reports_taken += 1
            if not self._has_unsent:
                return []
            taken, self._unsent = self._unsent, [0] * usage.COUNTS
            self._has_unsent = False
            return taken

    def put_back(self, counts: list[int]) -> None:
        """Add a report that could not be sent to the next one."""
        with self._lock:
            self._unsent = [kept + more for kept, more in zip(self._unsent, counts, strict=True)]
            self._has_unsent = True

    def _add_levels(self, first: int, tiers: bytes) -> None:
        """Most hits are in one tier, which a comparison shows; to count a byte takes 2 ns for each that there is (measured)."""
        if tiers == _DRAM_ALONE * len(tiers):
            self._unsent[first + _DRAM] += len(tiers)
            return
        for level in range(LEVELS):
            self._unsent[first + level] += tiers.count(level)
