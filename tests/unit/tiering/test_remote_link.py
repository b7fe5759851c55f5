"""Tests of pulls: what another node seems to have follows what is here, and a part that does not come shortens the prefix."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import Level, SaveState
from kvpool.tiers.base import Outcome
from tests.rigs.tiers.memory_remote import MemoryRemote, Node, planner
from tests.rigs.tiers.memory_tier import Fault
from tests.rigs.tiers.tiered_pool import LAYOUT, TieredPool, key_of, medium_of, payload

pytestmark = pytest.mark.asyncio
KEYS = [key_of(1, number) for number in range(12)]
DRAM_CHUNKS = 24


def chunks_of(keys: list[bytes]) -> dict[bytes, bytes]:
    return {key: payload(key) for key in keys}


@asynccontextmanager
async def pool_beside(nodes: list[Node], *, has_disk: bool = False) -> AsyncIterator[tuple[TieredPool, MemoryRemote]]:
    """A pool, and its tier of these nodes."""
    made: list[MemoryRemote] = []
    media, levels = ([medium_of(2 * DRAM_CHUNKS)], [Level.SSD]) if has_disk else ([], [])
    pool = TieredPool(media, DRAM_CHUNKS, levels=levels, kinds=[planner(nodes, made)])
    await pool.start()
    yield pool, made[0]
    await pool.stop()


async def test_what_is_no_name_of_a_node_is_refused() -> None:
    async with pool_beside([Node()]) as (pool, _):
        for name in ("x" * 257, "a\nb", "é" * 129):
            with pytest.raises(InvalidArgument, match=r"expected a node's name"):
                await pool.load(KEYS, owner=name)


@pytest.mark.parametrize("is_stale", [True, False], ids=["stale hint", "node refuses"])
async def test_a_hint_that_is_not_true_is_a_miss(is_stale: bool) -> None:
    node = Node(hints=set(KEYS))
    async with pool_beside([node]) as (pool, remote):
        remote.accepts_jobs = is_stale
        assert await pool.load(KEYS) == 0
        assert await pool.save(KEYS) == len(KEYS)
        assert await pool.load(KEYS) == len(KEYS)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.BAD_SOURCE, Outcome.DONE])
async def test_a_chunk_that_does_not_come_ends_the_prefix_before_it(outcome: Outcome) -> None:
    """DONE: the tier reports a chunk of which nothing has landed."""
    node = Node()
    node.store(chunks_of(KEYS))
    async with pool_beside([node]) as (pool, remote):
        remote.outcomes[KEYS[4]] = outcome
        assert await pool.load(KEYS) == 4
        del remote.outcomes[KEYS[4]]
        assert await pool.load(KEYS) == len(KEYS)


async def test_two_requests_share_one_pull() -> None:
    node = Node()
    node.store(chunks_of(KEYS))
    async with pool_beside([node]) as (pool, remote):
        remote.withhold()
        first = asyncio.ensure_future(pool.load(KEYS))
        await pool.until_moved(lambda: len(remote.asked) == 1)
        second = asyncio.ensure_future(pool.load(KEYS))
        await asyncio.sleep(0)
        pool.assert_sound()
        remote.release()
        assert list(await asyncio.gather(first, second)) == [len(KEYS), len(KEYS)]
        assert remote.asked == [KEYS]


async def states_of_save(pool: TieredPool, keys: list[bytes], parent: bytes = b"") -> list[str]:
    """What a save of these chunks is answered; it is given up."""
    made = await pool.serve(pool.pool.chains.reserve(pool.session, reserve_chain(parent, b"".join(keys))))
    if made.reservation:
        await pool.serve(pool.pool.chains.end_reservation(pool.session, made.reservation))
    return [SaveState(state).name for state in made.states]


@pytest.mark.parametrize("comes", [True, False], ids=["it comes", "it fails"])
async def test_a_save_of_what_is_on_its_way_is_pending_until_that_has_come_or_failed(comes: bool) -> None:
    node = Node()
    node.store(chunks_of(KEYS[:4]))
    async with pool_beside([node]) as (pool, remote):
        view = kvpool_native.IndexView(pool.pool.memory.index)
        remote.outcomes = {} if comes else {KEYS[1]: Outcome.FAILED}
        remote.withhold()
        load = asyncio.ensure_future(pool.load(KEYS[:4]))
        await pool.until_moved(lambda: len(remote.asked) == 1)
        assert await states_of_save(pool, KEYS[:7]) == ["PENDING"] * 4 + ["RESERVED"] * 3
        assert await states_of_save(pool, KEYS[4:6], parent=KEYS[3]) == ["RESERVED"] * 2
        assert [view.is_being_written(key) for key in KEYS[:6]] == [True] * 4 + [False] * 2
        assert await pool.save(KEYS[:6]) == 2, "what follows is stored meanwhile"
        assert await states_of_save(pool, KEYS[:6]) == ["PENDING"] * 6, "it goes with what it follows"
        pool.assert_sound()
        remote.release()
        assert await load == (4 if comes else 1)
        await pool.until_moved(lambda: not any(map(view.is_being_written, KEYS)))
        expected = ["PRESENT"] * 6 if comes else ["PRESENT"] + ["RESERVED"] * 5
        assert await states_of_save(pool, KEYS[:6]) == expected
        assert await pool.save(KEYS) == len(KEYS)
        assert await pool.load(KEYS) == len(KEYS)


async def test_a_save_of_what_is_read_from_disk_is_pending_and_stored_again_where_that_fails() -> None:
    async with pool_beside([Node()], has_disk=True) as (pool, _remote):
        assert await pool.save(KEYS[:4]) == 4
        assert await pool.demote() == 0
        await pool.flush("dram")
        view = kvpool_native.IndexView(pool.pool.memory.index)
        assert not any(map(view.is_being_written, KEYS))
        medium = pool.tier.medium
        offset = medium.rows[KEYS[1]].offset
        key, generation, _ = medium.checksums[offset]
        medium.checksums[offset] = key, generation, bytes(4 * LAYOUT.extents)
        pool.tier.fault_of = lambda kind, _key: Fault.WITHHELD if kind == "read" else Fault.NONE
        load = asyncio.ensure_future(pool.load(KEYS[:4]))
        await pool.until_moved(lambda: pool.tier.withheld == 4)
        assert await states_of_save(pool, KEYS[:6]) == ["PENDING"] * 4 + ["RESERVED"] * 2
        pool.tier.release_withheld()
        assert await load == 1
        assert (await states_of_save(pool, KEYS[:6]))[1] == "RESERVED"
        assert await pool.save(KEYS) == len(KEYS)


async def test_a_pull_under_way_at_the_end_is_cancelled() -> None:
    node = Node()
    node.store(chunks_of(KEYS))
    async with pool_beside([node]) as (pool, remote):
        remote.withhold()
        assert await pool.load(KEYS, is_patient=False) == 0


async def test_a_pull_takes_no_more_than_the_room_that_there_is() -> None:
    node = Node()
    keys = [key_of(2, number) for number in range(2 * DRAM_CHUNKS)]
    node.store(chunks_of(keys))
    async with pool_beside([node]) as (pool, _remote):
        found = await pool.load(keys)
        assert 0 < found <= DRAM_CHUNKS


async def test_random_requests_beside_random_failures_get_right_bytes_or_none(seed: int) -> None:
    chance = random.Random(seed)
    chains = [[key_of(chain, number) for number in range(1 + chain % 9)] for chain in range(16)]
    nodes = [Node(), Node()]
    async with pool_beside(nodes, has_disk=True) as (pool, remote):
        for _ in range(300):
            keys = chance.choice(chains)
            drawn = chance.random()
            if drawn < 0.3:
                node = chance.choice(nodes)
                node.store(chunks_of(keys[: chance.randrange(len(keys) + 1)]))
            elif drawn < 0.4:
                chance.choice(nodes).chunks.pop(chance.choice(keys), None)
            elif drawn < 0.5:
                remote.outcomes = {chance.choice(keys): chance.choice(list(Outcome))}
                remote.accepts_jobs = chance.random() < 0.8
            elif drawn < 0.6:
                await pool.flush(chance.choice(["", "dram"]))
            elif drawn < 0.75:
                await pool.save(keys[: chance.randrange(1, len(keys) + 1)])
            else:
                await pool.load(keys, is_patient=chance.random() < 0.7)
            pool.assert_sound()
        remote.accepts_jobs, remote.outcomes = True, {}
        await pool.until_moved(lambda: pool.pool._tiering.holds == 0)
        assert pool.pool.measure({}).tiers["peer"]["peer.pulled_chunks"], "nothing was pulled"
