"""Usage reports: their columns, the plausible bounds of their values, and the model for which they count."""

from dataclasses import astuple

import pytest

import kvpool_client as kv
from kvpool.errors import ProtocolError
from kvpool.ids import ConnectionId, NamespaceId, SizeClassId
from kvpool.index.layout_uses import LayoutUse, LayoutUses
from kvpool.index.namespaces import Namespace
from kvpool.index.sessions import EngineSession
from kvpool.index.usage import MODELS_MAX, OTHER_MODEL, REPORTED_BLOCKS_MAX, REPORTED_MAX, UsageTable
from kvpool.protocol import usage
from kvpool.states import CLIENT_DECLINES, Level, LoadReason, SaveState
from kvpool.usage import MASS_UNIT, SparseUsage
from kvpool_client.connection.counters import Counters
from kvpool_client.verbs.results import LoadResult, SaveResult
from tests.rigs.daemon import SMALL

NOW_NS = 5
TOKENS, BYTES = SMALL.chunk_tokens, SMALL.chunk_bytes


def _session(model: str = "m", layout: kv.Layout = SMALL) -> EngineSession:
    namespaces = {
        rank: Namespace(NamespaceId(rank), SizeClassId(0), model, layout.for_rank(rank)) for rank in layout.ranks
    }
    return EngineSession(ConnectionId(1), layout, model, namespaces)


def _column(**counts: int) -> bytes:
    values = [0] * usage.COUNTS
    for name, value in counts.items():
        word, _, place = name.rpartition("_")
        base = getattr(usage, word.upper() if place.isdigit() else name.upper())
        values[base + (int(place) if place.isdigit() else 0)] = value
    return usage.pack(values)


def _report(table: UsageTable, session: EngineSession, **counts: int) -> None:
    table.count_report(session, usage.unpack(_column(**counts)), NOW_NS)


@pytest.mark.parametrize("size", [0, 8, usage.COUNTS * 8 - 1, usage.COUNTS * 8 + 8])
def test_a_column_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"usage column has {size} bytes"):
        usage.unpack(bytes(size))


def test_a_report_counts_in_the_connections_own_units() -> None:
    table = UsageTable()
    _report(table, _session(), lookups=2, lookup_chunks=10, hit_chunks_1=6, hit_chunks_2=1, loads=1, loaded_chunks_1=5)
    found = table.models()["m"]
    assert (found.lookups, found.loads) == (2, 1)
    assert (found.lookup_tokens, found.lookup_bytes) == (10 * TOKENS, 10 * BYTES)
    assert found.hit_tokens == (0, 6 * TOKENS, 1 * TOKENS, 0, 0)
    assert found.hit_bytes == (0, 6 * BYTES, 1 * BYTES, 0, 0)
    assert (found.missed_tokens, found.missed_bytes) == (3 * TOKENS, 3 * BYTES)
    assert found.loaded_bytes == (0, 5 * BYTES, 0, 0, 0)
    assert table.failures().clamped_values == 0


def test_the_tokens_of_all_ranks_count_once() -> None:
    table = UsageTable()
    layout = kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32, rank=0, world=4)
    for rank in range(4):
        session = _session(layout=layout.for_rank(rank))
        _report(table, session, lookups=1, lookup_chunks=3, hit_chunks_1=2, loads=1, loaded_chunks_1=2)
        table.count_commit(session, bytes([SaveState.STORED] * 3), 0)
    found = table.models()["m"]
    assert (found.lookup_tokens, found.hit_tokens[Level.DRAM], found.loaded_tokens[Level.DRAM]) == (96, 64, 64)
    assert (found.stored_tokens, found.stored_chunks, found.missed_tokens) == (96, 4 * 3, 32)
    assert found.lookup_bytes == found.stored_bytes == 4 * 3 * layout.chunk_bytes
    assert (found.lookups, found.loads) == (4, 4)


def test_hits_never_exceed_what_was_looked_up() -> None:
    table = UsageTable()
    _report(table, _session(), lookups=1, lookup_chunks=10, hit_chunks_0=7, hit_chunks_1=7, hit_chunks_3=7)
    found = table.models()["m"]
    assert found.hit_tokens == (7 * TOKENS, 3 * TOKENS, 0, 0, 0)
    assert found.missed_tokens == 0
    assert table.failures().clamped_values == 2


def test_implausibly_large_values_are_cut_and_counted() -> None:
    table = UsageTable()
    table.count_report(_session(), usage.unpack(b"\xff" * 8 * usage.COUNTS), NOW_NS)
    found = table.models()["m"]
    assert found.lookups == found.loads == REPORTED_MAX
    assert sum(found.hit_tokens) == found.lookup_tokens == REPORTED_MAX * TOKENS
    assert astuple(found.sparse) == (
        *(REPORTED_MAX, REPORTED_BLOCKS_MAX, REPORTED_BLOCKS_MAX, REPORTED_MAX * SMALL.kv_heads),
        *(REPORTED_MAX * SMALL.kv_heads, REPORTED_MAX, REPORTED_MAX * MASS_UNIT, REPORTED_BLOCKS_MAX),
        *(REPORTED_MAX, REPORTED_MAX, REPORTED_MAX),
        *(REPORTED_BLOCKS_MAX for _ in range(6)),
    )
    # COMPLETE is no failure: its place is not read.
    assert table.failures().clamped_values == usage.COUNTS - 1
    assert set(table.failures().failed_loads.values()) == {REPORTED_MAX}


def _sparse_report(table: UsageTable, session: EngineSession, sparse: SparseUsage) -> None:
    values = [0] * usage.SPARSE + list(astuple(sparse))
    table.count_report(session, usage.unpack(usage.pack(values)), NOW_NS)


def test_compute_by_lookup_adds_up_for_the_connections_own_model() -> None:
    table = UsageTable()
    most = SparseUsage(3, 12, 30, 3 * SMALL.kv_heads, 1, 24, 24 * MASS_UNIT, 9, 8, 7, 6)
    _sparse_report(table, _session("m"), most)
    _sparse_report(table, _session("m"), SparseUsage(recalls=2, lost_sequences=1))
    _sparse_report(table, _session("other-model"), SparseUsage(built_summaries=4))
    found = table.models()
    assert found["m"].sparse == SparseUsage(5, 12, 30, 3 * SMALL.kv_heads, 1, 24, 24 * MASS_UNIT, 9, 8, 8, 6)
    assert found["other-model"].sparse == SparseUsage(built_summaries=4)
    assert table.failures().clamped_values == 0


@pytest.mark.parametrize(
    ("reported", "counted"),
    [
        (SparseUsage(recalls=1, recalled_blocks=11, middle_blocks=10), SparseUsage(1, 10, 10)),
        (SparseUsage(recalls=1, kv_heads=SMALL.kv_heads + 1), SparseUsage(1, 0, 0, SMALL.kv_heads)),
        (SparseUsage(recalls=1, kv_heads=1, dense_kv_heads=2), SparseUsage(1, 0, 0, 1, 1)),
        (
            SparseUsage(query_heads=2, kept_mass_millionths=2 * MASS_UNIT + 1),
            SparseUsage(0, 0, 0, 0, 0, 2, 2 * MASS_UNIT),
        ),
        (SparseUsage(fetched_blocks=REPORTED_BLOCKS_MAX + 1), SparseUsage(fetched_blocks=REPORTED_BLOCKS_MAX)),
        (
            SparseUsage(staging_wanted_blocks=5, staging_hit_blocks=6, staging_prefetched_blocks=5),
            SparseUsage(staging_wanted_blocks=5, staging_hit_blocks=5, staging_prefetched_blocks=5),
        ),
        (
            SparseUsage(staging_wanted_blocks=5, staging_hit_blocks=3, staging_prefetched_blocks=4),
            SparseUsage(staging_wanted_blocks=5, staging_hit_blocks=3, staging_prefetched_blocks=3),
        ),
        (
            SparseUsage(staging_wanted_blocks=5, compared_blocks=5, repeated_blocks=6),
            SparseUsage(staging_wanted_blocks=5, compared_blocks=5, repeated_blocks=5),
        ),
    ],
)
def test_no_part_of_compute_by_lookup_is_more_than_its_whole(reported: SparseUsage, counted: SparseUsage) -> None:
    table = UsageTable()
    _sparse_report(table, _session(), reported)
    assert table.models()["m"].sparse == counted
    assert table.failures().clamped_values == 1


def test_models_are_counted_separately_up_to_a_bound() -> None:
    table = UsageTable()
    for number in range(MODELS_MAX + 10):
        _report(table, _session(f"model-{number}"), lookups=1)
    _report(table, _session("model-3"), lookups=1)
    models = table.models()
    assert len(models) == MODELS_MAX + 1
    assert (models["model-3"].lookups, models[OTHER_MODEL].lookups) == (2, 10)


def test_a_commit_counts_stored_and_late_chunks() -> None:
    table = UsageTable()
    table.count_commit(
        _session(), bytes([SaveState.STORED, SaveState.STORED, SaveState.EXPIRED, SaveState.NO_PARENT]), NOW_NS
    )
    found = table.models()["m"]
    assert (found.stored_chunks, found.stored_tokens, found.stored_bytes) == (2, 2 * TOKENS, 2 * BYTES)
    assert table.failures().declined_chunks["expired"] == 1


def test_a_client_counts_by_name_and_for_the_daemon() -> None:
    counters = Counters()
    counters.count_lookup(5, bytes([1, 1, 2]))
    counters.count_lookup(4, b"")
    counters.count_load(bytes([1, 1]), LoadResult(2, 64, "gone"))
    counters.count_load(bytes([1, 2, 255]), LoadResult(3, 96, "complete"))
    counters.count_save(SaveResult.of([SaveState.STORED, SaveState.TOO_LONG, SaveState.TOO_LONG, SaveState.FULL]))
    counters.count("acquired_chunks", 3)
    report = usage.unpack(usage.pack(counters.take_unsent()))
    assert (report.lookups, report.lookup_chunks, report.hit_chunks) == (2, 9, (0, 2, 1, 0, 0))
    assert (report.loads, report.loaded_chunks) == (2, (0, 3, 1, 0, 0))
    assert report.failed_loads[LoadReason.GONE] == sum(report.failed_loads) == 1
    assert report.declined_chunks[CLIENT_DECLINES.index(SaveState.TOO_LONG)] == sum(report.declined_chunks) == 2
    totals = counters.totals()
    assert (totals["lookups"], totals["lookup_hit_chunks"], totals["loads_gone"]) == (2, 3, 1)
    assert (totals["saved_chunks"], totals["declined_too_long"], totals["declined_full"]) == (1, 2, 1)
    assert counters.take_unsent() == []


def test_a_report_that_could_not_be_sent_goes_with_the_next_one() -> None:
    counters = Counters()
    counters.count_lookup(5, bytes([1]))
    taken = counters.take_unsent()
    counters.count_lookup(2, b"")
    counters.put_back(taken)
    report = usage.unpack(usage.pack(counters.take_unsent()))
    assert (report.lookups, report.lookup_chunks, report.hit_chunks[Level.DRAM]) == (2, 7, 1)


def test_uses_are_known_of_each_layout_over_all_ranks() -> None:
    table, sharded = UsageTable(), kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", rank=1, world=2)
    for rank in (0, 1):
        _report(table, _session(layout=sharded.for_rank(rank)), lookups=1, lookup_chunks=10, hit_chunks_1=4)
    table.count_commit(_session(layout=sharded.for_rank(0)), bytes([SaveState.STORED]), NOW_NS + 2)
    _report(table, _session(), lookups=1, lookup_chunks=1)
    use = table.by_layout.of("m", sharded)
    assert use == LayoutUse(NOW_NS + 2, 10 * sharded.chunk_tokens, 4 * sharded.chunk_tokens)
    assert table.by_layout.of("m", SMALL) == LayoutUse(NOW_NS, TOKENS, 0)
    assert table.by_layout.of("other", SMALL) is None


def test_uses_that_are_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.index.layout_uses.USES_MAX", 2)
    uses = LayoutUses()
    for number, model in enumerate(["a", "b", "a", "c"]):
        uses.note_use(_session(model), number)
    assert uses.of("b", SMALL) is None
    assert uses.of("a", SMALL) == LayoutUse(2)
