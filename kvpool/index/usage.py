"""Usage by model: requests of engines and their results, the numbers behind a hit rate.

Lookups, loads and steps of sparse sequences happen inside clients without a request, so clients report them; stores are
counted here at commit. A report comes from another process and is not trusted: values are clamped, no part exceeds its whole
(hits what was looked up), and all of it counts for the reporting connection's own model. Bytes and tokens derive from that
connection's layout, never from the report. Of several ranks each counts the bytes of its own chunks, and of their tokens its
part, so that no token counts twice.

Control thread only. Invariant: at most MODELS_MAX models are counted separately; later ones count together as OTHER_MODEL.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from kvpool.index.layout_uses import LayoutUses
from kvpool.index.sessions import EngineSession
from kvpool.layout import Layout
from kvpool.states import CLIENT_DECLINES, LEVELS, LoadReason, SaveState
from kvpool.usage import MASS_UNIT, SPARSE_COUNTS, ClientFailures, ModelUsage, SparseUsage, UsageReport

MODELS_MAX = 64
OTHER_MODEL = "other"
# Why a commit declines chunks that were reserved. What is behind a chunk of other bytes has no parent.
COMMIT_DECLINES = (SaveState.EXPIRED, SaveState.CHECKSUM, SaveState.NO_PARENT)
# What one report may add to one counter. Sixteen threads that look 512 chunks up every 4 µs reach 2 × 10^9 in a second.
REPORTED_MAX = 1 << 32
# The same of blocks that recalls have chosen among. A step over 2^20 tokens of 80 layers with 8 KV heads has 5 × 10^6; a
# sequence keeps its counts while the daemon is away: a thousand such steps a second for three minutes.
REPORTED_BLOCKS_MAX = 1 << 40


class UsageTable:
    """Counters of all models, and those that belong to no single model."""

    def __init__(self) -> None:
        self.by_layout = LayoutUses()
        self._models: dict[str, ModelUsage] = {}
        self._reports = 0
        self._clamped_values = 0
        self._failed_loads = {reason: 0 for reason in LoadReason if reason is not LoadReason.COMPLETE}
        self._declined_chunks = dict.fromkeys((*CLIENT_DECLINES, *COMMIT_DECLINES, SaveState.STOPPING), 0)

    def __repr__(self) -> str:
        return f"<UsageTable {len(self._models)} models, {self._reports} reports>"

    def models(self) -> dict[str, ModelUsage]:
        """Every model's counters, as they are now."""
        return {model: replace(counts) for model, counts in self._models.items()}

    def failures(self) -> ClientFailures:
        """Failures in clients."""
        return ClientFailures(
            failed_loads={reason.name.lower(): count for reason, count in self._failed_loads.items()},
            declined_chunks={state.name.lower(): count for state, count in self._declined_chunks.items()},
            usage_reports=self._reports,
            clamped_values=self._clamped_values,
        )

    def count_report(self, session: EngineSession, report: UsageReport, now_ns: int) -> None:
        """Add a client's report of its usage since the last one."""
        self._reports += 1
        asked = left = self._clamped(report.lookup_chunks)
        hits, loaded = [], []
        for level in range(LEVELS):
            hits.append(self._clamped(report.hit_chunks[level], left))
            loaded.append(self._clamped(report.loaded_chunks[level]))
            left -= hits[level]
        chunk_bytes = _chunk_bytes(session)
        tokens_of = partial(_tokens_of_ranks, session.layout)
        counts = self._of(session.model)
        counts.lookups += self._clamped(report.lookups)
        counts.lookup_tokens += tokens_of(asked)
        counts.lookup_bytes += asked * chunk_bytes
        counts.hit_tokens = _sums(counts.hit_tokens, map(tokens_of, hits))
        counts.hit_bytes = _sums(counts.hit_bytes, (chunks * chunk_bytes for chunks in hits))
        counts.loads += self._clamped(report.loads)
        counts.loaded_tokens = _sums(counts.loaded_tokens, map(tokens_of, loaded))
        counts.loaded_bytes = _sums(counts.loaded_bytes, (chunks * chunk_bytes for chunks in loaded))
        counts.sparse = _added(counts.sparse, self._plausible(report.sparse, session.layout.kv_heads))
        looked_up, hit = tokens_of(asked), sum(map(tokens_of, hits))
        self.by_layout.note_use(session, now_ns, lookup_tokens=looked_up, hit_tokens=hit)
        for reason in self._failed_loads:
            self._failed_loads[reason] += self._clamped(report.failed_loads[reason])
        for state, count in zip(CLIENT_DECLINES, report.declined_chunks, strict=True):
            self._declined_chunks[state] += self._clamped(count)

    def count_commit(self, session: EngineSession, states: bytes, now_ns: int, *, carried: int = 0) -> None:
        """Add what a commit has published: a `SaveState` for each chunk, and `carried` further ones."""
        self.by_layout.note_use(session, now_ns)
        own = states.count(SaveState.STORED)
        stored = own + carried
        counts = self._of(session.model)
        counts.stored_chunks += stored
        counts.stored_tokens += _stored_tokens(session.layout, stored)
        counts.stored_bytes += stored * session.chunk_sizes[0]
        if own < len(states):
            for state in COMMIT_DECLINES:
                self._declined_chunks[state] += states.count(state)

    def count_declined(self, state: SaveState, chunks: int) -> None:
        """Add chunks of a save that was declined whole."""
        self._declined_chunks[state] += chunks

    def _of(self, model: str) -> ModelUsage:
        counts = self._models.get(model)
        if counts is None:
            name = model if len(self._models) < MODELS_MAX else OTHER_MODEL
            counts = self._models.setdefault(name, ModelUsage())
        return counts

    def _plausible(self, reported: SparseUsage, layout_kv_heads: int) -> SparseUsage:
        """What may be so: no part is more than its whole, and no recall has more KV heads than the layout."""
        recalls, middle = self._clamped(reported.recalls), self._clamped(reported.middle_blocks, REPORTED_BLOCKS_MAX)
        kv_heads = self._clamped(reported.kv_heads, recalls * layout_kv_heads)
        query_heads = self._clamped(reported.query_heads)
        wanted = self._clamped(reported.staging_wanted_blocks, REPORTED_BLOCKS_MAX)
        hits = self._clamped(reported.staging_hit_blocks, wanted)
        compared = self._clamped(reported.compared_blocks, wanted)
        return SparseUsage(
            recalls=recalls,
            recalled_blocks=self._clamped(reported.recalled_blocks, middle),
            middle_blocks=middle,
            kv_heads=kv_heads,
            dense_kv_heads=self._clamped(reported.dense_kv_heads, kv_heads),
            query_heads=query_heads,
            kept_mass_millionths=self._clamped(reported.kept_mass_millionths, query_heads * MASS_UNIT),
            fetched_blocks=self._clamped(reported.fetched_blocks, REPORTED_BLOCKS_MAX),
            built_summaries=self._clamped(reported.built_summaries),
            lost_sequences=self._clamped(reported.lost_sequences),
            reattached_sequences=self._clamped(reported.reattached_sequences),
            staging_wanted_blocks=wanted,
            staging_hit_blocks=hits,
            staging_prefetched_blocks=self._clamped(reported.staging_prefetched_blocks, hits),
            staging_copied_blocks=self._clamped(reported.staging_copied_blocks, REPORTED_BLOCKS_MAX),
            compared_blocks=compared,
            repeated_blocks=self._clamped(reported.repeated_blocks, compared),
        )

    def _clamped(self, value: int, most: int = REPORTED_MAX) -> int:
        self._clamped_values += value > most
        return min(value, most)


def _added(before: SparseUsage, more: SparseUsage) -> SparseUsage:
    return SparseUsage(*(getattr(before, name) + getattr(more, name) for name in SPARSE_COUNTS))


def _sums(before: tuple[int, ...], more: Iterable[int]) -> tuple[int, ...]:
    return tuple(count + one for count, one in zip(before, more, strict=True))


def _tokens_of_ranks(layout: Layout, chunks: int) -> int:
    """Tokens that chunks of a layout count for: a rank's for its part of the ranks, so that those of all ranks, each of which
    has a chunk of the same tokens, count once. Whole ones: of a division with a rest, the rest is left out."""
    return chunks * layout.chunk_tokens // (1 if layout.rank is None else layout.world)


def _stored_tokens(layout: Layout, chunks: int) -> int:
    """The same of stored chunks: of all groups' chunks of the same tokens those of the first full group."""
    role = layout.group
    return _tokens_of_ranks(layout, chunks) if role is None or (role.is_full and not role.number) else 0


def _chunk_bytes(session: EngineSession) -> int:
    """KV of a chunk, without summaries, on every rank the session stands for: a scheduler looks all of them up at once."""
    return sum(namespace.layout.chunk_bytes for namespace in session.namespaces.values())
