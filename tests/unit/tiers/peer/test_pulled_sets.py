"""Tests of sets between pools over real sockets: one pull for all that a node has of a part, each chunk answered for itself."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.layout import Layout
from kvpool.layouts.groups import WINDOW, GroupRole
from kvpool.peers.control import records as r
from kvpool.peers.control.pullers import Puller
from kvpool.pool.readers.set_task import SOUGHT_AT_ONCE
from kvpool.tiers.peer import pull_driver
from tests.rigs.nodes.fleet import Node, peer_config
from tests.rigs.tiers.tiered_pool import CHUNK, LAYOUT, key_of, medium_of
from tests.unit.pool.test_sets_below import lease, load

pytestmark = pytest.mark.asyncio
WINDOWED = replace(LAYOUT, group=GroupRole(WINDOW, 64 * LAYOUT.chunk_tokens, 0))
KEYS = [key_of(5, number) for number in range(SOUGHT_AT_ONCE)]
DRAM_CHUNKS = 400


class Rig:
    """`here` leases sets; `there` and a `third` node have chunks. Each has a session of `layout`."""

    def __init__(self, layout: Layout, offered: int | None, there_chunks: int = DRAM_CHUNKS) -> None:
        self._layout = layout
        self._offers = peer_config() if offered is None else peer_config(offered=offered)
        self.here = Node("here", DRAM_CHUNKS)
        self.there = Node("there", there_chunks, media=[medium_of(2 * DRAM_CHUNKS)])
        self.third = Node("third", DRAM_CHUNKS)
        self.nodes = (self.there, self.third, self.here)

    async def start(self) -> None:
        for node in self.nodes:
            await node.start(self._offers)
            node.pool.pool.drop_connection(node.pool.session.connection)
            node.pool.session = node.pool.pool.open_session(ConnectionId(1), "model", self._layout)
        await self.here.join(self.there)
        await self.here.join(self.third)

    async def save(self, node: Node, keys: Sequence[bytes]) -> None:
        """A node stores these chunks, each alone, and `here` knows."""
        for key in keys:
            assert await node.pool.save([key]) == 1
        if node is not self.here:
            self.here.believe(node, keys)

    def pulls(self, *nodes: Node) -> list[int]:
        """Pulls that these nodes were asked for."""
        return [node.server.counts["pulls"] for node in nodes or (self.there, self.third)]

    def answer_late(self, node: Node) -> None:
        """Each answer of this node takes a third of the time that `here` has for a part."""
        serve, config = node.offers.serve, self.here.tier._driver._config

        def serve_late(puller: Puller, pull: r.Pull, answer: Callable[[r.Offer | r.Refused], bool]) -> None:
            self.here.clock.advance((config.answer_timeout + config.pull_timeout) / 3)
            serve(puller, pull, answer)

        node.offers.serve = serve_late  # type: ignore[method-assign]

    async def load(self, keys: Sequence[bytes], session: EngineSession | None = None) -> list[str]:
        """See `tests.unit.pool.test_sets_below`; afterwards nothing is under way."""
        states = await load(self.here.pool, keys, session)
        await self.here.pool.until_moved(lambda: self.here.pool.pool._tiering.holds == 0)
        return states


@asynccontextmanager
async def rig_of(
    layout: Layout = LAYOUT, *, offered: int | None = None, there_chunks: int = DRAM_CHUNKS
) -> AsyncIterator[Rig]:
    """A rig of which nothing is held, and no request was refused as wrong, when it ends."""
    rig = Rig(layout, offered, there_chunks)
    await rig.start()
    yield rig
    for node in (rig.there, rig.third):
        await node.pool.until_moved(lambda: node.offers.stats()["offers"] == 0)  # noqa: B023 - awaited at once
        # What was reported as wrong is compared under a lease.
        await node.pool.until_moved(lambda: node.pool.pool.measure({}).index["leases"] == 0)  # noqa: B023 - likewise
        assert sum(node.server.counts[f"refused.{code}"] for code in r.REFUSAL_CODES) == 0
    for node in rig.nodes:
        await node.stop()


def landed_but(*gone: int) -> list[str]:
    """What a load of KEYS says where these did not come."""
    return ["failed" if number in gone else "landed" for number in range(len(KEYS))]


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["chained", "window"])
async def test_a_set_of_another_node_is_one_pull(layout: Layout) -> None:
    async with rig_of(layout) as rig:
        await rig.save(rig.there, KEYS)
        await rig.save(rig.here, KEYS[20:23])
        keys = [key_of(6, 1), *KEYS[::-1], key_of(6, 2)]
        assert await rig.load(keys) == ["absent", *landed_but(), "absent"]
        assert rig.pulls() == [1, 0]
        assert await rig.load(KEYS) == landed_but()
        assert rig.pulls() == [1, 0], "all of it is here now"


async def test_what_the_owner_lacks_of_a_set_takes_no_other_along_and_is_not_asked_for_again_at_once() -> None:
    async with rig_of() as rig:
        gone = (0, 9, 10, 40, len(KEYS) - 1)
        await rig.save(rig.there, [key for number, key in enumerate(KEYS) if number not in gone])
        rig.here.believe(rig.there, KEYS)
        assert await rig.load(KEYS) == landed_but(*gone)
        assert rig.pulls() == [1, 0]
        assert await rig.load(KEYS) == ["absent" if number in gone else "landed" for number in range(len(KEYS))]
        assert rig.pulls() == [1, 0]


async def test_what_one_node_lacks_is_asked_of_the_next_one() -> None:
    async with rig_of() as rig:
        await rig.save(rig.there, KEYS[::2])
        rig.here.believe(rig.there, KEYS)
        await rig.save(rig.third, KEYS[1:20:2])
        assert await rig.load(KEYS) == landed_but(*range(21, len(KEYS), 2))
        assert rig.pulls() == [1, 1]


async def test_a_set_over_two_nodes_is_a_pull_of_each_however_its_keys_are_mixed() -> None:
    async with rig_of() as rig:
        await rig.save(rig.there, KEYS[::2])
        await rig.save(rig.third, KEYS[1::2])
        assert await rig.load(KEYS) == landed_but()
        assert rig.pulls() == [1, 1]


async def test_what_an_owner_has_no_room_to_offer_at_once_it_is_asked_for_again() -> None:
    at_once = 20
    async with rig_of(offered=at_once * CHUNK) as rig:
        await rig.save(rig.there, KEYS[at_once:])
        rig.here.believe(rig.there, KEYS)
        assert await rig.load(KEYS) == landed_but(*range(at_once))
        assert rig.pulls()[0] == -(-len(KEYS) // at_once), "the first ones, of which it has none, count too"


@pytest.mark.parametrize("lacking", [[], [len(KEYS) - 1], [0], range(40)], ids=["none", "last", "first", "most"])
async def test_a_slow_owner_of_little_room_is_asked_as_long_as_each_answer_says_more(lacking: Sequence[int]) -> None:
    at_once = 8
    async with rig_of(offered=at_once * CHUNK) as rig:
        await rig.save(rig.there, [key for number, key in enumerate(KEYS) if number not in lacking])
        rig.here.believe(rig.there, KEYS)
        rig.answer_late(rig.there)
        assert await rig.load(KEYS) == landed_but(*lacking)
        assert rig.pulls()[0] == len(KEYS) // at_once


async def test_a_slow_node_that_lacks_as_much_as_the_one_before_has_as_much_time() -> None:
    at_once = 8
    async with rig_of(offered=at_once * CHUNK) as rig:
        await rig.save(rig.there, KEYS[:24])
        await rig.save(rig.third, KEYS[48:])
        rig.here.believe(rig.there, KEYS)
        rig.here.believe(rig.third, KEYS[24:])
        for node in (rig.there, rig.third):
            rig.answer_late(node)
        assert await rig.load(KEYS) == landed_but(*range(24, 48))
        assert rig.pulls() == [len(KEYS) // at_once, len(KEYS[24:]) // at_once]


@asynccontextmanager
async def full_owner() -> AsyncIterator[tuple[Rig, int]]:
    """A rig whose owner has KEYS on its disk, and whose DRAM the lease of an engine there fills, which is given too."""
    there_chunks = 30
    async with rig_of(there_chunks=there_chunks) as rig:
        fill = [key_of(70, number) for number in range(there_chunks)]
        for key in [*KEYS, *fill]:
            await rig.save(rig.there, [key])
            assert await rig.there.pool.demote() == 0
        yield rig, (await lease(rig.there.pool, fill)).lease


def assert_trusted(rig: Rig) -> None:
    """The owner was busy, and is not put behind others for that."""
    driver, nodes = rig.here.tier._driver, rig.here.tier.nodes
    assert driver.counts["busy"] >= 1
    assert driver.counts["empty"] == 0
    assert not nodes.is_deferred(rig.there.name)
    assert nodes.of(rig.there.name).last_error == f"has no room to offer any of {len(KEYS)} chunks now"


async def test_an_owner_whose_leases_leave_no_room_is_asked_again_until_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pull_driver, "BUSY_S", 600.0)
    async with full_owner() as (rig, held):
        loading = asyncio.get_running_loop().create_task(rig.load(KEYS))
        await rig.here.pool.until_moved(lambda: loading.done() or rig.here.tier._driver.counts["busy"] >= 1)
        assert_trusted(rig)
        rig.there.pool.pool.leases.release(rig.there.pool.session, held)
        assert await loading == landed_but()


async def test_an_owner_whose_leases_leave_no_room_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_driver, "BUSY_S", 4.0)
    async with full_owner() as (rig, held):
        loading = asyncio.get_running_loop().create_task(rig.load(KEYS))
        await rig.here.pool.until_moved(lambda: loading.done() or rig.here.tier._driver.counts["busy"] >= 1)
        rig.here.clock.advance(4.0)
        assert await loading == landed_but(*range(len(KEYS)))
        assert_trusted(rig)
        rig.there.pool.pool.leases.release(rig.there.pool.session, held)
        monkeypatch.setattr(pull_driver, "BUSY_S", 600.0)
        assert await rig.load(KEYS) == landed_but(), "it did not lack them"


async def test_chunks_on_the_owners_disk_are_promoted_there() -> None:
    async with rig_of() as rig:
        await rig.save(rig.there, KEYS)
        assert await rig.there.pool.demote() == 0
        await rig.there.pool.flush("dram")
        await rig.save(rig.there, KEYS[4:6])
        assert await rig.load(KEYS) == landed_but()
        assert rig.pulls() == [1, 0]


async def test_of_a_set_a_chunk_with_wrong_bytes_fails_alone() -> None:
    async with rig_of() as rig:
        await rig.save(rig.there, KEYS)
        offset, _ = rig.there.pool.pool._directory.place_of(KEYS[30])
        rig.there.pool.arena[offset + 3] ^= 1
        assert await rig.load(KEYS) == landed_but(30)
        assert await rig.load(KEYS[:30]) == ["landed"] * 30


async def test_an_owner_that_ends_in_the_middle_leaves_nothing_held_and_what_is_here() -> None:
    async with rig_of() as rig:
        await rig.save(rig.there, KEYS[10:])
        await rig.save(rig.here, KEYS[:10])
        loading = asyncio.get_running_loop().create_task(rig.load(KEYS))
        await asyncio.sleep(0)
        rig.there.server.close()
        assert set((await loading)[10:]) <= {"landed", "failed", "absent"}
        assert await rig.load(KEYS[:10]) == ["landed"] * 10


async def test_two_requests_for_the_same_set_pull_each_chunk_once() -> None:
    async with rig_of() as rig:
        await rig.save(rig.there, KEYS)
        pool = rig.here.pool.pool
        other = pool.open_session(ConnectionId(2), "model", LAYOUT)
        loads = await asyncio.gather(rig.load(KEYS), rig.load(KEYS[::-1], other))
        assert list(loads) == [landed_but(), landed_but()]
        assert pool._directory.stats()["promoted_chunks"] == len(KEYS)
        pool.drop_connection(other.connection)


async def test_thousands_of_keys_are_pulled_in_parts() -> None:
    async with rig_of() as rig:
        keys = [key_of(7, number) for number in range(4 * SOUGHT_AT_ONCE + 3)]
        await rig.save(rig.there, keys)
        assert await rig.load(keys) == ["landed"] * len(keys)
        assert 5 <= rig.pulls()[0] <= 10, "a part at once, and what there was no room for"
