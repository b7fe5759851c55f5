"""Prompts of a hybrid model over the real socket: what is stored of each group, found, leased and loaded."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner

import kvpool_client as kv
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.messages import HOLDS_MAX
from kvpool.router_events.vllm_format import EventForm
from kvpool.types import KEY_BYTES
from kvpool_client.connection.counters import Counters
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.lease_bound import chunks_held, chunks_named
from kvpool_tools.cli.kvpoolctl import cli
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, wait_until
from tests.rigs.groups.hybrid import (
    CHUNK,
    FULL,
    HYBRID,
    STATE,
    WINDOW,
    WINDOW_CHUNKS,
    assert_served,
    load,
    payloads,
    store,
    whole_result,
)
from tests.rigs.payload import chunk_bytes_of, paged_layers, read_chunk, tokens_of, write_chunk

NUMBERS = count()


class Grouped:
    """A namespace of one test on a daemon that the tests of this module share."""

    def __init__(self, daemon: Daemon, model: str) -> None:
        self.daemon, self.model = daemon, model

    def connect(self, layout: kv.Layout = SMALL) -> kv.Pool:
        return self.daemon.connect(layout, model=self.model, timeout_s=20.0)


@pytest.fixture
def grouped(shared_daemon: Daemon) -> Grouped:
    return Grouped(shared_daemon, f"model-{next(NUMBERS)}")


ROLES = [part.group for part in HYBRID.group_layouts]
SIZES = [part.stored_bytes for part in HYBRID.group_layouts]


@pytest.mark.parametrize(
    ("tail", "boundaries", "windows", "states"),
    [
        (1, None, [8, 9], [9]),
        (0, None, [7, 8, 9], [8, 9]),  # one token must be left to be computed
        (1, [4, 10], [2, 3, 8, 9], [3, 9]),
        (1, [1], [0], [0]),
        (1, [], [], []),
    ],
)
def test_windows_and_states_are_stored_at_boundaries_alone(
    grouped: Grouped, tail: int, boundaries: list[int] | None, windows: list[int], states: list[int]
) -> None:
    with grouped.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, 10 * CHUNK + tail))
        assert pool.chunks_to_save(keys, 0, None, boundaries) == (
            range(10),
            tuple(windows),
            tuple(states),
        )
        before = grouped.daemon.stats()
        result = store(pool, keys, boundaries)
        assert [entry.stored for entry in result.groups] == [10, len(windows), len(states)]
        assert (result.declined, result.reasons) == (0, {})
        stored = 10 * SIZES[FULL] + len(windows) * SIZES[WINDOW] + len(states) * SIZES[STATE]
        stats = grouped.daemon.stats()
        grown = [stats[name] - before[name] for name in ("dram.used_bytes", "dram.chunks")]
        assert grown == [stored, 10 + len(windows) + len(states)]
        ends = [10, 9] if boundaries is None and not tail else [10] if boundaries is None else boundaries
        for end in ends:
            assert_served(pool, pool.keys(tokens_of(1, 10 * CHUNK + tail)[: end * CHUNK]), end)
        assert pool.lookup(keys).chunks == max(ends, default=0)
        wait_until(lambda: grouped.daemon.stats()["leases"] == 0, "all leases have ended")


@pytest.mark.parametrize("tokens", [10 * CHUNK + 1, CHUNK - 1])
def test_the_boundaries_of_the_documentation_serve_the_first_prompt_too(grouped: Grouped, tokens: int) -> None:
    """`boundaries=[hit.full_chunks, len(keys)]` of docs/layouts.md: nothing is there yet, and nothing of a short prompt."""
    with grouped.connect(HYBRID) as pool:
        for _ in range(2):
            keys = pool.keys(tokens_of(2, tokens))
            hit = pool.lookup(keys)
            found = hit.full_chunks
            result = store(pool, keys, [found, len(keys)])
            assert (result.declined, result.reasons) == (0, {})
        assert len(keys) == found == tokens // CHUNK
        assert pool.lookup(keys).chunks == len(keys)
        assert pool.chunks_to_save(keys, boundaries=[0]) == (range(len(keys)), (), ())


def test_a_long_prompt_stores_a_fraction_of_all_layers_of_all_chunks(grouped: Grouped) -> None:
    """One full layer to three with a window of a chunk: 1500 tokens, the bar is 0.6 of all layers of all chunks."""
    shape: dict[str, Any] = {"kv_heads": 1, "head_dim": 16, "dtype": "float16"}
    layout = kv.Layout(
        chunk_tokens=64,
        groups=(kv.Group(layers=1, **shape), kv.Group(kind="window", window=64, layers=3, **shape)),
    )
    with grouped.connect(layout) as pool:
        keys = pool.keys(tokens_of(1, 1500))
        before = grouped.daemon.stats()["dram.used_bytes"]
        store(pool, keys, [len(keys) - 1, len(keys)])
        everything = len(keys) * sum(part.stored_bytes for part in layout.group_layouts)
        used = grouped.daemon.stats()["dram.used_bytes"] - before
        assert used / everything == pytest.approx((23 + 3 * 2) / (4 * 23))
        assert_served(pool, keys, 23)


def test_chunks_of_each_group_can_be_chosen(grouped: Grouped) -> None:
    """As an engine that computes a prompt in pieces stores it."""
    with grouped.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, 6 * CHUNK + 1))
        for chosen in ([(0, 1, 2), (1, 2), ()], [(3, 4, 5), (4, 5), (5,)]):
            result = pool.save(keys, chosen=chosen, from_=payloads(keys, HYBRID, chosen)).commit()
            assert [entry.stored for entry in result.groups] == [len(chunks) for chunks in chosen]
        assert pool.lookup(keys).chunks == 6
        assert pool.lookup(keys, chunks_max=5).chunks == 0, "no state was stored before"
        assert pool.lookup(keys, chunks_max=5).full_chunks == 5
        assert_served(pool, keys, 6)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([(0,)], "expected the chunks of each of 3 groups"),
        ([(0, 2), (), ()], "a full one"),
        ([(), (2, 1), ()], "ascending"),
        ([(), (True,), ()], "ascending"),
        ([(), (6,), ()], "below 6"),
        ([(), (-1,), ()], "below 6"),
        (7, "expected the chunks of each of 3 groups"),
    ],
)
def test_chosen_chunks_that_do_not_fit_are_refused_by_group(grouped: Grouped, chosen: Any, message: str) -> None:
    with grouped.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, 6 * CHUNK + 1))
        arrays = payloads(keys, HYBRID, [(), (), ()])
        with pytest.raises(kv.InvalidArgument, match=message):
            pool.save(keys, chosen=chosen, from_=arrays)
        with pytest.raises(kv.InvalidArgument, match="without first_chunk"):
            pool.save(keys, chosen=[(), (), ()], first_chunk=1, from_=arrays)
        with pytest.raises(kv.InvalidArgument, match="chunks_max"):
            pool.lookup(keys, chunks_max=7)


def test_a_junction_of_two_prompts_is_stored_by_who_computes_past_it(grouped: Grouped) -> None:
    with grouped.connect(HYBRID) as pool:
        shared, rest = tokens_of(1, 6 * CHUNK), tokens_of(2, 4 * CHUNK + 1)
        store(pool, pool.keys(np.concatenate([shared, tokens_of(3, 4 * CHUNK + 1)])))
        keys = pool.keys(np.concatenate([shared, rest]))
        hit = pool.lookup(keys)
        assert (hit.chunks, hit.full_chunks) == (0, 6)
        result = store(pool, keys, [hit.full_chunks, len(keys)])
        assert result.groups[FULL].present == 6
        third = pool.keys(np.concatenate([shared, tokens_of(4, CHUNK)]))
        assert_served(pool, third, 6)


@in_both_write_modes
def test_a_save_by_layers_and_a_load_into_paged_memory(daemon: Daemon) -> None:
    """The engine's blocks of each group have tables of their own; a state has one block a chunk."""
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, 6 * CHUNK + 1))
        named = pool.chunks_to_save(keys)
        rows = payloads(keys, HYBRID, named)
        full, window, state = HYBRID.group_layouts
        memory: list[list[Any]] = [
            paged_layers(full, 32, 8, "block_first"),
            paged_layers(window, 32, 16, "kv_first"),
            [np.zeros((8, state.layer_bytes), np.uint8) for _ in range(state.layers)],
        ]
        forms = ["block_first", "kv_first", "packed"]
        caches = [
            pool.register(arrays, tokens, form, group)
            for group, (arrays, tokens, form) in enumerate(zip(memory, (8, 16, CHUNK), forms, strict=True))
        ]
        tables: list[list[int]] = [list(range(31, 7, -1)), [3, 1, 4, 15], [5]]
        for group, (arrays, form, layout) in enumerate(zip(memory[:2], forms, (full, window), strict=False)):
            per_chunk = len(tables[group]) // len(named[group])
            for at, row in enumerate(rows[group]):
                write_chunk(arrays, form, tables[group][at * per_chunk : (at + 1) * per_chunk], layout, row)
        for layer, array in enumerate(memory[STATE]):
            array[5] = rows[STATE][0].reshape(state.layers, -1)[layer]
        with pool.save(keys, caches, tables) as save:
            save.layer(cast(int, np.int64(3)), cast(int, np.int64(WINDOW)))
            save.layer(1, FULL)
            save.layer(0, STATE)
            with pytest.raises(kv.InvalidArgument, match="group is 3"):
                save.layer(0, 3)
            with pytest.raises(kv.InvalidArgument, match="layer is 2"):
                save.layer(2, FULL)
            assert save.commit().declined == 0
            assert save.done()
        for arrays in memory:
            for array in arrays:
                array[...] = 0
        tables = [list(range(24)), [8, 9, -1, 11], [2]]
        with pool.acquire(pool.lookup(keys)) as lease:
            loaded = pool.load(lease, caches, tables)
            assert all(loaded.wait_layer(layer, group=WINDOW) for layer in range(window.layers))
            assert loaded.wait() == whole_result(HYBRID, 6)
            assert loaded.done()
        assert np.array_equal(read_chunk(memory[FULL], "block_first", [20, 21, 22, 23], full), rows[FULL][5])
        assert np.array_equal(read_chunk(memory[WINDOW], "kv_first", [8, 9], window), rows[WINDOW][0])
        assert not any(array[:, 10].any() for array in memory[WINDOW])
        assert np.array_equal(np.concatenate([array[2] for array in memory[STATE]]), rows[STATE][0])


HYBRID_OF_16 = (
    kv.Group(layers=1, kv_heads=1, head_dim=8),
    kv.Group(kind="window", window=64, layers=1, kv_heads=1, head_dim=8),
    kv.Group(kind="state", layers=1, state_bytes=1024),
)


def test_a_load_begins_behind_what_the_engine_holds_but_for_windows(grouped: Grouped) -> None:
    with grouped.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, 6 * CHUNK + 1))
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.ranges == (range(6), range(4, 6), range(5, 6))
            assert lease.tiers.tolist() == [kv.Level.DRAM] * 6
            assert lease.cost_s > 0
            parts = zip((1, 2, 1), HYBRID.group_layouts, strict=True)
            into = [np.zeros((count, part.chunk_bytes), np.uint8) for count, part in parts]
            assert pool.load(lease, into=into, first_chunk=5).wait().chunks == 6
            for found, right in zip(into, payloads(keys, HYBRID, [[5], [4, 5], [5]]), strict=True):
                assert np.array_equal(found, right)
            nothing_full = [into[FULL][:0], *into[1:]]
            load = pool.load(lease, into=nothing_full, first_chunk=6)
            layers = [(group, layer) for group, part in enumerate(HYBRID.group_layouts) for layer in range(part.layers)]
            assert all(load.wait_layer(layer, group=group) for group, layer in layers)
            assert load.wait().reason == "complete"
            for group, layer, message in ((-1, 0, "group is -1"), (3, 0, "group is 3"), (FULL, 99, "layer is 99")):
                with pytest.raises(kv.InvalidArgument, match=message):
                    load.wait_layer(layer, group=group)


def test_a_lease_of_another_model_or_of_one_group_is_refused(grouped: Grouped) -> None:
    with grouped.connect(HYBRID) as pool, grouped.daemon.connect(HYBRID, model="another") as other:
        keys = pool.keys(tokens_of(1, 6 * CHUNK + 1))
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            with pytest.raises(
                kv.InvalidArgument, match=r"lease is of .*'model-.* at .*, expected one of .*'another' at "
            ):
                load(other, lease)
            with pytest.raises(kv.InvalidArgument, match="lease is NoneType, expected what acquire"):
                pool.load(None, into=[])  # type: ignore[arg-type]  # the mistake
        assert_served(pool, keys, 6)


def test_a_scheduler_of_many_ranks_finds_long_prompts() -> None:
    layout = kv.Layout(chunk_tokens=16, rank=None, world=8, groups=HYBRID_OF_16)
    finder = Finder(layout, link_away(), Counters(), timeout_s=1.0)
    assert finder.chunks_max * 8 + 8 * (4 + 1) <= m.KEYS_MAX < (finder.chunks_max + 1) * 8 + 8 * (4 + 1)


def windowed(window: int, chunk_tokens: int, ranks: int) -> kv.Layout:
    """A scheduler's layout of a full layer and one with a window."""
    return kv.Layout(
        chunk_tokens=chunk_tokens,
        rank=None,
        world=ranks,
        groups=(
            kv.Group(layers=1, kv_heads=1, head_dim=8),
            kv.Group(kind="window", window=window, layers=1, kv_heads=1, head_dim=8),
        ),
    )


def link_away() -> Any:
    """A link without a daemon."""
    return SimpleNamespace(session=None)


MANY_RANKS = kv.Layout(
    chunk_tokens=16,
    rank=None,
    world=8,
    groups=(
        kv.Group(layers=1, kv_heads=1, head_dim=8, dtype="uint8", planes=1),
        kv.Group(kind="window", window=16 * 140, layers=1, kv_heads=1, head_dim=8, dtype="uint8", planes=1),
    ),
)


@pytest.mark.parametrize(("holds", "chunks"), [(HOLDS_MAX, 150), (1024, 127)])
def test_a_hit_of_many_ranks_ends_where_a_lease_has_no_more_holds_and_each_rank_loads_it(
    holds: int, chunks: int, grouped: Grouped, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole prompt needs 1128; fewer are given here, so that one needs no more than a small daemon has room for."""
    for module in ("lease_bound", "finder"):
        monkeypatch.setattr(f"kvpool_client.verbs.{module}.HOLDS_MAX", holds)
    tokens = tokens_of(1, 150 * 16 + 1)
    with grouped.connect(MANY_RANKS) as scheduler:
        warnings = [record.getMessage() for record in caplog.records if "hits end" in record.getMessage()]
        if chunks < 150:
            assert "hits end at 2032 tokens (127 chunks of 16): a lease has 1024 holds" in warnings[0]
            assert "up to 1120 in 2 groups on 8 ranks" in warnings[0]
        assert len(warnings) == (chunks < 150)
        keys = scheduler.keys(tokens)
        workers = [grouped.connect(replace(MANY_RANKS, rank=rank)) for rank in range(8)]
        for worker in workers:
            named = worker.chunks_to_save(worker.keys(tokens))
            assert named == (range(150), tuple(range(10 if chunks == 150 else 0, 150))), "the hit's end is a boundary"
            assert store(worker, worker.keys(tokens)).declined == 0
        hit = scheduler.lookup(keys)
        assert (hit.chunks, hit.tokens) == (chunks, chunks * 16)
        assert scheduler.lookup(keys, chunks_max=150).chunks == chunks == min(150, scheduler.chunks_max)
        announced = scheduler.announce(keys)
        assert (announced.announced, announced.clipped) == (chunks, 0)
        lease = scheduler.acquire(hit)
        assert lease.chunks == chunks
        ticket = lease.ticket()
        lease.release()
        for worker in workers:
            with worker.claim(ticket) as claimed:
                result, found = load(worker, claimed)
                assert result == whole_result(MANY_RANKS, chunks)
                for here, right in zip(
                    found, payloads(worker.keys(tokens), worker.layout, claimed.ranges), strict=True
                ):
                    assert np.array_equal(here, right)
            worker.close()


@pytest.mark.parametrize(
    ("window", "chunk_tokens", "ranks", "chunks"),
    [
        (8192, 64, 8, m.KEYS_MAX),  # Llama 4 at tensor-parallel size 8
        (8192, 16, 8, 511),
        (8176, 16, 8, m.KEYS_MAX),
        (8192, 64, 32, 127),
        (8192, 64, 1, m.KEYS_MAX),
        (1 << 20, 16, 1, 4095),
        (1 << 20, 16, 1024, 3),
    ],
)
def test_the_longest_hit_is_that_whose_holds_one_lease_has(
    window: int, chunk_tokens: int, ranks: int, chunks: int
) -> None:
    layout = windowed(window, chunk_tokens, ranks)
    assert chunks_held(layout, ranks) == chunks
    finder = Finder(layout, link_away(), Counters(), timeout_s=1.0)
    assert finder.chunks_max == min(chunks, chunks_named(layout, ranks))
    assert (finder.chunks_max == chunks) == (chunks < m.KEYS_MAX)


def test_a_scheduler_warns_where_leases_end_hits(caplog: pytest.LogCaptureFixture) -> None:
    layout = windowed(8192, 16, 8)
    assert Finder(layout, link_away(), Counters(), timeout_s=1.0).chunks_max == 511
    assert "hits end at 8176 tokens (511 chunks of 16): a lease has 4096 holds" in caplog.text
    caplog.clear()
    assert Finder(windowed(8192, 64, 8), link_away(), Counters(), timeout_s=1.0).chunks_max > 2000
    assert not caplog.messages


def test_the_boundary_of_the_longest_lease_is_saved(grouped: Grouped, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(windowed(8192, 16, 2), rank=0)
    for holds, windows in ((HOLDS_MAX, range(1100 - 512, 1100)), (1024, (*range(511), *range(1100 - 512, 1100)))):
        monkeypatch.setattr("kvpool_client.verbs.lease_bound.HOLDS_MAX", holds)
        with grouped.connect(layout) as worker:
            keys = worker.keys(tokens_of(1, 1100 * 16 + 1))
            assert worker.chunks_to_save(keys)[1] == tuple(windows)


def test_the_layout_of_a_group_is_no_layout_to_connect_with(grouped: Grouped) -> None:
    with pytest.raises(kv.InvalidArgument, match="that of one group \\(window"):
        grouped.connect(HYBRID.of_group(WINDOW))


def test_a_ticket_hands_all_groups_over_once(grouped: Grouped) -> None:
    with grouped.connect(HYBRID) as scheduler, grouped.connect(HYBRID) as worker, grouped.connect() as stranger:
        keys = scheduler.keys(tokens_of(1, 6 * CHUNK + 1))
        store(scheduler, keys)
        lease = scheduler.acquire(scheduler.lookup(keys))
        ticket = lease.ticket()
        lease.release()
        assert stranger.claim(ticket).chunks == 0
        with grouped.daemon.admin() as operator:
            assert operator.flush(grouped.model, None)["skipped"] == 6 + WINDOW_CHUNKS + 1
        with worker.claim(ticket) as claimed:
            assert claimed.chunks == 6
            result, found = load(worker, claimed)
            assert result.chunks == 6
            for here, right in zip(found, payloads(keys, HYBRID, claimed.ranges), strict=True):
                assert np.array_equal(here, right)
        assert worker.claim(ticket).chunks == 0
        assert (grouped.daemon.stats()["leases"], grouped.daemon.stats()["tickets"]) == (0, 0)


def test_a_scheduler_finds_what_all_ranks_have_and_each_claims_its_own(grouped: Grouped) -> None:
    ranks = [replace(HYBRID, world=2, rank=rank) for rank in (0, 1)]
    tokens = tokens_of(1, 5 * CHUNK + 1)
    with grouped.connect(replace(HYBRID, world=2, rank=None)) as scheduler:
        keys = scheduler.keys(tokens)
        workers = [grouped.connect(layout) for layout in ranks]
        store(workers[0], workers[0].keys(tokens))
        assert scheduler.lookup(keys).chunks == 0
        store(workers[1], workers[1].keys(tokens))
        hit = scheduler.lookup(keys)
        assert hit.chunks == 5
        with scheduler.acquire(hit) as lease:
            ticket = lease.ticket()
        for worker in workers:
            own = worker.keys(tokens)
            with worker.claim(ticket) as claimed:
                result, found = load(worker, claimed)
                assert result.chunks == 5
                for here, right in zip(found, payloads(own, HYBRID, claimed.ranges), strict=True):
                    assert np.array_equal(here, right)
            worker.close()


def test_retention_reaches_what_each_group_has_stored(grouped: Grouped) -> None:
    with grouped.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, 4 * CHUNK + 1))
        store(pool, keys)
        assert pool.retain(keys, [kv.TokenRange(0, None, 35)]).states == ("accepted",) * 4


def test_events_name_the_group(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(1, 4 * CHUNK + 1))
        store(pool, keys)
        batch = pool.events()
        layouts = {number: layout for number, (_, layout) in batch.namespaces.items()}
        stored = [event for event in batch.events if event.gained]
        by_group = [sum(len(one.keys) for one in stored if layouts[one.namespace].group == role) for role in ROLES]
        assert by_group == [4 * KEY_BYTES, WINDOW_CHUNKS * KEY_BYTES, KEY_BYTES]
        form = EventForm()
        shown = [wire for one in stored for wire in form.events_of(one, "model", layouts[one.namespace])]
        assert len(shown) == sum(layouts[one.namespace].group == ROLES[FULL] for one in stored)


def test_why_names_the_group_and_where_windows_are_stored(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.connect(HYBRID) as pool:
        tokens = tokens_of(1, 4 * CHUNK + 1)
        store(pool, pool.keys(tokens))
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(tokens.tolist()))
    done = CliRunner().invoke(cli, ["--socket", daemon.socket, "why", "--tokens-file", str(prompt)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 4
    assert sum(line.startswith("full, chunk") and "stored in dram" in line for line in lines) == 4
    windows = [line for line in lines if line.startswith("window 59, chunk")]
    assert [("stored at boundaries only" in line, "stored in dram" in line) for line in windows] == [
        *[(True, False)] * 2,
        *[(False, True)] * 2,
    ]


def test_what_does_not_fit_is_refused_by_name(grouped: Grouped) -> None:
    with grouped.connect(HYBRID) as pool, grouped.connect() as plain:
        keys = pool.keys(tokens_of(1, 4 * CHUNK + 1))
        rows = payloads(keys, HYBRID, pool.chunks_to_save(keys))
        for call, message in (
            (
                lambda: pool.save(keys, from_=rows[0]),
                "the array is a ndarray, expected a sequence with an entry for each of 3 groups",
            ),
            (lambda: plain.save(keys, from_=rows), "3 groups, expected 0"),
            (lambda: pool.save(keys, from_=rows[:2]), "the array is a list of 2, expected a sequence"),
            (lambda: pool.save(keys, from_=[rows[0][:3], *rows[1:]]), "3 rows, expected 4"),
            (lambda: pool.save(keys, from_=rows, boundaries=[5]), "boundaries has 5"),
            (lambda: pool.save(keys, from_=rows, boundaries=[-1]), "boundaries has -1, expected .* 0..4"),
            (lambda: pool.save(keys), "either cache and block_ids"),
            (lambda: pool.register([], 8, "auto", 3), "group is 3"),
            (lambda: pool.lookup(keys, owner="node-b"), "names no node"),
            (lambda: plain.load(pool.acquire(pool.lookup(keys)), into=rows), "3 groups, expected 0"),
            (
                lambda: pool.load(plain.acquire(plain.lookup(plain.keys([1]))), into=rows),
                "lease is of .* 0 groups, expected 3",
            ),
        ):
            with pytest.raises(kv.InvalidArgument, match=message):
                call()
        wait_until(lambda: grouped.daemon.stats()["reservations"] == 0, "nothing is reserved")


def test_a_model_of_windows_alone_is_served(grouped: Grouped) -> None:
    layout = kv.Layout(chunk_tokens=CHUNK, groups=(HYBRID.groups[WINDOW], HYBRID.groups[STATE]))
    with grouped.connect(layout) as pool:
        keys = pool.keys(tokens_of(1, 6 * CHUNK + 1))
        assert store(pool, keys).stored == WINDOW_CHUNKS + 1
        assert_served(pool, keys, 6)
        assert pool.lookup(pool.keys(tokens_of(1, 5 * CHUNK))).chunks == 0


def test_a_wide_window_is_saved_and_leased_whole(grouped: Grouped) -> None:
    """More chunks than a connection may have saves under way."""
    groups = (HYBRID.groups[FULL], kv.Group(kind="window", window=150 * CHUNK, layers=1, kv_heads=1, head_dim=8))
    layout = kv.Layout(chunk_tokens=CHUNK, groups=groups)
    with grouped.connect(layout) as pool:
        keys = pool.keys(tokens_of(1, 200 * CHUNK + 1))
        result = store(pool, keys)
        assert [entry.stored for entry in result.groups] == [200, 150]
        assert_served(pool, keys, 200)


def test_plain_chunks_and_those_of_one_full_group_are_the_same(grouped: Grouped) -> None:
    plain = HYBRID.groups[FULL]
    of_one_group = kv.Layout(chunk_tokens=CHUNK, groups=(plain,))
    with grouped.connect(of_one_group) as pool:
        keys = pool.keys(tokens_of(1, 3 * CHUNK))
        row = np.stack([chunk_bytes_of(keys[at], of_one_group.chunk_bytes) for at in range(3)])
        assert pool.save(keys, from_=row).commit().stored == 3
    with grouped.connect(kv.Layout(chunk_tokens=CHUNK, layers=2, kv_heads=2, head_dim=16, dtype="float16")) as pool:
        assert pool.lookup(pool.keys(tokens_of(1, 3 * CHUNK))).chunks == 3
