"""Hybrid models whose ranks store parts of the same chunks: full layers and windows, each with head groups, of any size."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import kvpool_client as kv
from tests.e2e.shares.test_joint_saves import ends_of, in_alternate_modes
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.groups.hybrid import CHUNK, assert_served, key_of, payloads, whole_result
from tests.rigs.module_daemons import module_daemon, module_daemons
from tests.rigs.payload import Bytes, tokens_of
from tests.rigs.shares.rank_memory import RankMemory, expected_part

__all__ = ["module_daemon", "module_daemons"]  # fixtures

FULL, WINDOW = 0, 1
LAYOUT = kv.Layout(
    chunk_tokens=CHUNK,
    groups=(
        kv.Group(layers=2, kv_heads=4, head_dim=16, dtype="float16", head_groups=4),
        kv.Group(
            kind="window", window=2 * CHUNK - 5, layers=3, kv_heads=2, head_dim=32, dtype="float16", head_groups=2
        ),
    ),
)
CHUNKS, BLOCK_TOKENS = 5, 16
WINDOWS = (3, 4)  # the chunks of the window that the only boundary needs
SHAPE = {"layers": 1, "kv_heads": 4, "head_dim": 16}


def shares_of(size: int, layout: kv.Layout = LAYOUT) -> list[list[kv.Share]]:
    """The shares of an engine of this tensor-parallel size, by rank and group; of two pipeline stages where it is 0."""
    if not size:
        return [[kv.Share(0, 1, 0, 4), kv.Share(0, 2, 0, 2)], [kv.Share(1, 1, 0, 4), kv.Share(2, 1, 0, 2)]]
    return [[kv.Share.of_rank(part, rank, size) for part in layout.group_layouts] for rank in range(size)]


def connect(daemon: Daemon, shares: Sequence[kv.Share] | None, layout: kv.Layout = LAYOUT) -> kv.Pool:
    return kv.connect(daemon.socket, model="test-model", layout=layout, share=shares, timeout_s=60.0)


def keys_of(pool: kv.Pool, seed: int) -> kv.KeyChain:
    return pool.keys(tokens_of(seed, CHUNKS * pool.layout.chunk_tokens + 1))


def part_rows(keys: kv.KeyChain, shares: Sequence[kv.Share], chosen: Sequence[Sequence[int]]) -> list[Bytes]:
    """What a rank's shares have of the chosen chunks of each group, contiguous."""
    found = []
    for rows, part, share in zip(payloads(keys, LAYOUT, chosen), LAYOUT.group_layouts, shares, strict=True):
        extents = rows.reshape(len(rows), part.kv_extents, part.payload_bytes)[:, list(share.extents(part))]
        found.append(np.ascontiguousarray(extents.reshape(len(rows), share.of_layout(part).chunk_bytes)))
    return found


def begin_part(pool: kv.Pool, seed: int) -> kv.Save:
    keys = keys_of(pool, seed)
    return pool.save(keys, from_=part_rows(keys, pool.shares, pool.chunks_to_save(keys)))


def save_part(daemon: Daemon, shares: Sequence[kv.Share], seed: int) -> kv.SaveResult:
    """A rank connects and saves its part of a prompt's chunks."""
    with connect(daemon, shares) as pool:
        return begin_part(pool, seed).commit()


def save_paged(pool: kv.Pool, seed: int) -> kv.SaveResult:
    """Save a rank's part out of paged memory, layer by layer, the last one first."""
    keys = keys_of(pool, seed)
    named = pool.chunks_to_save(keys)
    caches, ids = [], []
    for group, (part, share) in enumerate(zip(pool.layout.group_layouts, pool.shares, strict=True)):
        memory = RankMemory(part, share, blocks=2 * CHUNKS, block_tokens=BLOCK_TOKENS, memory="kv_first")
        of_group = np.random.default_rng(group).permutation(2 * CHUNKS).reshape(CHUNKS, 2)
        for chunk in named[group]:
            memory.fill(of_group[chunk].tolist(), expected_part(key_of(keys, group, chunk), part, share))
        caches.append(pool.register(memory.arrays, block_tokens=BLOCK_TOKENS, form=memory.form, group=group))
        ids.append(of_group[list(named[group])].reshape(-1))
    save = pool.save(keys, caches, ids)
    for group, share in enumerate(pool.shares):
        for layer in reversed(range(share.layers)):
            save.layer(layer, group)
    return save.commit()


def assert_part_loads(daemon: Daemon, shares: Sequence[kv.Share], seed: int) -> None:
    """A rank finds and loads its part of all that a hit needs."""
    with connect(daemon, shares) as pool:
        keys = keys_of(pool, seed)
        hit = pool.lookup(keys)
        assert hit.chunks == CHUNKS
        with pool.acquire(hit) as lease:
            expected = part_rows(keys, shares, lease.ranges)
            into = [np.zeros_like(rows) for rows in expected]
            load = pool.load(lease, into=into)
            assert all(
                load.wait_layer(layer, group=group)
                for group, share in enumerate(shares)
                for layer in range(share.layers)
            )
            assert load.wait() == whole_result(pool.layout, CHUNKS)
        for right, here in zip(expected, into, strict=True):
            assert np.array_equal(right, here)


@in_alternate_modes([1, 2, 4, 8, 0])
def test_every_size_loads_what_the_ranks_of_another_stored(module_daemon: Daemon, written: int) -> None:
    pools = [connect(module_daemon, shares) for shares in shares_of(written)]
    results = [save_paged(pool, 100 + written) for pool in pools]
    assert [result.declined for result in results] == [0] * len(pools)
    for group, count in enumerate((CHUNKS, len(WINDOWS))):
        assert sum(result.groups[group].stored for result in results) == count, (
            "whoever completes a chunk has stored it"
        )
    assert len(pools) == 1 or results[0].part == CHUNKS + len(WINDOWS)
    for pool in pools:
        pool.close()
    for size in (1, 2, 4, 8, 0):
        for shares in ends_of(shares_of(size)):
            assert_part_loads(module_daemon, shares, 100 + written)
    with connect(module_daemon, None) as whole:
        assert_served(whole, keys_of(whole, 100 + written), CHUNKS)
    assert module_daemon.problems() == []
    assert module_daemon.stats()["joint_chunks"] == 0


@pytest.mark.parametrize("group", [FULL, WINDOW])
def test_a_rank_that_gives_one_group_up_leaves_a_miss_until_it_comes_again(module_daemon: Daemon, group: int) -> None:
    left, right = shares_of(2)
    seed = 20 + group
    assert save_part(module_daemon, left, seed).part == CHUNKS + len(WINDOWS)
    with connect(module_daemon, right) as pool:
        keys = keys_of(pool, seed)
        chosen: list[Sequence[int]] = [range(CHUNKS), WINDOWS]
        chosen[group] = ()
        stored = pool.save(keys, chosen=chosen, from_=part_rows(keys, right, chosen)).commit()
        assert stored.groups[group].stored == 0
        assert stored.groups[1 - group].declined == 0
        assert pool.lookup(keys).chunks == 0
        again = begin_part(pool, seed).commit()
        assert again.groups[group].stored == [CHUNKS, len(WINDOWS)][group]
        assert again.groups[1 - group].present == [CHUNKS, len(WINDOWS)][1 - group]
    for shares in shares_of(4):
        assert_part_loads(module_daemon, shares, seed)


def test_a_connection_that_ends_amid_its_part_leaves_others_whole(module_daemon: Daemon) -> None:
    left, right = shares_of(2)
    pool = connect(module_daemon, right)
    begun = begin_part(pool, 3)
    assert save_part(module_daemon, left, 3).part == CHUNKS + len(WINDOWS)
    assert save_part(module_daemon, right, 3).reasons["pending"] == CHUNKS + len(WINDOWS)
    pool.close()
    assert not begun.done()
    wait_until(lambda: module_daemon.stats()["reservations"] == 0, "its reservations end")
    assert save_part(module_daemon, right, 3).stored == CHUNKS + len(WINDOWS)
    assert_part_loads(module_daemon, shares_of(1)[0], 3)


def test_incomplete_chunks_of_every_group_expire(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__reservation_ttl="1s")
    left, right = shares_of(2)
    whole = CHUNKS + len(WINDOWS)
    wait_until(lambda: save_part(daemon, left, 4).part == whole, "a part is committed before its time is over")
    wait_until(lambda: daemon.stats()["joint_chunks"] == 0, "the incomplete chunks expire")
    assert daemon.stats()["joint_expired_chunks"] >= whole

    def is_stored() -> bool:
        save_part(daemon, right, 4)
        result = save_part(daemon, left, 4)
        return result.stored + result.present == whole

    wait_until(is_stored, "both parts are committed in time")
    assert_part_loads(daemon, right, 4)


def test_what_was_stored_in_parts_is_served_from_disk(start_daemon: Callable[..., Daemon], tmp_path: object) -> None:
    daemon = start_daemon(ssd__path=f"{tmp_path}/ssd", ssd__capacity="64MiB", ssd__write_through="true")
    for shares in shares_of(4):
        save_part(daemon, shares, 5)
    wait_until(lambda: daemon.stats()["ssd.chunks"] == CHUNKS + len(WINDOWS), "all chunks are on disk")
    daemon.stop()
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    for shares in shares_of(2):
        assert_part_loads(daemon, shares, 5)
    assert daemon.problems() == []


def test_one_ticket_is_claimed_by_each_rank(module_daemon: Daemon) -> None:
    save_part(module_daemon, shares_of(1)[0], 6)
    with connect(module_daemon, None, replace(LAYOUT, rank=None)) as scheduler:
        keys = keys_of(scheduler, 6)
        with scheduler.acquire(scheduler.lookup(keys)) as lease:
            ticket = lease.ticket(claims=2)
    pools = [connect(module_daemon, shares) for shares in shares_of(2)]
    for pool in pools:
        with pool.claim(ticket) as lease:
            expected = part_rows(keys, pool.shares, lease.ranges)
            into = [np.zeros_like(rows) for rows in expected]
            assert pool.load(lease, into=into).wait().chunks == CHUNKS
        assert all(np.array_equal(right, here) for right, here in zip(expected, into, strict=True))
    assert pools[0].claim(ticket).chunks == 0
    for pool in pools:
        pool.close()
    wait_until(lambda: module_daemon.stats()["tickets"] == 0, "no ticket is left")


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (kv.Share(0, 2), r"share is Share.* expected a kvpool_client.Share for each of 2 groups"),
        ([kv.Share(0, 2)], "for each of 2 groups"),
        ([kv.Share(0, 2, 0, 4), None], "share is NoneType"),
        ([kv.Share(0, 2, 0, 4), kv.Share(0, 4)], "expected some of the layout's 3"),
        ([kv.Share(0, 2, 0, 4), kv.Share(0, 3, 2, 2)], "expected some of the layout's 2"),
    ],
    ids=str,
)
def test_shares_that_do_not_fit_the_groups_are_refused_by_name(
    module_daemon: Daemon, share: object, message: str
) -> None:
    with pytest.raises(kv.InvalidArgument, match=message):
        kv.connect(module_daemon.socket, model="test-model", layout=LAYOUT, share=share)  # type: ignore[arg-type]


def test_a_plain_layout_takes_one_share(module_daemon: Daemon) -> None:
    layout = kv.Layout(**SHAPE, dtype="float16", chunk_tokens=32, head_groups=4)  # type: ignore[arg-type]
    with pytest.raises(kv.InvalidArgument, match="share is list"):
        kv.connect(module_daemon.socket, model="test-model", layout=layout, share=[kv.Share(0, 1)])
