"""Ranks of engines of several sizes that store a chunk together: each its part, and every size loads it."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs.daemon import WRITE_MODES, Daemon, wait_until
from tests.rigs.module_daemons import module_daemon, module_daemons
from tests.rigs.payload import Bytes, assert_right_bytes, load_all, payload_of, store, tokens_of
from tests.rigs.shares.rank_memory import RankMemory, expected_part

__all__ = ["module_daemon", "module_daemons"]  # fixtures

LAYOUT = kv.Layout(layers=4, kv_heads=8, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=8)
CHUNKS, BLOCK_TOKENS = 5, 16
BLOCKS = 2 * CHUNKS
IDS = np.random.default_rng(5).permutation(BLOCKS).reshape(CHUNKS, 2)
KILLED = 7  # the seed of a prompt whose rank is killed while it saves
T = TypeVar("T")
STAGES = [kv.Share(0, 1, 0, 8), kv.Share(1, 3, 0, 8)]


def shares_of(size: int, layout: kv.Layout = LAYOUT) -> list[kv.Share]:
    """The shares of an engine of this tensor-parallel size; of two pipeline stages where it is 0."""
    return [kv.Share.of_rank(layout, rank, size) for rank in range(size)] if size else STAGES


def ends_of(ranks: list[T]) -> list[T]:
    """The first rank and the last one."""
    return ranks if len(ranks) < 2 else [ranks[0], ranks[-1]]


def part_rows(keys: kv.KeyChain, layout: kv.Layout, share: kv.Share) -> Bytes:
    """What a rank's share has of each chunk, contiguous."""
    rows = payload_of(keys, layout).reshape(len(keys), layout.layers * layout.head_groups, -1)
    return np.ascontiguousarray(rows[:, list(share.extents(layout))].reshape(len(keys), -1))


def save_part(daemon: Daemon, layout: kv.Layout, share: kv.Share, seed: int) -> kv.SaveResult:
    """A rank connects and saves its part of a prompt's chunks."""
    with daemon.connect(layout=layout, share=share) as pool:
        keys = pool.keys(tokens_of(seed, CHUNKS * layout.chunk_tokens))
        return pool.save(keys, from_=part_rows(keys, layout, share)).commit()


def save_paged(pool: kv.Pool, keys: kv.KeyChain) -> kv.SaveResult:
    """Save a rank's part out of paged memory, layer by layer, the last one first."""
    memory = RankMemory(pool.layout, pool.shares[0], blocks=BLOCKS, block_tokens=BLOCK_TOKENS, memory="kv_first")
    for chunk in range(len(keys)):
        memory.fill(IDS[chunk].tolist(), expected_part(keys[chunk], pool.layout, pool.shares[0]))
    cache = pool.register(memory.arrays, block_tokens=BLOCK_TOKENS, form=memory.form)
    save = pool.save(keys, cache, IDS[: len(keys)].reshape(-1))
    for layer in reversed(range(pool.shares[0].layers)):
        save.layer(layer)
    return save.commit()


def assert_loads(daemon: Daemon, layout: kv.Layout, share: kv.Share, seed: int) -> None:
    """A rank finds and loads its part of all chunks."""
    with daemon.connect(layout=layout, share=share) as pool:
        keys = pool.keys(tokens_of(seed, CHUNKS * layout.chunk_tokens))
        with pool.acquire(pool.lookup(keys)) as lease:
            expected = part_rows(keys, layout, share)
            into = np.zeros_like(expected)
            assert pool.load(lease, into=into).wait() == kv.LoadResult(CHUNKS, CHUNKS * layout.chunk_tokens, "complete")
        assert np.array_equal(into, expected)


def in_alternate_modes(sizes: Sequence[int]) -> pytest.MarkDecorator:
    """The sizes that write, each in one write mode; in the other one by hand."""
    cases = [(size, mode) for size in sizes for mode in WRITE_MODES]
    marked = [
        case if number % 4 in (0, 3) else pytest.param(*case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(("written", "write_mode"), marked, indirect=["write_mode"])


@in_alternate_modes([1, 2, 4, 8, 0])
def test_every_size_loads_what_the_ranks_of_another_stored(module_daemon: Daemon, written: int) -> None:
    shares = shares_of(written)
    pools = [module_daemon.connect(layout=LAYOUT, share=share) for share in shares]
    keys = pools[0].keys(tokens_of(100 + written, CHUNKS * LAYOUT.chunk_tokens))
    results = [save_paged(pool, keys) for pool in pools]
    for result in results[:-1]:
        assert (result.part, result.stored, result.states) == (CHUNKS, 0, ("part",) * CHUNKS)
    assert (results[-1].stored, results[-1].part, results[-1].declined) == (CHUNKS, 0, 0)
    assert pools[0].stats().get("part_chunks", 0) == (CHUNKS if len(pools) > 1 else 0)
    for pool in pools:
        pool.close()
    for share in {share for size in (1, 2, 4, 8, 0) for share in ends_of(shares_of(size))}:
        assert_loads(module_daemon, LAYOUT, share, 100 + written)
    with module_daemon.connect(layout=LAYOUT) as whole:
        loaded, into = load_all(whole, keys)
        assert loaded.chunks == CHUNKS
        assert_right_bytes(keys, LAYOUT, loaded, into)
    assert module_daemon.problems() == []
    assert module_daemon.stats()["joint_chunks"] == 0


def _rank(connection: Connection, socket: str, share: kv.Share) -> None:
    """A rank in a process of its own: saves what it is asked for."""
    with kv.connect(socket, model="test-model", layout=LAYOUT, share=share, timeout_s=60.0) as pool:
        while (seed := connection.recv()) is not None:
            keys = pool.keys(tokens_of(seed, CHUNKS * LAYOUT.chunk_tokens))
            save = pool.save(keys, from_=part_rows(keys, LAYOUT, share))
            if seed == KILLED:
                connection.send(None)
                connection.recv()  # until it is killed
            connection.send(save.commit().states)


class Rank:
    """See `_rank`."""

    def __init__(self, daemon: Daemon, share: kv.Share) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_rank, args=(theirs, daemon.socket, share), daemon=True)
        self.process.start()

    def ask(self, seed: int | None) -> None:
        self.connection.send(seed)

    def answer(self) -> tuple[str, ...]:
        assert self.connection.poll(60), "the rank has not answered"
        answered: tuple[str, ...] = self.connection.recv()
        return answered


def test_a_rank_in_a_process_of_its_own_stores_at_the_same_time_and_its_part_is_saved_by_another_when_it_is_killed(
    module_daemon: Daemon,
) -> None:
    left, right = shares_of(2)
    victim = Rank(module_daemon, right)
    for seed in range(2, 5):
        victim.ask(seed)
        answers = [save_part(module_daemon, LAYOUT, left, seed).states, victim.answer()]
        # Whoever comes later completes the chunks.
        assert sorted(answers) == [("part",) * CHUNKS, ("stored",) * CHUNKS]
        for share in shares_of(4):
            assert_loads(module_daemon, LAYOUT, share, seed)
    victim.ask(KILLED)
    assert victim.answer() is None
    assert save_part(module_daemon, LAYOUT, left, KILLED).part == CHUNKS
    assert save_part(module_daemon, LAYOUT, right, KILLED).reasons == {"pending": CHUNKS}
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    victim.process.join()
    wait_until(lambda: module_daemon.stats()["reservations"] == 0, "the killed rank's reservation ends")
    assert save_part(module_daemon, LAYOUT, right, KILLED).stored == CHUNKS
    assert_loads(module_daemon, LAYOUT, kv.Share.whole(LAYOUT), KILLED)


def test_replicated_heads_are_written_once(module_daemon: Daemon) -> None:
    layout = replace(LAYOUT, kv_heads=2, head_groups=2)
    results = [save_part(module_daemon, layout, share, 8) for share in shares_of(4, layout)]
    assert [result.states[0] for result in results] == ["part", "part", "stored", "present"]
    for share in shares_of(4, layout):
        assert_loads(module_daemon, layout, share, 8)


def test_latent_attention_is_stored_by_one_rank_and_read_by_all(module_daemon: Daemon) -> None:
    layout = replace(LAYOUT, kv_heads=1, head_groups=1, planes=1)
    results = [save_part(module_daemon, layout, share, 9) for share in shares_of(4, layout)]
    assert [result.states[0] for result in results] == ["stored", "present", "present", "present"]
    for share in shares_of(4, layout):
        assert_loads(module_daemon, layout, share, 9)


def test_stages_of_a_plain_layout_store_together(module_daemon: Daemon) -> None:
    layout = replace(LAYOUT, head_groups=1)
    shares = [kv.Share(0, 3), kv.Share(3, 1)]
    assert [save_part(module_daemon, layout, share, 10).states[0] for share in shares] == ["part", "stored"]
    for share in [kv.Share.whole(layout), *shares]:
        assert_loads(module_daemon, layout, share, 10)


def test_an_incomplete_chunk_expires_and_is_stored_whole(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__reservation_ttl="1s")
    left, right = shares_of(2)
    wait_until(
        lambda: save_part(daemon, LAYOUT, left, 11).part == CHUNKS, "a part is committed before its time is over"
    )
    with daemon.connect(layout=LAYOUT) as whole:
        keys = whole.keys(tokens_of(11, CHUNKS * LAYOUT.chunk_tokens))
        assert whole.lookup(keys).chunks == 0
        wait_until(lambda: daemon.stats()["joint_chunks"] == 0, "the incomplete chunks expire")
        assert daemon.stats()["joint_expired_chunks"] >= CHUNKS
        wait_until(lambda: store(whole, keys).declined == 0, "they are stored whole")
        assert whole.lookup(keys).chunks == CHUNKS
    assert save_part(daemon, LAYOUT, right, 11).present == CHUNKS


def test_an_incomplete_chunk_is_pending_for_who_has_all_of_it(module_daemon: Daemon) -> None:
    assert save_part(module_daemon, LAYOUT, shares_of(2)[0], 18).part == CHUNKS
    with module_daemon.connect(layout=LAYOUT) as whole:
        keys = whole.keys(tokens_of(18, CHUNKS * LAYOUT.chunk_tokens))
        assert whole.lookup(keys).chunks == 0
        assert store(whole, keys).reasons == {"pending": CHUNKS}
    assert save_part(module_daemon, LAYOUT, shares_of(2)[1], 18).stored == CHUNKS


def test_a_daemon_that_stops_or_is_killed_has_no_incomplete_chunk_afterwards(daemon: Daemon) -> None:
    left, right = shares_of(2)
    with daemon.connect(layout=LAYOUT, share=left) as pool:
        keys = pool.keys(tokens_of(12, CHUNKS * LAYOUT.chunk_tokens))
        for stop in (daemon.stop, daemon.kill):
            assert save_part(daemon, LAYOUT, right, 12).part == CHUNKS
            save = pool.save(keys, from_=part_rows(keys, LAYOUT, left))
            if stop == daemon.stop:
                assert save.commit().stored == CHUNKS
            stop()
            assert pool.save(keys, from_=part_rows(keys, LAYOUT, left)).commit().declined == CHUNKS
            daemon.start()
            wait_until(lambda: pool.connected, "the pool connects again")
            assert pool.lookup(keys).chunks == 0
            assert pool.save(keys, from_=part_rows(keys, LAYOUT, left)).commit().part == CHUNKS
            assert save_part(daemon, LAYOUT, right, 12).stored == CHUNKS
            daemon.stop()
            daemon.start()
            wait_until(lambda: pool.connected, "the pool connects again")


def test_an_aborted_part_leaves_the_others(module_daemon: Daemon) -> None:
    left, right = shares_of(2)
    with module_daemon.connect(layout=LAYOUT, share=left) as pool:
        keys = pool.keys(tokens_of(13, CHUNKS * LAYOUT.chunk_tokens))
        save = pool.save(keys, from_=part_rows(keys, LAYOUT, left))
        assert save_part(module_daemon, LAYOUT, right, 13).part == CHUNKS
        save.abort()
        assert save.wait().reasons == {"aborted": CHUNKS}
        assert pool.save(keys, from_=part_rows(keys, LAYOUT, left)).commit().stored == CHUNKS
        again = pool.save(keys, from_=part_rows(keys, LAYOUT, left)).commit()
        assert (again.stored, again.present, again.part, again.declined) == (0, CHUNKS, 0, 0)
    assert_loads(module_daemon, LAYOUT, kv.Share.whole(LAYOUT), 13)


def test_one_ticket_is_claimed_by_each_rank_of_one_namespace(module_daemon: Daemon) -> None:
    with module_daemon.connect(layout=LAYOUT) as scheduler:
        keys = scheduler.keys(tokens_of(14, CHUNKS * LAYOUT.chunk_tokens))
        store(scheduler, keys)
        with scheduler.acquire(scheduler.lookup(keys)) as lease:
            ticket, single = lease.ticket(claims=4), lease.ticket()
            for wrong in (0, -1, 1025, True, 1.0):
                with pytest.raises(kv.InvalidArgument, match="claims is"):
                    lease.ticket(claims=wrong)  # type: ignore[arg-type]
        pools = [module_daemon.connect(layout=LAYOUT, share=share) for share in shares_of(4)]
        leases = [pool.claim(ticket) for pool in pools]
        assert [one.chunks for one in leases] == [CHUNKS] * 4
        assert pools[0].claim(ticket).chunks == 0
        claimed = [pool.claim(single) for pool in pools]
        assert [one.chunks for one in claimed] == [CHUNKS, 0, 0, 0]
        claimed[0].release()
        for pool, one in zip(pools, leases, strict=True):
            expected = part_rows(keys, LAYOUT, pool.shares[0])
            into = np.zeros_like(expected)
            assert pool.load(one, into=into).wait().chunks == CHUNKS
            assert np.array_equal(into, expected)
            pool.close()
    wait_until(lambda: module_daemon.stats()["tickets"] == 0, "no ticket is left")
    assert module_daemon.problems() == []


def test_a_part_of_chunks_with_summaries_is_not_saved(module_daemon: Daemon) -> None:
    layout = kv.Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=32, summaries="mean")
    with module_daemon.connect(layout=layout, share=kv.Share(0, 1)) as pool:
        keys = pool.keys(tokens_of(15, 32))
        with pytest.raises(kv.InvalidArgument, match="with summaries"):
            pool.save(keys, from_=np.zeros((1, layout.chunk_bytes // 2), np.uint8))


def test_a_long_prompt_is_stored_in_parts_as_far_as_one_save_goes(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity="160MiB")  # half of it may be incomplete
    layout = kv.Layout(layers=2, kv_heads=2, head_dim=8, dtype="float16", chunk_tokens=16, head_groups=2)
    left, right = (kv.Share.of_rank(layout, rank, 2) for rank in range(2))
    with (
        daemon.connect(layout=layout, share=left, timeout_s=60.0) as one,
        daemon.connect(layout=layout, share=right, timeout_s=60.0) as two,
    ):
        keys = one.keys(tokens_of(17, 4100 * layout.chunk_tokens))
        payload = np.random.default_rng(17).integers(0, 256, (4100, 4, layout.chunk_bytes // 4), np.uint8)
        rows = {
            share: np.ascontiguousarray(payload[:, list(share.extents(layout))].reshape(4100, -1))
            for share in (left, right)
        }
        first = one.save(keys, from_=rows[left]).commit()
        assert (first.part, first.reasons) == (4096, {"too-long": 4})
        second = two.save(keys, from_=rows[right]).commit()
        assert (second.stored, second.reasons) == (4096, {"too-long": 4})
        assert one.lookup(keys).chunks == 4096
        for pool, share, kept in ((one, left, "part"), (two, right, "stored")):
            rest = pool.save(keys, from_=rows[share][4096:], first_chunk=4096).commit()
            assert rest.states == (kept,) * 4
        assert two.lookup(keys).chunks == 4100
        with two.acquire(two.lookup(keys)) as lease:
            into = np.zeros_like(rows[right])
            assert two.load(lease, into=into).wait().chunks == 4100
            assert np.array_equal(into, rows[right])
