"""Metric definitions of compute by lookup: steps of sparse sequences, by model. Absent for models without any.

Pure functions; any thread.
"""

from collections.abc import Callable

from kvpool.server.metrics.measurements import Scrape
from kvpool.server.metrics.metric import Metric, Values, counter
from kvpool.usage import MASS_UNIT, SparseUsage

_NONE = SparseUsage()


def _by_model(read: Callable[[SparseUsage], float]) -> Callable[[Scrape], Values]:
    return lambda now: {
        (model,): read(counts.sparse) for model, counts in now.pool.models.items() if counts.sparse != _NONE
    }


SPARSE_METRICS: tuple[Metric, ...] = (
    counter("kvpool_sparse_recalls", "Recalls: choices of blocks for one layer in one step. Steps over fewer tokens than the "
            "dense boundary have none.", _by_model(lambda c: c.recalls), "", "model"),
    counter("kvpool_sparse_recalled_blocks", "Blocks chosen, for each KV head.",
            _by_model(lambda c: c.recalled_blocks), "", "model"),
    counter("kvpool_sparse_middle_blocks", "Middle blocks, which they were chosen among, for each KV head.",
            _by_model(lambda c: c.middle_blocks), "", "model"),
    counter("kvpool_sparse_kv_heads", "KV heads for which blocks were chosen.", _by_model(lambda c: c.kv_heads), "", "model"),
    counter("kvpool_sparse_dense_kv_heads", "Those of them whose estimate was unreliable, so that all blocks were read.",
            _by_model(lambda c: c.dense_kv_heads), "", "model"),
    counter("kvpool_sparse_kept_mass", "Of the attention to the middle blocks, the estimated share of the chosen ones, summed "
            "over query heads: divided by their number it is the mean.",
            _by_model(lambda c: c.kept_mass_millionths / MASS_UNIT), "", "model"),
    counter("kvpool_sparse_query_heads", "Query heads with such an estimate.", _by_model(lambda c: c.query_heads), "", "model"),
    counter("kvpool_sparse_fetched_blocks", "Blocks copied out for engines that attend by themselves, for each KV head.",
            _by_model(lambda c: c.fetched_blocks), "", "model"),
    counter("kvpool_sparse_built_summaries", "Summaries of one block in one layer that clients built: the pool had none, or "
            "bad ones.", _by_model(lambda c: c.built_summaries), "", "model"),
    counter("kvpool_sparse_lost_sequences", "Sequences that ended because chunks of theirs had left the pool (SequenceLost).",
            _by_model(lambda c: c.lost_sequences), "", "model"),
    counter("kvpool_sparse_reattached_sequences", "Times that a sequence had lost its lease, and leased all its chunks again.",
            _by_model(lambda c: c.reattached_sequences), "", "model"),
    counter("kvpool_sparse_staging_wanted_blocks", "Blocks that steps on a device wanted there, for each KV head.",
            _by_model(lambda c: c.staging_wanted_blocks), "", "model"),
    counter("kvpool_sparse_staging_hit_blocks", "Those of them that were staged there: divided by the wanted ones they are the "
            "staging hit rate.", _by_model(lambda c: c.staging_hit_blocks), "", "model"),
    counter("kvpool_sparse_staging_prefetched_blocks", "Those of the hits that had been brought behind another layer's step, "
            "before they were wanted.", _by_model(lambda c: c.staging_prefetched_blocks), "", "model"),
    counter("kvpool_sparse_staging_copied_blocks", "Blocks copied to devices, those included that no step wanted afterwards.",
            _by_model(lambda c: c.staging_copied_blocks), "", "model"),
    counter("kvpool_sparse_compared_blocks", "Blocks that steps on a device wanted where their layer had a step before.",
            _by_model(lambda c: c.compared_blocks), "", "model"),
    counter("kvpool_sparse_repeated_blocks", "Those of them that the step before wanted as well: the overlap of consecutive "
            "steps.", _by_model(lambda c: c.repeated_blocks), "", "model"),
)  # fmt: skip
