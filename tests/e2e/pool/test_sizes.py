"""Engines of any tensor-parallel size, and of pipeline stages, over one namespace: each rank stores and loads its part."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.layouts.groups import GROUPS_MAX
from kvpool.states import Level
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import WRITE_MODES, Daemon, wait_until
from tests.rigs.layouts import CHUNK, DIVIDED, HEADS, LATENT, Case, over, shares_of
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.prompts import CHUNKS, Ranks, assert_served, prompt, store
from tests.rigs.rank_memory import FORMS, RankEngine

SIZES = (1, 2, 4, 8, 0)


def in_alternate_modes(sizes: tuple[int, ...]) -> pytest.MarkDecorator:
    """The sizes that write, each in one write mode; in the other one by hand."""
    cases = [(size, mode) for size in sizes for mode in WRITE_MODES]
    marked = [
        case if number % 4 in (0, 3) else pytest.param(*case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(("written", "write_mode"), marked, indirect=["write_mode"])


def ends_of(ranks: list[Any]) -> list[Any]:
    """The first rank and the last one."""
    return ranks[:1] + ranks[1:][-1:]


@pytest.mark.parametrize("layout", [HEADS, DIVIDED], ids=["heads", "divided"])
@in_alternate_modes(SIZES)
def test_every_size_loads_what_the_ranks_of_another_stored(shared: Shared, layout: kv.Layout, written: int) -> None:
    """Out of paged memory and into it, layer by layer, the last one first."""
    with Ranks(Case(layout, tuple(shares_of(layout, written))), shared.connect) as ranks:
        keys = ranks.prompt(1)
        results = [RankEngine(pool).save(keys, [3, CHUNKS]) for pool in ranks.pools]
        assert [result.declined for result in results] == [0] * len(results)
        wanted = list(map(len, ranks.first.chunks_to_save(keys, boundaries=[3, CHUNKS])))
        for group, count in enumerate(wanted if layout.groups else ()):
            stored = sum(result.groups[group].stored for result in results)
            assert stored == count, "whoever completes a chunk has stored it"
        if len(results) > 1:
            assert results[0].part == sum(wanted)
            assert ranks.first.stats()["part_chunks"] == sum(wanted)
        if not layout.groups:
            assert [result.states for result in results[:-1]] == [("part",) * CHUNKS] * (len(results) - 1)
            assert results[-1].states == ("stored",) * CHUNKS
    for share in itertools.chain(*(ends_of(shares_of(layout, size)) for size in SIZES)):
        with shared.connect(layout, share=share) as pool:
            RankEngine(pool).assert_loads(keys)
            assert_served(pool, keys, CHUNKS)
    with shared.connect(layout) as whole:
        assert_served(whole, keys, CHUNKS)
    assert shared.daemon.stats()["joint_chunks"] == 0


@in_alternate_modes(tuple(range(len(FORMS))))
def test_every_form_of_memory_loads_what_another_stored(shared: Shared, written: int) -> None:
    """Each of the forms is read by one rank of each size, and each rank reads some of them."""
    with shared.connect(HEADS) as writer:
        keys = prompt(writer, 1)
        assert RankEngine(writer, FORMS[written]).save(keys).stored == CHUNKS
    for size, (number, read) in itertools.product((1, 2, 4, 8), enumerate(FORMS)):
        share = kv.Share.of_rank(HEADS, (written * len(FORMS) + number) % size, size)
        with shared.connect(HEADS, share=share) as reader:
            RankEngine(reader, read).assert_loads(keys)


@pytest.mark.parametrize(
    ("layout", "shares", "states"),
    [
        (replace(HEADS, kv_heads=2, head_groups=2), 4, ["part", "part", "stored", "present"]),  # replicated heads
        (LATENT, 4, ["stored", "present", "present", "present"]),
        (replace(HEADS, head_groups=1), [kv.Share(0, 3), kv.Share(3, 1)], ["part", "stored"]),
        (
            replace(HEADS, kv_heads=4, head_groups=2),
            [kv.Share(0, 1, 0, 2), kv.Share(1, 3, 0, 2), kv.Share(1, 3, 1, 1)],
            ["part", "stored", "present"],
        ),
    ],
    ids=["replicated heads", "latent", "stages", "stages and heads"],
)
def test_parts_that_several_ranks_have_are_written_once(
    shared: Shared, layout: kv.Layout, shares: Any, states: list[str]
) -> None:
    ranks = Ranks(Case(layout, tuple(shares_of(layout, shares) if isinstance(shares, int) else shares)), shared.connect)
    with ranks, shared.connect(layout) as whole:
        keys = ranks.prompt(8)
        assert [store(pool, keys).states for pool in ranks.pools] == [(state,) * CHUNKS for state in states]
        ranks.assert_served(keys)
        assert_served(whole, keys, CHUNKS)


def test_chunks_that_all_ranks_load_count_once(daemon: Daemon) -> None:
    with daemon.connect(HEADS) as writer:
        keys = prompt(writer, 7)
        assert store(writer, keys).stored == CHUNKS
    with Ranks(Case(HEADS, tuple(shares_of(HEADS, 4))), daemon.connect) as ranks:
        ranks.assert_served(keys)
        wait_until(lambda: daemon.stats()["usage.loads"] == 4, "every rank has reported its load")
    stats, tokens = daemon.stats(), CHUNKS * CHUNK
    assert [stats[f"usage.{name}"] for name in ("lookup_tokens", "hit_tokens", "loaded_tokens")] == [tokens] * 3
    assert (stats["usage.loaded_bytes"], stats["usage.lookups"]) == (CHUNKS * HEADS.chunk_bytes, 4)


def test_the_contiguous_form_has_one_head_group_after_the_other(shared: Shared) -> None:
    """As docs/layouts.md draws it: its lines of numpy, against the memory of an engine with all heads of a token together."""
    layout = replace(HEADS, head_groups=4)
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
    with shared.connect(layout) as pool:
        keys = prompt(pool, 5)
        assert pool.save(keys, from_=rows).commit().stored == CHUNKS
        into = np.zeros_like(rows)
        with pool.acquire(pool.lookup(keys)) as lease:
            cache = pool.register(arrays, block_tokens=tokens, form="kv_first")
            assert pool.load(lease, cache, range(CHUNKS)).wait().chunks == CHUNKS
            assert pool.load(lease, into=into).wait().chunks == CHUNKS
    assert np.array_equal(np.stack(arrays).transpose(2, 0, 1, 3, 4, 5), whole)
    assert np.array_equal(into, rows)


@pytest.mark.torch
@pytest.mark.parametrize("is_head_major", [False, True])
def test_torch_tensors_of_ranks_are_loaded(shared: Shared, is_head_major: bool) -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    with shared.connect(HEADS) as writer:
        keys = prompt(writer, 6)
        store(writer, keys)
    for share in shares_of(HEADS, 4):
        with shared.connect(HEADS, share=share) as reader:
            engine = RankEngine(reader, "head_major" if is_head_major else "kv_first")
            (memory,) = engine.memories
            owned = [torch.from_numpy(array.view(np.int16)).view(torch.float16) for array in memory.arrays]
            engine.register([owned])
            engine.assert_loads(keys)


def test_as_many_groups_with_as_long_formats_as_there_may_be_are_served(shared: Shared) -> None:
    full = kv.Group(layers=1, kv_heads=1, head_dim=8, planes=1, dtype="uint8")
    states = [
        kv.Group(kind="state", layers=1, state_bytes=8, format=f"{number:02}" * 128) for number in range(GROUPS_MAX - 1)
    ]
    with shared.connect(kv.Layout(chunk_tokens=CHUNK, groups=(full, *states)), model="m" * 200) as pool:
        keys = prompt(pool, 4, 2)
        store(pool, keys)
        assert_served(pool, keys, 2)


@over("heads", "divided")
def test_only_whole_chunks_go_to_the_disk_and_come_back_for_every_size(
    case: Case, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    with Ranks(case, daemon.connect) as ranks:
        keys, half = ranks.prompt(1), ranks.prompt(2)
        ranks.store(keys)
        assert store(ranks.first, half).part == ranks.needed(half)
        with daemon.admin() as admin:
            assert admin.demote_all(60.0)["left"] == 0
        assert daemon.stats()["ssd.chunks"] == ranks.needed(keys)
    daemon.kill()
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    assert_each_size_loads(daemon, case.layout, keys, Level.SSD)
    with Ranks(case, daemon.connect) as ranks:
        assert ranks.first.lookup(half).chunks == 0
        ranks.store(half)
    assert daemon.problems() == []


@over("heads", "divided")
def test_another_node_fetches_only_whole_chunks(case: Case, tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here), Ranks(case, owner.connect) as ranks:
        keys = ranks.prompt(3)
        ranks.store(keys)
        assert_each_size_loads(here, case.layout, keys, Level.PEER)


def assert_each_size_loads(daemon: Daemon, layout: kv.Layout, keys: kv.KeyChain, level: Level) -> None:
    """Loads end as the extents that they ask for land. The first rank brings the chunks here."""
    for number, share in enumerate(itertools.chain(*(shares_of(layout, size) for size in (4, 1, 0)))):
        with daemon.connect(layout, share=share, timeout_s=60.0) as pool:
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the chunks are known")
            assert number or set(pool.lookup(keys).tiers.tolist()) == {level}
            RankEngine(pool).assert_loads(keys)
