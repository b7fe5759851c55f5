"""Saves: the chunks that each group stores, none that is not committed, and the reason of every one that is declined."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.ids import KEY_BYTES
from kvpool.protocol.records import messages as m
from kvpool.router_events.vllm_format import EventForm
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, wait_until
from tests.rigs.layouts import CHUNK, FULL, HYBRID, STATE, WINDOW_CHUNKS, Case, over, shares_of
from tests.rigs.payload import tokens_of
from tests.rigs.prompts import CHUNKS, Ranks, assert_served, begin, prompt, rows_of, store

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
    shared: Shared, tail: int, boundaries: list[int] | None, windows: list[int], states: list[int]
) -> None:
    with shared.connect(HYBRID) as pool:
        keys = prompt(pool, 1, 10, tail=tail)
        assert pool.chunks_to_save(keys, 0, None, boundaries) == (range(10), tuple(windows), tuple(states))
        before = shared.daemon.stats()
        result = store(pool, keys, boundaries)
        counts = [10, len(windows), len(states)]
        assert [entry.stored for entry in result.groups] == counts
        assert (result.declined, result.reasons) == (0, {})
        after = shared.daemon.stats()
        grown = [after[name] - before[name] for name in ("dram.used_bytes", "dram.chunks")]
        assert grown == [sum(map(int.__mul__, counts, SIZES)), sum(counts)]
        ends = [10, 9] if boundaries is None and not tail else [10] if boundaries is None else boundaries
        for end in ends:
            assert_served(pool, pool.keys(tokens_of(1, 10 * CHUNK + tail)[: end * CHUNK]), end)
        assert pool.lookup(keys).chunks == max(ends, default=0)


@in_both_write_modes
def test_an_engine_may_change_its_block_table_once_a_save_has_begun(shared: Shared) -> None:
    with shared.connect(SMALL) as pool:
        shape = (2, CHUNKS, SMALL.chunk_tokens, SMALL.kv_heads, SMALL.head_dim)
        random = np.random.default_rng(7)
        layers = [random.integers(0, 1000, shape).astype(SMALL.dtype) for _ in range(SMALL.layers)]
        cache = pool.register(layers, SMALL.chunk_tokens, "kv_first")
        keys, table = prompt(pool, 29), np.arange(CHUNKS)
        with pool.save(keys, cache, table) as save:
            table[:] = table[::-1].copy()
            assert save.commit().stored == CHUNKS
        loaded = [np.zeros_like(layer) for layer in layers]
        into = pool.register(loaded, SMALL.chunk_tokens, "kv_first")
        with pool.acquire(pool.lookup(keys)) as lease:
            assert pool.load(lease, into, np.arange(CHUNKS)).wait().chunks == CHUNKS
        assert all((found == layer).all() for found, layer in zip(loaded, layers, strict=True))


@pytest.mark.parametrize("tokens", [10 * CHUNK + 1, CHUNK - 1])
def test_the_boundaries_of_the_documentation_serve_the_first_prompt_too(shared: Shared, tokens: int) -> None:
    """`boundaries=[hit.full_chunks, len(keys)]` of docs/layouts.md: nothing is there yet, and nothing of a short prompt."""
    with shared.connect(HYBRID) as pool:
        keys = pool.keys(tokens_of(2, tokens))
        for found in (0, tokens // CHUNK):
            hit = pool.lookup(keys)
            assert hit.full_chunks == found
            assert store(pool, keys, [found, len(keys)]).declined == 0
        assert pool.lookup(keys).chunks == len(keys)
        assert pool.chunks_to_save(keys, boundaries=[0]) == (range(len(keys)), (), ())


def test_a_long_prompt_stores_a_fraction_of_all_layers_of_all_chunks(shared: Shared) -> None:
    """One full layer to three with a window of a chunk: 1500 tokens, the bar is 0.6 of all layers of all chunks."""
    shape: dict[str, Any] = {"kv_heads": 1, "head_dim": 16, "dtype": "float16"}
    groups = (kv.Group(layers=1, **shape), kv.Group(kind="window", window=64, layers=3, **shape))
    with shared.connect(kv.Layout(chunk_tokens=64, groups=groups)) as pool:
        keys = pool.keys(tokens_of(1, 1500))
        before = shared.daemon.stats()["dram.used_bytes"]
        store(pool, keys, [len(keys) - 1, len(keys)])
        everything = len(keys) * sum(part.stored_bytes for part in pool.layout.group_layouts)
        used = shared.daemon.stats()["dram.used_bytes"] - before
        assert used / everything == pytest.approx((23 + 3 * 2) / (4 * 23))
        assert_served(pool, keys, 23)


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
def test_chosen_chunks_that_do_not_fit_are_refused_by_group(shared: Shared, chosen: Any, message: str) -> None:
    with shared.connect(HYBRID) as pool:
        keys = prompt(pool, 1)
        arrays = rows_of(pool, keys, [(), (), ()])
        with pytest.raises(kv.InvalidArgument, match=message):
            pool.save(keys, chosen=chosen, from_=arrays)
        with pytest.raises(kv.InvalidArgument, match="without first_chunk"):
            pool.save(keys, chosen=[(), (), ()], first_chunk=1, from_=arrays)


def test_a_wide_window_is_saved_and_leased_whole(shared: Shared) -> None:
    """More chunks than a connection may have saves under way."""
    groups = (HYBRID.groups[FULL], kv.Group(kind="window", window=150 * CHUNK, layers=1, kv_heads=1, head_dim=8))
    with shared.connect(kv.Layout(chunk_tokens=CHUNK, groups=groups)) as pool:
        keys = prompt(pool, 1, 200)
        assert [entry.stored for entry in store(pool, keys).groups] == [200, 150]
        assert_served(pool, keys, 200)


@in_both_write_modes
@over("plain", "hybrid", "heads")
def test_save_of_a_suffix_needs_its_parent(ranks: Ranks) -> None:
    pool, keys = ranks.first, ranks.prompt(8)
    orphan = store(pool, keys, first=2)
    others = ranks.needed(keys) - CHUNKS
    assert (orphan.stored, orphan.declined, dict(orphan.reasons)) == (others, 4, {"no-parent": 4})
    assert ranks.store(keys, [], chunks=2) == 2
    assert ranks.store(keys, first=2) == 4
    ranks.assert_served(keys)


@in_both_write_modes
@over()
def test_a_pending_chunk_is_declined_and_aborting_frees_it(ranks: Ranks, shared: Shared) -> None:
    keys = ranks.prompt(10)
    first, *others = ranks.begin(keys)
    with shared.connect(ranks.layout, share=ranks.case.shares[0]) as second:
        late = store(second, keys)
        assert (late.stored, set(late.reasons) - {"no-parent"}) == (0, {"pending"})
        assert second.lookup(keys).chunks == 0
        with first:
            first.layer(0)
        assert first.done()
        for save in others:
            save.abort()
        aborted = first.commit(wait=False)
        assert aborted is not None
        assert (aborted.stored, aborted.reasons) == (0, {"aborted": ranks.needed(keys)})
        wait_until(lambda: shared.daemon.stats()["reservations"] == 0, "what it has reserved is free")
        assert ranks.store(keys) == ranks.needed(keys)
        assert_served(second, keys, CHUNKS)


@pytest.mark.parametrize("end", ["commit", "commit in the background", "abort"])
def test_a_layer_that_is_announced_after_the_end_is_refused(shared: Shared, end: str) -> None:
    with shared.connect() as pool:
        save = begin(pool, prompt(pool, 4, 2))
        if end == "abort":
            save.abort()
        else:
            save.commit(wait=end == "commit")
        with pytest.raises(kv.InvalidArgument, match=r"layer 0 comes after the end of <Save 2 chunks"):
            save.layer(0)
        save.wait()


def test_a_part_of_chunks_with_summaries_is_not_saved(shared: Shared) -> None:
    layout = kv.Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=32, summaries="mean")
    with (
        shared.connect(layout, share=kv.Share(0, 1)) as pool,
        pytest.raises(kv.InvalidArgument, match="with summaries"),
    ):
        store(pool, prompt(pool, 15, 1))


def test_chunks_beyond_the_longest_chain_are_declined(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__max_chain_chunks="8")
    with daemon.connect() as pool:
        keys = prompt(pool, 1, 20)
        result = store(pool, keys)
        assert (result.stored, result.present, result.declined) == (8, 0, 12)
        assert result.reasons == {"too-long": 12}
        assert_served(pool, keys, 8)
        assert store(pool, keys).present == 8
    assert daemon.problems() == []


def test_a_long_prompt_is_stored_in_parts_as_far_as_one_save_goes(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity="160MiB")  # half of it may be incomplete
    layout = kv.Layout(layers=2, kv_heads=2, head_dim=8, dtype="float16", chunk_tokens=16, head_groups=2)
    most = m.SHARE_KEYS_MAX
    with Ranks(Case(layout, tuple(shares_of(layout, 2))), daemon.connect) as ranks:
        keys = ranks.prompt(17, most + 4)
        part, stored = (save.commit() for save in ranks.begin(keys))
        assert (part.part, part.reasons) == (most, {"too-long": 4})
        assert (stored.stored, stored.reasons) == (most, {"too-long": 4})
        assert ranks.first.lookup(keys).chunks == most
        assert ranks.store(keys, first=most) == 4
        ranks.assert_served(keys, most + 4)


def test_a_prompt_beyond_one_save_is_stored_as_far_as_every_group_has_it(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = kv.Group(layers=1, kv_heads=1, head_dim=16, dtype="float16")
    with shared.connect(replace(HYBRID, groups=(*HYBRID.groups[:STATE], other))) as pool:
        keys = prompt(pool, 28, 16)
        monkeypatch.setattr(m, "KEYS_MAX", 20)
        result = store(pool, keys, [8])
        assert [of_group.stored for of_group in result.groups] == [9, 2, 9]
        assert result.reasons == {"too-long": 14}
        assert_served(pool, keys, 8)


def test_events_name_the_group(daemon: Daemon) -> None:
    with daemon.connect(HYBRID) as pool:
        store(pool, prompt(pool, 1, 4))
        batch = pool.events()
        layouts = {number: layout for number, (_, layout) in batch.namespaces.items()}
        stored = [event for event in batch.events if event.gained]
        by_group = [sum(len(one.keys) for one in stored if layouts[one.namespace].group == role) for role in ROLES]
        assert by_group == [4 * KEY_BYTES, WINDOW_CHUNKS * KEY_BYTES, KEY_BYTES]
        form = EventForm()
        shown = [wire for one in stored for wire in form.events_of(one, "model", layouts[one.namespace])]
        assert len(shown) == sum(layouts[one.namespace].group == ROLES[FULL] for one in stored)


@over("heads")
def test_one_event_has_the_chunks_and_their_token_ids_when_all_parts_are_stored(case: Case, daemon: Daemon) -> None:
    with Ranks(case, daemon.connect) as ranks:
        pool, keys = ranks.first, ranks.prompt(4)
        mark = pool.events().mark
        for save in ranks.begin(keys):
            assert pool.events(mark).events == ()
            save.commit()
        (stored,) = pool.events(mark).events
        assert (stored.kind, stored.parent) == (kv.EventKind.STORED, b"")
        assert stored.chunks == tuple(keys[number] for number in range(CHUNKS))
        assert stored.tokens == tokens_of(4, CHUNKS * CHUNK + 1)[: CHUNKS * CHUNK].astype("<i4").tobytes()
