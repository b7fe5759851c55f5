"""The main path over the real socket: miss, save, hit, load, in every form an engine's memory may have."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.key_chain import KeyChain
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import SMALL, in_both_write_modes
from tests.rigs.payload import (
    assert_right_bytes,
    load_all,
    paged_layers,
    payload_of,
    read_chunk,
    store,
    tokens_of,
    write_chunk,
)


def test_lookup_misses_what_was_never_stored(shared: Shared) -> None:
    with shared.connect() as pool:
        hit = pool.lookup(pool.keys(tokens_of(1, 100)))
        assert (hit.chunks, hit.tokens, len(hit.tiers)) == (0, 0, 0)
        lease = pool.acquire(hit)
        assert (lease.chunks, lease.tokens, lease.cost_s, lease.ticket()) == (0, 0, 0.0, b"")
        assert pool.load(lease, into=np.empty((0, SMALL.chunk_bytes), np.uint8)).wait() == kv.LoadResult(
            0, 0, "complete"
        )


@pytest.mark.parametrize("end", ["commit", "commit in the background", "abort"])
def test_a_layer_that_is_announced_after_the_end_is_refused(shared: Shared, end: str) -> None:
    with shared.connect() as pool:
        keys = pool.keys(tokens_of(4, 2 * 32))
        save = pool.save(keys, from_=payload_of(keys, SMALL))
        if end == "abort":
            save.abort()
        else:
            save.commit(wait=end == "commit")
        with pytest.raises(kv.InvalidArgument, match=r"layer 0 comes after the end of <Save 2 chunks"):
            save.layer(0)
        save.wait()


def test_a_load_of_a_lease_that_was_released_finds_nothing_there(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = pool.keys(tokens_of(5, 2 * 32))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        lease.release()
        load = pool.load(lease, into=np.zeros((2, SMALL.chunk_bytes), np.uint8))
        assert load.wait() == kv.LoadResult(0, 0, "gone"), "the connection is there"


def test_integers_of_numpy_are_integers(shared: Shared) -> None:
    with shared.connect() as pool:
        keys, one = pool.keys(tokens_of(6, 2 * 32)), cast(int, np.int64(1))
        save = pool.save(
            keys, from_=payload_of(keys, SMALL), first_chunk=cast(int, np.int64(0)), chunks=cast(int, np.int64(2))
        )
        save.layer(one)
        assert save.commit().stored == 2
        with pool.acquire(pool.lookup(keys)) as lease:
            load = pool.load(lease, into=np.zeros((1, SMALL.chunk_bytes), np.uint8), first_chunk=one)
            assert load.wait_layer(one)
            assert load.wait().chunks == 2
            with pytest.raises(kv.InvalidArgument, match=r"layer is True, expected 0\.\."):
                load.wait_layer(True)


def test_a_load_of_nothing_leaves_the_lease_to_the_others(shared: Shared) -> None:
    """The client renews a lease for as long as a load of it goes on."""
    with shared.connect() as pool:
        keys = pool.keys(tokens_of(3, 10 * 32))
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            load = pool.load(lease, into=np.zeros((10, SMALL.chunk_bytes), np.uint8))
            nothing = pool.load(lease, into=np.zeros((0, SMALL.chunk_bytes), np.uint8), first_chunk=10)
            assert nothing.wait().reason == "complete"
            assert pool._link._leases_in_use == {lease.hold.id: 1}
            assert load.wait().chunks == 10
            assert pool._link._leases_in_use == {}


@in_both_write_modes
def test_saved_chunks_are_loaded_by_another_pool(shared: Shared) -> None:
    with shared.connect() as writer, shared.connect() as reader:
        keys = writer.keys(tokens_of(2, 10 * 32 + 5))
        assert len(keys) == 10
        result = store(writer, keys)
        assert (result.stored, result.present, result.declined) == (10, 0, 0)
        again = reader.keys(tokens_of(2, 10 * 32 + 5).astype(np.int64))
        assert [again[number] for number in range(10)] == [keys[number] for number in range(10)]
        hit = reader.lookup(again)
        assert (hit.chunks, hit.tokens) == (10, 320)
        assert hit.tiers.tolist() == [kv.Level.DRAM] * 10
        loaded, into = load_all(reader, again)
        assert loaded == kv.LoadResult(10, 320, "complete")
        assert_right_bytes(again, SMALL, loaded, into)
        assert store(reader, again).present == 10


def test_a_lease_estimates_its_load_by_its_bytes(shared: Shared) -> None:
    with shared.connect() as pool:
        tokens = tokens_of(9, 8 * 32)
        keys = pool.keys(tokens)
        store(pool, keys)
        first = pool.lookup(pool.keys(tokens[: 2 * 32]))
        with pool.acquire(first) as short, pool.acquire(pool.lookup(keys)) as long:
            assert long.cost_s == pytest.approx(4 * short.cost_s)
            assert short.cost_s > 0


def test_lookup_finds_the_longest_prefix(shared: Shared) -> None:
    with shared.connect() as pool:
        tokens = tokens_of(3, 8 * 32)
        store(pool, pool.keys(tokens[: 5 * 32]))
        other = tokens.copy()
        other[3 * 32] += 1
        assert pool.lookup(pool.keys(tokens)).chunks == 5
        assert pool.lookup(pool.keys(other)).chunks == 3


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
        keys = pool.keys(tokens_of(4, 4 * 32))
        rows = payload_of(keys, SMALL)
        source = paged_layers(SMALL, 40, save_block, save_form)
        per_chunk = 32 // save_block
        ids = np.random.default_rng(5).permutation(40)[: 4 * per_chunk].tolist()
        for number in range(4):
            write_chunk(source, save_form, ids[number * per_chunk : (number + 1) * per_chunk], SMALL, rows[number])
        with pool.save(keys, pool.register(source, save_block, save_form), ids) as save:
            for layer in (2, 0, 1):
                save.layer(layer)
            assert save.commit().stored == 4
        target = paged_layers(SMALL, 40, load_block, load_form)
        cache = pool.register(target, load_block)
        per_chunk = 32 // load_block
        ids = np.random.default_rng(6).permutation(40)[: 4 * per_chunk].tolist()
        with pool.acquire(pool.lookup(keys)) as lease, pool.load(lease, cache, ids) as load:
            assert [load.wait_layer(layer) for layer in range(3)] == [True] * 3
            assert load.chunks_so_far == 4
        for number in range(4):
            part = ids[number * per_chunk : (number + 1) * per_chunk]
            assert np.array_equal(read_chunk(target, load_form, part, SMALL), rows[number])


@in_both_write_modes
def test_load_from_first_chunk_skips_blocks_the_engine_holds(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = pool.keys(tokens_of(7, 4 * 32))
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
def test_save_of_a_suffix_needs_its_parent(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = pool.keys(tokens_of(8, 6 * 32))
        orphan = store(pool, keys, first=2)
        assert (orphan.stored, orphan.declined, dict(orphan.reasons)) == (0, 4, {"no-parent": 4})
        assert pool.save(keys, from_=payload_of(keys, SMALL, 0, 2), chunks=2).commit().stored == 2
        assert store(pool, keys, first=2).stored == 4
        assert pool.lookup(keys).chunks == 6


def test_extend_hashes_only_new_tokens_to_the_same_keys(shared: Shared) -> None:
    with shared.connect() as pool:
        tokens = tokens_of(9, 300)
        grown = pool.keys(tokens[:70].tolist())
        grown.extend(tokens[70:71])
        grown.extend(tokens[71:])
        whole = pool.keys(tokens)
        assert grown.tokens == whole.tokens == 288
        assert [grown[number] for number in range(9)] == [whole[number] for number in range(9)]


@in_both_write_modes
def test_a_pending_chunk_is_declined_and_aborting_frees_it(shared: Shared) -> None:
    with shared.connect() as first, shared.connect() as second:
        keys = first.keys(tokens_of(10, 3 * 32))
        under_way = first.save(keys, from_=payload_of(keys, SMALL))
        declined = store(second, keys)
        assert dict(declined.reasons) == {"pending": 3}
        assert second.lookup(keys).chunks == 0
        under_way.abort()
        assert shared.daemon.stats()["reservations"] == 0
        assert store(second, keys).stored == 3


@in_both_write_modes
def test_leaving_a_save_without_commit_stores_nothing(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = pool.keys(tokens_of(11, 2 * 32))
        before = shared.daemon.stats()["dram.used_bytes"]
        with pool.save(keys, from_=payload_of(keys, SMALL)) as save:
            save.layer(0)
        assert save.done()
        assert pool.lookup(keys).chunks == 0
        assert shared.daemon.stats()["dram.used_bytes"] == before


@in_both_write_modes
def test_commit_in_the_background_gives_its_result_later(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = pool.keys(tokens_of(12, 2 * 32))
        save = pool.save(keys, from_=payload_of(keys, SMALL))
        assert save.commit(wait=False) is None
        assert save.wait().stored == 2
        assert pool.lookup(keys).chunks == 2


def test_namespaces_never_meet(shared: Shared) -> None:
    tokens = tokens_of(13, 3 * 32)
    with shared.connect() as pool, shared.connect(model="other") as other, shared.connect(salt=b"tenant") as salted:
        store(pool, pool.keys(tokens))
        assert other.lookup(other.keys(tokens)).chunks == 0
        assert salted.lookup(salted.keys(tokens)).chunks == 0
        assert salted.lookup(salted.keys(tokens, salt=b"")).chunks == 3
        assert pool.lookup(pool.keys(tokens, adapter="lora")).chunks == 0
        assert pool.lookup(pool.keys(tokens, extra=[(40, 50, b"image")])).chunks == 1


def test_a_key_of_another_namespace_is_not_served(shared: Shared) -> None:
    """A client that asks with another model's keys gets no lease, whatever the index contains."""
    tokens = tokens_of(14, 3 * 32)
    with shared.connect() as pool, shared.connect(model="other") as other:
        keys = pool.keys(tokens)
        store(pool, keys)
        hit = other._finder.lookup(keys, "")  # past the checks of a caller's mistakes
        assert hit.chunks == 3
        assert other._lease_fetcher.acquire(hit).chunks == 0


@in_both_write_modes
def test_a_scheduler_sees_the_minimum_over_ranks_and_hands_tickets(shared: Shared) -> None:
    tokens = tokens_of(15, 5 * 32)

    def layout(rank: int | None) -> kv.Layout:
        return kv.Layout(layers=2, kv_heads=1, head_dim=32, dtype="float16", chunk_tokens=32, rank=rank, world=2)

    with (
        shared.connect(layout(None)) as scheduler,
        shared.connect(layout(0)) as first,
        shared.connect(layout(1)) as second,
    ):
        store(first, first.keys(tokens))
        assert scheduler.lookup(scheduler.keys(tokens)).chunks == 0
        store(second, second.keys(tokens[: 3 * 32]))
        hit = scheduler.lookup(scheduler.keys(tokens))
        assert hit.chunks == 3
        lease = scheduler.acquire(hit)
        ticket = lease.ticket()
        scheduler.close()
        for pool in (first, second):
            claimed = pool.claim(ticket)
            assert claimed.chunks == 3
            keys = pool.keys(tokens)
            into = np.zeros((3, pool.layout.chunk_bytes), np.uint8)
            result = pool.load(claimed, into=into).wait()
            assert result.reason == "complete"
            assert_right_bytes(keys, pool.layout, result, into)
            assert pool.claim(ticket).chunks == 0
            claimed.release()
        assert first.claim(b"forged" * 5).chunks == 0
    assert shared.daemon.stats()["leases"] == 0


def test_keys_from_engine_hashes_use_the_last_hash_of_each_chunk(shared: Shared) -> None:
    with shared.connect() as pool:
        hashes = [bytes([number]) * 32 for number in range(7)]
        keys = pool.keys_from_hashes(hashes, block_tokens=16)
        assert len(keys) == 3
        changed = [*hashes[:2], b"x" * 32, *hashes[3:]]
        assert [pool.keys_from_hashes(changed, block_tokens=16)[number] for number in range(3)] == [
            keys[number] for number in range(3)
        ]
        changed[3] = b"y" * 32
        other = pool.keys_from_hashes(changed, block_tokens=16)
        assert [other[number] == keys[number] for number in range(3)] == [True, False, False]


@pytest.mark.parametrize("tokens", [[1.5, 2.5], [[1, 2]], "text", [1 << 40], None])
def test_invalid_token_ids_raise_at_the_call(shared: Shared, tokens: object) -> None:
    with shared.connect() as pool, pytest.raises(kv.InvalidArgument):
        pool.keys(tokens)


def test_wrong_block_ids_raise_at_the_call(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = pool.keys(tokens_of(16, 2 * 32))
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


@pytest.mark.parametrize(
    ("model", "layout", "named"),
    [
        ("another", SMALL, r"of the Pool of 'another' at /.*, expected .* of the Pool of 'model-.*' at /.*\.sock$"),
        (
            None,
            replace(SMALL, chunk_tokens=64),
            r"of the Pool of 'model-.*, expected .* of 'model-.*: the layout has chunk_tokens 64, expected 32",
        ),
        (None, replace(SMALL, rank=None, world=2), ": the layout has rank None, expected 0"),
    ],
)
def test_keys_of_another_pool_are_refused_unless_they_are_the_same_keys(
    shared: Shared, model: str | None, layout: kv.Layout, named: str
) -> None:
    tokens = tokens_of(17, 6 * 32)
    with (
        shared.connect() as pool,
        shared.connect() as twin,
        shared.connect(layout, model=model or shared.model) as other,
    ):
        assert store(pool, twin.keys(tokens)).stored == 6
        foreign = other.keys(tokens)
        hit = other.lookup(foreign)
        rows = np.zeros((len(foreign), SMALL.chunk_bytes), np.uint8)
        cache = pool.register(paged_layers(SMALL, 4, 16, "kv_first"), block_tokens=16)
        for attempt in (
            lambda: pool.lookup(foreign),
            lambda: pool.acquire(hit),
            lambda: pool.separate.acquire([hit]),
            lambda: pool.save(foreign, from_=rows),
            lambda: pool.separate.save([foreign], cache, [[0, 1]], [()]),
            lambda: pool.is_being_saved(foreign, 0),
            lambda: pool.retain(foreign, [kv.TokenRange(0)]),
            lambda: pool.announce(foreign),
            lambda: pool.demote(foreign),
            lambda: pool.hint({}, foreign),
            lambda: pool.lookup(KeyChain(SMALL.chunk_tokens, lambda: (bytes(32),))),
        ):
            with pytest.raises(kv.InvalidArgument, match=r"(keys are|hit is) of "):
                attempt()
        for attempt in (lambda: pool.lookup(foreign), lambda: pool.acquire(hit)):
            with pytest.raises(kv.InvalidArgument, match=named):
                attempt()
        twins = twin.lookup(twin.keys(tokens))
        with pool.acquire(twins) as lease:
            assert pool.lookup(twin.keys(tokens)).chunks == twins.chunks == lease.chunks == 6


def test_a_lease_of_another_pool_is_refused_and_nothing_is_loaded(shared: Shared) -> None:
    tokens = tokens_of(18, 2 * 32)
    with shared.connect() as pool, shared.connect() as twin, shared.connect(model="another") as other:
        keys = pool.keys(tokens)
        store(pool, keys)
        into = np.zeros((2, SMALL.chunk_bytes), np.uint8)
        cache = pool.register(paged_layers(SMALL, 4, 16, "kv_first"), 16, "kv_first")
        with pool.acquire(pool.lookup(keys)) as lease:
            for named, reader in (
                ("lease is of the Pool of 'model-.*' at /.*, expected one of the Pool of 'another' at /", other),
                (r"lease is of another connection, the Pool of 'model-.*: acquire .*claim\(lease\.ticket\(\)\)", twin),
            ):
                attempts = (partial(reader.load, lease, into=into), partial(reader.leased_memory, lease))
                for attempt in (*attempts, partial(reader.separate.load, [lease], cache, [[0, 1, 2, 3]])):
                    with pytest.raises(kv.InvalidArgument, match=named):
                        attempt()
            assert other.claim(lease.ticket()).chunks == 0
            with twin.claim(lease.ticket()) as claimed:
                assert not into.any()
                result = twin.load(claimed, into=into).wait()
            assert_right_bytes(keys, SMALL, result, into)


def test_a_cache_is_that_of_a_pool_with_the_same_model_and_layout(shared: Shared) -> None:
    """Of a draft and its target with equal geometry, each loads into its own KV."""
    wide = replace(SMALL, kv_heads=2 * SMALL.kv_heads)
    with (
        shared.connect() as pool,
        shared.connect() as twin,
        shared.connect(model="draft") as draft,
        shared.connect(wide) as wider,
    ):
        keys = pool.keys(tokens_of(21, 32))
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
                    partial(pool.separate.load, [lease], cache, [[0, 1]]),
                    partial(pool.separate.save, [keys], cache, [[0, 1]], [()]),
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
        with pytest.raises(kv.LayoutMismatch):
            pool.register(layers[:2], 16, "kv_first")
        with pytest.raises(kv.LayoutMismatch):
            pool.register([layer.astype(np.uint8) for layer in layers], 16, "kv_first")
