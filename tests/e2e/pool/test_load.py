"""Leases and loads: the right bytes of every group and part, into whatever memory an engine has, from where it goes on."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

import kvpool_client as kv
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import SMALL, in_both_write_modes, wait_until
from tests.rigs.layouts import CHUNK, FULL, HYBRID, STATE, WINDOW, over
from tests.rigs.payload import paged_layers, payload_of, read_chunk, write_chunk
from tests.rigs.prompts import (
    CHUNKS,
    Ranks,
    assert_hit_served,
    assert_loads,
    assert_served,
    begin_load,
    load,
    prompt,
    room_for,
    rows_of,
    store,
    whole_result,
)


@in_both_write_modes
@over()
def test_saved_chunks_are_loaded_by_other_connections_whole_or_in_parts(ranks: Ranks, shared: Shared) -> None:
    keys = ranks.prompt(2)
    assert ranks.store(keys) == ranks.needed(keys)
    with Ranks(ranks.case, shared.connect) as others, shared.connect(ranks.layout) as whole:
        others.assert_served(keys)
        assert_served(whole, keys, CHUNKS)
        assert store(whole, keys).present == ranks.needed(keys)
    wait_until(lambda: shared.daemon.stats()["leases"] == 0, "all leases have ended")


@over()
def test_a_load_begins_behind_what_the_engine_holds_but_for_windows(ranks: Ranks) -> None:
    keys = ranks.prompt(1)
    ranks.store(keys)
    for pool in ranks.pools:
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.tiers.tolist() == [kv.Level.DRAM] * CHUNKS
            assert lease.cost_s > 0
            result, found = load(pool, lease, CHUNKS - 1)
            assert result.chunks == CHUNKS
            chosen = [
                [CHUNKS - 1] if part.is_chained else chunks
                for part, chunks in zip(pool.layout.group_layouts, lease.ranges, strict=True)
            ]
            for right, here in zip(rows_of(pool, keys, chosen), found, strict=True):
                assert np.array_equal(here, right)
            begun, _ = begin_load(pool, lease, CHUNKS)
            for group, share in enumerate(pool.shares):
                assert all(begun.wait_layer(layer, group=group) for layer in range(share.layers))
            assert begun.wait().reason == "complete"
            for group, layer, named in ((-1, 0, "group is -1"), (9, 0, "group is 9"), (0, 99, "layer is 99")):
                with pytest.raises(kv.InvalidArgument, match=named):
                    begun.wait_layer(layer, group=group)


def test_a_load_of_a_lease_that_was_released_finds_nothing_there(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = prompt(pool, 5, 2)
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        into = room_for(pool, lease)[0]
        lease.release()
        assert pool.load(lease, into=into).wait() == kv.LoadResult(0, 0, "gone"), "the connection is there"


def test_integers_of_numpy_are_integers(shared: Shared) -> None:
    with shared.connect() as pool:
        keys, one = prompt(pool, 6, 2), cast(int, np.int64(1))
        save = pool.save(keys, from_=payload_of(keys, SMALL), first_chunk=cast(int, np.int64(0)), chunks=2 * one)
        save.layer(one)
        assert save.commit().stored == 2
        with pool.acquire(pool.lookup(keys)) as lease:
            begun, _ = begin_load(pool, lease, one)
            assert begun.wait_layer(one)
            assert begun.wait().chunks == 2
            with pytest.raises(kv.InvalidArgument, match=r"layer is True, expected 0\.\."):
                begun.wait_layer(True)
        assert pool.chunks_to_save(keys, boundaries=[one]) == (range(2),)
        assert pool.save(keys, from_=payload_of(keys, SMALL, 1), chosen=[[one]]).commit().present == 1
        assert pool.announce(keys, one).announced == 1


def test_a_wait_may_have_no_end(ranks: Ranks) -> None:
    keys = ranks.prompt(25)
    ranks.store(keys)
    with ranks.first.acquire(ranks.first.lookup(keys)) as lease:
        begun, _ = begin_load(ranks.first, lease)
        assert begun.wait_layer(0, float("inf"))
        assert begun.wait(float("inf")) == whole_result(ranks.layout, CHUNKS)


def test_a_load_of_nothing_leaves_the_lease_to_the_others(shared: Shared) -> None:
    """The client renews a lease for as long as a load of it goes on."""
    with shared.connect() as pool:
        keys = prompt(pool, 3, 10)
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            begun, _ = begin_load(pool, lease)
            assert load(pool, lease, 10)[0].reason == "complete"
            assert pool._link._leases_in_use == {lease.hold.id: 1}
            assert begun.wait().chunks == 10
            assert pool._link._leases_in_use == {}


def test_a_lease_estimates_its_load_by_its_bytes(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = prompt(pool, 9, 8)
        store(pool, keys)
        first = pool.lookup(keys, chunks_max=2)
        with pool.acquire(first) as short, pool.acquire(pool.lookup(keys)) as long:
            assert long.cost_s == pytest.approx(4 * short.cost_s)
            assert short.cost_s > 0


@over("plain", "hybrid", "divided")
def test_what_was_evicted_between_lookup_and_acquire_shortens_the_lease(ranks: Ranks, shared: Shared) -> None:
    keys = ranks.prompt(1)
    ranks.store(keys, [4, CHUNKS])
    hits = [pool.lookup(keys) for pool in ranks.pools]
    for kept in (0, 4):
        with shared.daemon.admin() as operator:
            operator.flush(shared.model, None)
        if kept:
            ranks.store(keys, [kept], chunks=kept)
        for pool, hit in zip(ranks.pools, hits, strict=True):
            with pool.acquire(hit) as lease:
                assert (hit.chunks, lease.chunks) == (CHUNKS, kept)
                assert_loads(pool, keys, lease)
    wait_until(lambda: shared.daemon.stats()["leases"] == 0, "the lease has ended")


@over("plain", "hybrid")
def test_cancel_ends_a_load(ranks: Ranks) -> None:
    pool, keys = ranks.first, ranks.prompt(1, 100)
    ranks.store(keys)
    with pool.acquire(pool.lookup(keys)) as lease:
        begun, into = begin_load(pool, lease)
        begun.cancel()
        seen = [rows.copy() for rows in into]
        result = begun.wait()
        assert result.reason in ("cancelled", "complete")
        assert all(map(np.array_equal, seen, into))
        layers = [(group, layer) for group, share in enumerate(pool.shares) for layer in range(share.layers)]
        are_there = [begun.wait_layer(layer, group=group) for group, layer in layers]
        assert not all(are_there) or result.reason == "complete"


@pytest.mark.parametrize(
    ("write_mode", "save_form", "save_block", "load_block"),
    [
        ("in-place", "kv_first", 16, 16),
        ("in-place", "block_first", 32, 8),
        ("copy", "kv_first", 32, 8),
        ("copy", "block_first", 16, 16),
        pytest.param("in-place", "kv_first", 32, 8, marks=pytest.mark.slow),
        pytest.param("in-place", "block_first", 16, 16, marks=pytest.mark.slow),
        pytest.param("copy", "kv_first", 16, 16, marks=pytest.mark.slow),
        pytest.param("copy", "block_first", 32, 8, marks=pytest.mark.slow),
    ],
    indirect=["write_mode"],
)
def test_engines_with_other_paging_share_chunks(
    shared: Shared, save_form: str, save_block: int, load_block: int
) -> None:
    load_form = "block_first" if save_form == "kv_first" else "kv_first"
    with shared.connect(copy_threads=2) as pool:
        keys = prompt(pool, 4, 4)
        rows = payload_of(keys, SMALL)
        source, ids = paged_layers(SMALL, 40, save_block, save_form), _ids(5, save_block)
        for number, row in enumerate(rows):
            write_chunk(source, save_form, ids[number], SMALL, row)
        with pool.save(keys, pool.register(source, save_block, save_form), np.ravel(ids)) as save:
            for layer in (2, 0, 1):
                save.layer(layer)
            assert save.commit().stored == 4
        target, ids = paged_layers(SMALL, 40, load_block, load_form), _ids(6, load_block)
        cache = pool.register(target, load_block)
        with pool.acquire(pool.lookup(keys)) as lease, pool.load(lease, cache, np.ravel(ids)) as begun:
            assert [begun.wait_layer(layer) for layer in range(3)] == [True] * 3
            assert begun.chunks_so_far == 4
        for number, row in enumerate(rows):
            assert np.array_equal(read_chunk(target, load_form, ids[number], SMALL), row)


def _ids(seed: int, block_tokens: int) -> list[list[int]]:
    """Blocks of four chunks, of 40."""
    found: list[list[int]] = (
        np.random.default_rng(seed).permutation(40)[: 4 * CHUNK // block_tokens].reshape(4, -1).tolist()
    )
    return found


@in_both_write_modes
def test_load_from_first_chunk_skips_blocks_the_engine_holds(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = prompt(pool, 7, 4)
        store(pool, keys)
        target = paged_layers(SMALL, 16, 16, "kv_first")
        cache = pool.register(target, 16)
        with pool.acquire(pool.lookup(keys)) as lease:
            result = pool.load(lease, cache, [-1, 3, 4, 5], first_chunk=2).wait()
        assert result == kv.LoadResult(4, 128, "complete")
        row = payload_of(keys, SMALL, 3, 1)[0]
        assert np.array_equal(read_chunk(target, "kv_first", [4, 5], SMALL), row)
        assert not target[0][:, 0].any()


@in_both_write_modes
def test_a_save_by_layers_and_a_load_into_paged_memory_of_each_group(shared: Shared) -> None:
    """The engine's blocks of each group have tables of their own; a state has one block a chunk."""
    with shared.connect(HYBRID) as pool:
        keys = prompt(pool, 1)
        named = pool.chunks_to_save(keys)
        rows = rows_of(pool, keys, named)
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
            for layer, group, message in ((0, 3, "group is 3"), (2, FULL, "layer is 2")):
                with pytest.raises(kv.InvalidArgument, match=message):
                    save.layer(layer, group)
            assert save.commit().declined == 0
            assert save.done()
        for arrays in memory:
            for array in arrays:
                array[...] = 0
        tables = [list(range(24)), [8, 9, -1, 11], [2]]
        with pool.acquire(pool.lookup(keys)) as lease:
            loaded = pool.load(lease, caches, tables)
            assert all(loaded.wait_layer(layer, group=WINDOW) for layer in range(window.layers))
            assert loaded.wait() == whole_result(HYBRID, CHUNKS)
            assert loaded.done()
        assert np.array_equal(read_chunk(memory[FULL], "block_first", [20, 21, 22, 23], full), rows[FULL][5])
        assert np.array_equal(read_chunk(memory[WINDOW], "kv_first", [8, 9], window), rows[WINDOW][0])
        assert not any(array[:, 10].any() for array in memory[WINDOW])
        assert np.array_equal(np.concatenate([array[2] for array in memory[STATE]]), rows[STATE][0])


def test_wrong_block_ids_raise_at_the_call(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = prompt(pool, 16, 2)
        cache = pool.register(paged_layers(SMALL, 8, 16, "kv_first"), 16)
        attempts: list[Callable[[], object]] = [
            lambda: pool.save(keys, cache, [0, 1, 2]),
            lambda: pool.save(keys, cache, [0, 1, 2, 8]),
            lambda: pool.save(keys, cache, [0, 1, 2, -1]),
            lambda: pool.save(keys, cache, [0.0, 1.0, 2.0, 3.0]),
            lambda: pool.save(keys, cache, [0, 1, 2, 3], first_chunk=3),
            lambda: pool.save(keys, cache),
            lambda: pool.save(keys),
            lambda: pool.load(pool.acquire(pool.lookup(keys)), cache, [0]),
        ]
        for attempt in attempts:
            with pytest.raises(kv.InvalidArgument):
                attempt()
        assert store(pool, keys).stored == 2


def test_memory_that_does_not_fit_the_groups_is_refused_by_name(shared: Shared) -> None:
    with shared.connect(HYBRID) as pool, shared.connect() as plain:
        keys = prompt(pool, 1, 4)
        rows = rows_of(pool, keys, pool.chunks_to_save(keys))
        attempts: list[tuple[Callable[[], object], str]] = [
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
            (lambda: plain.load(pool.acquire(pool.lookup(keys)), into=rows), "3 groups, expected 0"),
            (
                lambda: pool.load(plain.acquire(plain.lookup(plain.keys([1]))), into=rows),
                "lease is of .* 0 groups, expected 3",
            ),
        ]
        for attempt, message in attempts:
            with pytest.raises(kv.InvalidArgument, match=message):
                attempt()
        wait_until(lambda: shared.daemon.stats()["reservations"] == 0, "nothing is reserved")


def test_a_cache_is_that_of_a_pool_with_the_same_model_and_layout(shared: Shared) -> None:
    """Of a draft and its target with equal geometry, each loads into its own KV."""
    wide = replace(SMALL, kv_heads=2 * SMALL.kv_heads)
    with (
        shared.connect() as pool,
        shared.connect() as twin,
        shared.connect(model="draft") as draft,
        shared.connect(wide) as wider,
    ):
        keys = prompt(pool, 21, 1)
        caches = [
            one.register(paged_layers(one.layout, 4, 16, "kv_first"), 16, "kv_first") for one in (pool, draft, wider)
        ]
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            for wrong, named in (
                (caches[1], "cache is <Cache .* of the Pool of 'draft' at /.*, expected one of the Pool of 'model-"),
                (caches[2], f"the layout has kv_heads {wide.kv_heads}, expected {SMALL.kv_heads}"),
                ("cache", "cache is str, expected what Pool.register answered"),
            ):
                cache = cast(kv.Cache, wrong)
                for attempt in (
                    partial(pool.load, lease, cache, [0, 1]),
                    partial(pool.save, keys, cache, [0, 1]),
                    partial(pool.save_set, np.zeros((1, 32), np.uint8), cache=cache, block_ids=[0, 1]),
                ):
                    with pytest.raises(kv.InvalidArgument, match=named):
                        attempt()
            assert pool.load(lease, caches[0], [0, 1]).wait().reason == "complete"
        with twin.acquire(twin.lookup(keys)) as lease:
            assert twin.load(lease, caches[0], [2, 3]).wait().reason == "complete"


def test_an_ambiguous_cache_must_name_its_form(shared: Shared) -> None:
    with shared.connect() as pool:
        layers = paged_layers(SMALL, 2, 16, "kv_first")
        with pytest.raises(kv.LayoutMismatch, match="form"):
            pool.register(layers, 16)
        assert pool.register(layers, 16, "block_first").form == "block_first"
        for wrong in (layers[:2], [layer.astype(np.uint8) for layer in layers]):
            with pytest.raises(kv.LayoutMismatch):
                pool.register(wrong, 16, "kv_first")


def test_whole_layers_are_not_read_in_place_of_head_groups_or_shares(shared: Shared) -> None:
    for layout, share in ((replace(SMALL, head_groups=2), None), (SMALL, kv.Share(0, 2)), (HYBRID, None)):
        with (
            shared.connect(layout, share=share) as pool,
            pool.acquire(pool.lookup(pool.keys([1]))) as lease,
            pytest.raises(kv.InvalidArgument, match=r"leased_memory has whole layers|the layout of pool has 3 groups"),
        ):
            pool.leased_memory(lease)


def test_plain_chunks_and_those_of_one_full_group_are_the_same(shared: Shared) -> None:
    with shared.connect(kv.Layout(chunk_tokens=CHUNK, groups=HYBRID.groups[:1])) as pool:
        keys = prompt(pool, 1, 3)
        assert store(pool, keys).stored == 3
    with shared.connect(kv.Layout(chunk_tokens=CHUNK, layers=2, kv_heads=2, head_dim=16, dtype="float16")) as plain:
        assert_hit_served(plain, keys, plain.lookup(prompt(plain, 1, 3)))
