"""Usage: what clients report and what the daemon has counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvpool.states import LEVELS


@dataclass(frozen=True, slots=True)
class SparseUsage:
    """Compute by lookup: steps of sparse sequences. Blocks and KV heads count for each KV head of each layer of each recall.

    `kept_mass_millionths`: the sum, over query heads, of the estimated share of the middle blocks' mass that was recalled.
    From `staging_wanted_blocks` on: steps on devices. `repeated_blocks`: of `compared_blocks`, those that the layer's step
    before wanted as well.
    """

    recalls: int = 0
    recalled_blocks: int = 0
    middle_blocks: int = 0
    kv_heads: int = 0
    dense_kv_heads: int = 0
    query_heads: int = 0
    kept_mass_millionths: int = 0
    fetched_blocks: int = 0
    built_summaries: int = 0
    lost_sequences: int = 0
    reattached_sequences: int = 0
    staging_wanted_blocks: int = 0
    staging_hit_blocks: int = 0
    staging_prefetched_blocks: int = 0
    staging_copied_blocks: int = 0
    compared_blocks: int = 0
    repeated_blocks: int = 0


# The names of these counts, in the order of usage reports.
SPARSE_COUNTS = tuple(count.name for count in fields(SparseUsage))
MASS_UNIT = 1_000_000


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage of one client since its last report, in chunks.

    `hit_chunks` and `loaded_chunks` are by level, `failed_loads` by `LoadReason`, `declined_chunks` as CLIENT_DECLINES.
    """

    lookups: int
    lookup_chunks: int
    loads: int
    hit_chunks: tuple[int, ...]
    loaded_chunks: tuple[int, ...]
    failed_loads: tuple[int, ...]
    declined_chunks: tuple[int, ...]
    sparse: SparseUsage


@dataclass(slots=True)
class ModelUsage:
    """Usage of one model since the daemon's start; tuples are by level. The table that counts changes its own."""

    lookups: int = 0
    lookup_tokens: int = 0
    lookup_bytes: int = 0
    hit_tokens: tuple[int, ...] = (0,) * LEVELS
    hit_bytes: tuple[int, ...] = (0,) * LEVELS
    loads: int = 0
    loaded_tokens: tuple[int, ...] = (0,) * LEVELS
    loaded_bytes: tuple[int, ...] = (0,) * LEVELS
    stored_chunks: int = 0
    stored_tokens: int = 0
    stored_bytes: int = 0
    sparse: SparseUsage = SparseUsage()

    @property
    def missed_tokens(self) -> int:
        """Tokens looked up that no tier had."""
        return self.lookup_tokens - sum(self.hit_tokens)

    @property
    def missed_bytes(self) -> int:
        """Bytes of the chunks looked up that no tier had."""
        return self.lookup_bytes - sum(self.hit_bytes)


@dataclass(frozen=True, slots=True)
class ClientFailures:
    """Failures in clients that do not belong to one model, by word, and counts of their reports."""

    failed_loads: dict[str, int]
    declined_chunks: dict[str, int]
    usage_reports: int
    clamped_values: int


@dataclass(frozen=True, slots=True)
class Measurements:
    """All counters of a pool, at one moment. `directory`: those of the native directory.

    `tiers`: the counters of each tier beside the arena, by its name; `classes`: the slots of each lower one by size class, as
    `classes` in `directory`. `chunks`: those that the arena or a lower tier has, each counted once; `evicted_chunks`: evicted
    from the last of these tiers that had them. `held_by_model`, `held_by_user`: bytes of DRAM that cannot be evicted now, by
    the model of the chunks, and by the user whose connections protect them.
    """

    server: Mapping[str, int]
    index: Mapping[str, int]
    directory: Mapping[str, Any]
    capacity_bytes: int
    resident_bytes: int
    huge_bytes: int
    is_settling: bool
    models: Mapping[str, ModelUsage]
    failures: ClientFailures
    chunks: int
    evicted_chunks: int
    held_by_model: Mapping[str, int] = field(default_factory=dict)
    held_by_user: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, Mapping[str, int | float | str]] = field(default_factory=dict)
    classes: Mapping[str, Sequence[Mapping[str, int]]] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
