"""Tally of a sequence's steps: what was recalled, how much of the mass, how often heads were attended whole; and its
reports.

A sequence adds the changes of its tally to its Pool's counters at the first step after a report was taken from these,
and when it closes; the Pool reports them to the daemon. So a step costs a comparison, and sequences of a Pool share
reports. What a sequence at rest has not added waits for its next step. One thread at a time.
"""

from dataclasses import asdict, astuple, dataclass, replace

from kvpool.usage import MASS_UNIT, SparseUsage
from kvpool_client.connection.counters import Counters
from kvpool_sparse.results import Recall


@dataclass(slots=True)
class Tally:
    """Counts since the sequence began. A head is a KV head of one layer in one step; `kept_mass_sum` is over query
    heads."""

    recalls: int = 0
    recalled_blocks: int = 0
    middle_blocks: int = 0
    heads: int = 0
    dense_heads: int = 0
    kept_mass_sum: float = 0.0
    kept_mass_count: int = 0
    fetched_blocks: int = 0
    summaries_built: int = 0
    lost: int = 0
    reattached: int = 0
    staging_wanted: int = 0
    staging_hits: int = 0
    staging_prefetch_hits: int = 0
    staging_copies: int = 0
    compared_blocks: int = 0
    repeated_blocks: int = 0

    def note_recall(self, recall: Recall, blocks: int) -> None:
        """Count one recall among so many middle blocks."""
        kv_heads, taken = recall.blocks.shape
        mass = recall.kept_mass[recall.kept_mass == recall.kept_mass]
        self.note_taken(kv_heads, taken, blocks, dense_heads=int(recall.is_dense.sum()))
        self.note_kept(float(mass.sum()), len(mass))

    def note_taken(self, kv_heads: int, taken: int, blocks: int, *, dense_heads: int) -> None:
        """Count one recall, of `taken` of the middle blocks for each KV head."""
        self.recalls += 1
        self.recalled_blocks += kv_heads * taken
        self.middle_blocks += kv_heads * blocks
        self.heads += kv_heads
        self.dense_heads += dense_heads

    def note_kept(self, mass: float, heads: int) -> None:
        """Count the sum of the kept masses of so many query heads."""
        self.kept_mass_sum += mass
        self.kept_mass_count += heads

    def as_dict(self) -> dict[str, int | float]:
        """The counters by their names, and the mean kept mass."""
        counts: dict[str, int | float] = asdict(self)
        total, count = counts.pop("kept_mass_sum"), counts.pop("kept_mass_count")
        counts["kept_mass"] = total / count if count else 1.0
        return counts

    def since(self, before: "Tally") -> SparseUsage:
        """The changes since an earlier copy of this tally. What is no possible share of a mass is left out of it."""
        masses = self.kept_mass_count - before.kept_mass_count
        mass = min(
            float(masses), max(0.0, self.kept_mass_sum - before.kept_mass_sum)
        )  # 0 where the difference is no number
        return SparseUsage(
            recalls=self.recalls - before.recalls,
            recalled_blocks=self.recalled_blocks - before.recalled_blocks,
            middle_blocks=self.middle_blocks - before.middle_blocks,
            kv_heads=self.heads - before.heads,
            dense_kv_heads=self.dense_heads - before.dense_heads,
            query_heads=masses,
            kept_mass_millionths=int(mass * MASS_UNIT),
            fetched_blocks=self.fetched_blocks - before.fetched_blocks,
            built_summaries=self.summaries_built - before.summaries_built,
            lost_sequences=self.lost - before.lost,
            reattached_sequences=self.reattached - before.reattached,
            staging_wanted_blocks=self.staging_wanted - before.staging_wanted,
            staging_hit_blocks=self.staging_hits - before.staging_hits,
            staging_prefetched_blocks=self.staging_prefetch_hits - before.staging_prefetch_hits,
            staging_copied_blocks=self.staging_copies - before.staging_copies,
            compared_blocks=self.compared_blocks - before.compared_blocks,
            repeated_blocks=self.repeated_blocks - before.repeated_blocks,
        )


class TallyReports:
    """Reports of one sequence's tally. Invariant: `_sent` is the tally as it was when it was last added to the
    counters."""

    def __init__(self, counters: Counters, tally: Tally) -> None:
        self._counters = counters
        self._tally = tally
        self._sent = Tally()
        self._taken = counters.reports_taken

    @property
    def are_due(self) -> bool:
        """Whether a report has been taken since changes were last added."""
        return self._counters.reports_taken != self._taken

    def send(self) -> None:
        """Add what has changed to the Pool's counters; nothing waits for the daemon."""
        self._taken = self._counters.reports_taken
        changes = astuple(self._tally.since(self._sent))
        if any(changes):
            self._sent = replace(self._tally)
            self._counters.count_sparse(changes)
