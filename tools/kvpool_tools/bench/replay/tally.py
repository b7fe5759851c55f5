"""Sums of a replay: counts, rates and latencies of all its requests. Main thread of a command only.

Rates are of one client: bytes of a load over the seconds of that load. Invariant: every request that was served is
counted once, and the sums are of the same requests as the samples.
"""

from collections import Counter
from dataclasses import dataclass, field

from kvpool_tools.bench.measure import median, quantiles_us, rates
from kvpool_tools.bench.replay.client import WRONG_NAMED_MAX, RequestResult


@dataclass(slots=True)
class Samples:
    """One kind of step: the seconds of each, and of those that moved bytes their GB/s."""

    seconds: list[float] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)
    moved_bytes: int = 0

    def add_step(self, seconds: float, moved_bytes: int) -> None:
        """Count one step."""
        self.seconds.append(seconds)
        self.moved_bytes += moved_bytes
        if moved_bytes:
            self.gb_per_s.append(moved_bytes / seconds / 1e9)

    @property
    def total_gb_per_s(self) -> float:
        """All bytes over all seconds, large steps weighing as much as they moved."""
        total_s = sum(self.seconds)
        return self.moved_bytes / total_s / 1e9 if total_s else 0.0


class Tally:
    """Sums over served requests."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self.requests = 0
        self.loaded_chunks = 0
        self.loaded_ssd_chunks = 0
        self.stored_chunks = 0
        self.present_chunks = 0
        self.leases_short = 0
        self.wrong_bytes = 0
        self.wrong_keys: list[str] = []
        self.loads_short: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self._hits = Samples()
        self._misses = Samples()
        self._loads = Samples()
        self._saves = Samples()
        self._floor = Samples()

    def add_request(self, served: RequestResult) -> None:
        """Count one request."""
        self.requests += 1
        self.loaded_chunks += served.loaded_chunks
        self.loaded_ssd_chunks += served.loaded_ssd_chunks
        self.stored_chunks += served.stored_chunks
        self.present_chunks += served.present_chunks
        self.declined.update(served.declined)
        self.wrong_bytes += served.wrong_bytes
        self.wrong_keys += served.wrong_keys[: WRONG_NAMED_MAX - len(self.wrong_keys)]
        self.leases_short += served.leased_chunks < served.hit_chunks
        if served.load_reason not in ("", "complete"):
            self.loads_short[served.load_reason] += 1
        if served.chunks:
            (self._hits if served.hit_chunks else self._misses).add_step(served.acquire_s, 0)
        if served.leased_chunks:
            self._loads.add_step(served.load_s, served.loaded_chunks * self._chunk_bytes)
        if served.loaded_chunks < served.chunks:
            self._saves.add_step(served.save_s, served.stored_chunks * self._chunk_bytes)
        if served.memcpy_bytes:
            self._floor.add_step(served.memcpy_s, served.memcpy_bytes)

    def counts(self) -> dict[str, object]:
        """Columns: chunks by result. `verified_chunks` were loaded and compared byte for byte."""
        return {
            "verified_chunks": self.loaded_chunks,
            "wrong_bytes": self.wrong_bytes,
            "wrong_keys": self.wrong_keys,
            "loads_short": dict(self.loads_short),
            "leases_short": self.leases_short,
            "saved_chunks": self.stored_chunks,
            "present_chunks": self.present_chunks,
            "saves_declined": dict(self.declined),
        }

    def by_tier(self, *, chunk_tokens: int, input_tokens: int, ssd_written_bytes: int) -> dict[str, object]:
        """Columns: hits by tier, and the bytes written to the disk for them (None: no hits from it)."""
        tokens = {
            "dram": (self.loaded_chunks - self.loaded_ssd_chunks) * chunk_tokens,
            "ssd": self.loaded_ssd_chunks * chunk_tokens,
        }
        hit_bytes = self.loaded_ssd_chunks * self._chunk_bytes
        return {
            **{f"hit_tokens_{tier}": count for tier, count in tokens.items()},
            **{f"hit_rate_{tier}": round(count / input_tokens, 4) for tier, count in tokens.items()},
            "ssd_hit_bytes": hit_bytes,
            "ssd_written_bytes": ssd_written_bytes,
            "ssd_written_per_hit_byte": round(ssd_written_bytes / hit_bytes, 3) if hit_bytes else None,
        }

    def speeds(self) -> dict[str, object]:
        """Columns: rates with their floor, and latencies."""
        memcpy = median(self._floor.gb_per_s)
        parts = {"load": self._loads, "save": self._saves}
        ratios = {name: round(median(part.gb_per_s) / memcpy, 2) if memcpy else None for name, part in parts.items()}
        return {
            **rates("memcpy", self._floor.gb_per_s),
            **rates("load", self._loads.gb_per_s),
            "load_ratio": ratios["load"],
            "load_total_gb_per_s": round(self._loads.total_gb_per_s, 2),
            **rates("save", self._saves.gb_per_s),
            "save_ratio": ratios["save"],
            "save_total_gb_per_s": round(self._saves.total_gb_per_s, 2),
            **quantiles_us("miss_", self._misses.seconds),
            **quantiles_us("acquire_", self._hits.seconds),
            **quantiles_us("load_", self._loads.seconds),
            **quantiles_us("save_", self._saves.seconds),
        }
