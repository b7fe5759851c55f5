"""Engines of tensor-parallel size 1, 2, 4 and 8 over one namespace: each rank loads the extents of its heads."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import kvpool_client as kv
from tests.e2e.shares.test_joint_saves import in_alternate_modes
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.module_daemons import module_daemon, module_daemons
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of
from tests.rigs.shares.rank_memory import FORMS, RankMemory, expected_part

__all__ = ["module_daemon", "module_daemons"]  # fixtures

LAYOUT = kv.Layout(layers=3, kv_heads=8, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=8)
CHUNKS, BLOCK_TOKENS = 5, 16
BLOCKS = 2 * CHUNKS + 3
IDS = np.random.default_rng(3).permutation(BLOCKS)[: 2 * CHUNKS].reshape(CHUNKS, 2)


def _loaded(pool: kv.Pool, memory: RankMemory, keys: kv.KeyChain) -> kv.LoadResult:
    cache = pool.register(memory.arrays, block_tokens=BLOCK_TOKENS, form=memory.form)
    with pool.acquire(pool.lookup(keys)) as lease:
        load = pool.load(lease, cache, IDS[: lease.chunks].reshape(-1))
        assert all(load.wait_layer(layer) for layer in range(memory.share.layers))
        return load.wait()


def _assert_has(memory: RankMemory, keys: kv.KeyChain, chunks: int = CHUNKS) -> None:
    for chunk in range(chunks):
        expected = expected_part(keys[chunk], memory.layout, memory.share)
        assert np.array_equal(memory.chunk(IDS[chunk].tolist()), expected), f"chunk {chunk}"


@in_alternate_modes(range(len(FORMS)))
def test_every_size_loads_what_size_one_stored(module_daemon: Daemon, written: int) -> None:
    """Each of the forms is read by one rank of each size, and each rank reads some of them."""
    whole = kv.Share.whole(LAYOUT)
    with module_daemon.connect(layout=LAYOUT) as writer:
        keys = writer.keys(tokens_of(100 + written, CHUNKS * LAYOUT.chunk_tokens))
        memory = RankMemory(LAYOUT, whole, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, memory=FORMS[written])
        for chunk in range(CHUNKS):
            memory.fill(IDS[chunk].tolist(), expected_part(keys[chunk], LAYOUT, whole))
        cache = writer.register(memory.arrays, block_tokens=BLOCK_TOKENS, form=memory.form)
        save = writer.save(keys, cache, IDS.reshape(-1))
        for layer in (1, 0):
            save.layer(layer)
        assert save.commit().stored == CHUNKS
        loaded, into = load_all(writer, keys)
        assert_right_bytes(keys, LAYOUT, loaded, into)
        assert loaded.chunks == CHUNKS
    for size, (number, read) in itertools.product((1, 2, 4, 8), enumerate(FORMS)):
        share = kv.Share.of_rank(LAYOUT, (written * len(FORMS) + number) % size, size)
        with module_daemon.connect(layout=LAYOUT, share=share) as reader:
            mine = RankMemory(LAYOUT, share, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, memory=read)
            assert _loaded(reader, mine, keys) == kv.LoadResult(CHUNKS, CHUNKS * 32, "complete")
            _assert_has(mine, keys)
    assert module_daemon.problems() == []


def test_chunks_that_all_ranks_load_count_once(daemon: Daemon) -> None:
    with daemon.connect(layout=LAYOUT) as writer:
        keys = writer.keys(tokens_of(7, CHUNKS * LAYOUT.chunk_tokens))
        assert store(writer, keys).stored == CHUNKS
    for rank in range(4):
        share = kv.Share.of_rank(LAYOUT, rank, 4)
        with daemon.connect(layout=LAYOUT, share=share) as reader:
            memory = RankMemory(LAYOUT, share, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, memory=FORMS[0])
            assert _loaded(reader, memory, keys).chunks == CHUNKS
    wait_until(lambda: daemon.stats()["usage.loads"] == 4, "every rank has reported its load")
    stats, tokens = daemon.stats(), CHUNKS * LAYOUT.chunk_tokens
    assert [stats[f"usage.{name}"] for name in ("lookup_tokens", "hit_tokens", "loaded_tokens")] == [tokens] * 3
    assert (stats["usage.loaded_bytes"], stats["usage.lookups"]) == (CHUNKS * LAYOUT.chunk_bytes, 4)


def test_the_contiguous_form_has_one_head_group_after_the_other(module_daemon: Daemon) -> None:
    """As docs/layouts.md draws it: its lines of numpy, against the memory of an engine with all heads of a token together."""
    layout = replace(LAYOUT, head_groups=4)
    planes, groups, tokens = layout.planes, layout.head_groups, layout.chunk_tokens
    shape = (CHUNKS, layout.layers, planes, tokens, layout.kv_heads, layout.head_dim)
    whole = np.arange(np.prod(shape), dtype=np.uint32).astype(np.uint16).reshape(shape)
    divided = whole.reshape(*shape[:4], groups, layout.kv_heads // groups, layout.head_dim).transpose(
        0, 1, 4, 2, 3, 5, 6
    )
    rows = np.ascontiguousarray(divided).view(np.uint8).reshape(CHUNKS, layout.chunk_bytes)
    arrays = [
        np.zeros((planes, CHUNKS, tokens, layout.kv_heads, layout.head_dim), np.uint16) for _ in range(layout.layers)
    ]
    with module_daemon.connect(layout=layout) as pool:
        keys = pool.keys(tokens_of(5, CHUNKS * tokens))
        assert pool.save(keys, from_=rows).commit().stored == CHUNKS
        into = np.zeros_like(rows)
        with pool.acquire(pool.lookup(keys)) as lease:
            cache = pool.register(arrays, block_tokens=tokens, form="kv_first")
            assert pool.load(lease, cache, range(CHUNKS)).wait().chunks == CHUNKS
            assert pool.load(lease, into=into).wait().chunks == CHUNKS
    assert np.array_equal(np.stack(arrays).transpose(2, 0, 1, 3, 4, 5), whole)
    assert np.array_equal(into, rows)


def test_ranks_with_the_same_heads_and_stages_load_their_own_part(module_daemon: Daemon) -> None:
    layout = replace(LAYOUT, kv_heads=4, head_groups=2)
    with module_daemon.connect(layout=layout) as writer:
        keys = writer.keys(tokens_of(2, CHUNKS * 32))
        assert store(writer, keys).stored == CHUNKS
    shares = [kv.Share.of_rank(layout, rank, 4) for rank in range(4)]
    assert [share.first_group for share in shares] == [0, 0, 1, 1]
    shares += [kv.Share(0, 1, 0, 2), kv.Share(1, 2, 0, 2), kv.Share(1, 2, 1, 1)]
    for share in shares:
        with module_daemon.connect(layout=layout, share=share) as reader:
            mine = RankMemory(layout, share, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, memory="kv_first")
            assert _loaded(reader, mine, keys).reason == "complete"
            _assert_has(mine, keys)


def test_a_stage_of_a_plain_layout_loads_its_layers(module_daemon: Daemon) -> None:
    layout, share = replace(LAYOUT, head_groups=1), kv.Share(1, 2)
    with module_daemon.connect(layout=layout) as writer, module_daemon.connect(layout=layout, share=share) as reader:
        keys = writer.keys(tokens_of(3, CHUNKS * 32))
        store(writer, keys)
        with reader.acquire(reader.lookup(keys)) as lease:
            part = layout.chunk_bytes * 2 // 3
            into = np.zeros((CHUNKS, part), np.uint8)
            assert reader.load(lease, into=into).wait().chunks == CHUNKS
    assert np.array_equal(into, load_all(module_daemon.connect(layout=layout), keys)[1][:, -part:])


def test_a_bad_extent_ends_the_loads_of_its_ranks_alone(module_daemon: Daemon) -> None:
    shares = [kv.Share.of_rank(LAYOUT, rank, 2) for rank in range(2)]
    with module_daemon.connect(layout=LAYOUT) as writer:
        keys = writer.keys(tokens_of(4, CHUNKS * 32))
        store(writer, keys)
        results = {}
        for share in reversed(shares):
            with (
                module_daemon.connect(layout=LAYOUT, share=share) as reader,
                reader.acquire(reader.lookup(keys)) as lease,
            ):
                if share == shares[1]:
                    session = lease.hold.session
                    assert session is not None
                    offset = int(lease.hold.rows.offsets[3]) + share.extents(LAYOUT)[2] * LAYOUT.extent_bytes
                    session.arena.view()[offset + LAYOUT.payload_bytes] ^= 1  # behind the payload
                mine = RankMemory(LAYOUT, share, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, memory="head_major")
                cache = reader.register(mine.arrays, block_tokens=BLOCK_TOKENS)
                results[share] = reader.load(lease, cache, IDS[: lease.chunks].reshape(-1)).wait()
                _assert_has(mine, keys, results[share].chunks)
    assert results[shares[1]] == kv.LoadResult(3, 96, "checksum")
    assert results[shares[0]].chunks == 3  # the daemon has dropped the chunk when the failure is returned


def test_whole_layers_are_not_read_in_place_of_head_groups(module_daemon: Daemon) -> None:
    plain = replace(LAYOUT, head_groups=1)
    for layout, share in ((LAYOUT, None), (plain, kv.Share(0, 2))):
        with (
            module_daemon.connect(layout=layout, share=share) as pool,
            pool.acquire(pool.lookup(pool.keys([1]))) as lease,
            pytest.raises(kv.InvalidArgument, match="leased_memory has whole layers"),
        ):
            pool.leased_memory(lease)


def test_a_share_is_checked(module_daemon: Daemon) -> None:
    for wrong in (kv.Share(0, 4, 0, 8), kv.Share(-1, 1, 0, 8), kv.Share(0, 3, 7, 2), kv.Share(0, 0), kv.Share(0, True)):
        with pytest.raises(kv.InvalidArgument, match="share"):
            module_daemon.connect(layout=LAYOUT, share=wrong)
    with pytest.raises(kv.InvalidArgument, match="share is int"):
        module_daemon.connect(layout=LAYOUT, share=3)


@pytest.mark.torch
@pytest.mark.parametrize("is_head_major", [False, True])
def test_torch_tensors_of_ranks_are_loaded(module_daemon: Daemon, is_head_major: bool) -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    with module_daemon.connect(layout=LAYOUT) as writer:
        keys = writer.keys(tokens_of(6, CHUNKS * 32))
        store(writer, keys)
    for rank in range(4):
        share = kv.Share.of_rank(LAYOUT, rank, 4)
        shape = (2, BLOCKS, 2, BLOCK_TOKENS, 16) if is_head_major else (2, BLOCKS, BLOCK_TOKENS, 2, 16)
        owned = [torch.zeros(shape, dtype=torch.float16) for _ in range(LAYOUT.layers)]
        seen = [tensor.permute(0, 1, 3, 2, 4) if is_head_major else tensor for tensor in owned]
        mine = RankMemory(LAYOUT, share, blocks=BLOCKS, block_tokens=BLOCK_TOKENS, memory="kv_first")
        mine.arrays = [tensor.view(torch.int16).numpy().view(np.uint16) for tensor in seen]
        with module_daemon.connect(layout=LAYOUT, share=share) as reader:
            cache = reader.register(seen, block_tokens=BLOCK_TOKENS, form="kv_first")
            with reader.acquire(reader.lookup(keys)) as lease:
                assert reader.load(lease, cache, IDS.reshape(-1)).wait().chunks == CHUNKS
        _assert_has(mine, keys)
