"""Miss-ratio curve: hits that LRU of any size would have had, from reuse distances of a sample of the chunks.

Its input are leases (chunks that were found) and saves (chunks that were not), so each chunk that an engine needs counts once,
whether the pool had it or not. Chunks that an engine neither finds nor saves are not counted. A prompt that is found in part
counts in two pieces; the second one then counts as a little nearer than it is. In bytes, so chunks of different sizes add up.
Control thread only; `now_ns` is an argument.
"""

from collections.abc import Mapping, Sequence

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.ids import HoldId
from kvpool.key_column import KeyColumn

# 3.5 MiB of memory. On three traces half as many were within one point of the exact curve.
SAMPLES = 1 << 15
# At most one chunk in so many: those that a hold has without reading its keys.
RATE_MAX = kvpool_native.SAMPLED_SHARE
# The largest capacity of the curve, as a multiple of all tiers together.
HORIZON_FACTOR = 4
# References of six hours ago weigh half: the curve follows the day, and stays while there are no requests. A guess.
HALF_LIFE_NS = 6 * 3600 * NS_PER_S


class MissRatioCurve:
    """The miss-ratio curve of one daemon."""

    def __init__(self, directory: kvpool_native.Directory, tiers: Mapping[str, int]) -> None:
        """`tiers`: the capacity of each in bytes, by name."""
        self._directory = directory
        self._tiers = dict(tiers)
        self._horizon_bytes = HORIZON_FACTOR * sum(tiers.values())
        self.distances = kvpool_native.ReuseDistances(SAMPLES, self._horizon_bytes, RATE_MAX, HALF_LIFE_NS)

    def __repr__(self) -> str:
        return f"<MissRatioCurve {self.distances.sampled} chunks, one in {1 / self.distances.rate:.0f}>"

    def note_lease(self, holds: Sequence[HoldId], chunk_bytes: int, now_ns: int) -> None:
        """Chunks of so many bytes each were leased, with these holds in the DRAM directory."""
        self.distances.observe_holds(self._directory, holds, chunk_bytes, now_ns)

    def note_save(self, keys: KeyColumn, chunk_bytes: int, now_ns: int) -> None:
        """Chunks are to be saved. `keys`: the nearest to the root first."""
        self.distances.observe(keys.packed, chunk_bytes, now_ns)

    def report(self, capacities: Sequence[int]) -> dict[str, int | float | list[float]]:
        """The share of referenced bytes that LRU would have hit, for each capacity in bytes, and the sample behind it."""
        return {
            "hit_rates": [round(self.distances.hit_share(capacity), 6) for capacity in capacities],
            **{f"{name}_capacity_bytes": size for name, size in self._tiers.items()},
            "horizon_bytes": self._horizon_bytes,
            "referenced_bytes": int(self.distances.referenced_bytes),
            "sampled_chunks": self.distances.sampled,
            "sample_rate": round(self.distances.rate, 6),
        }

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        return self.distances.verify()
