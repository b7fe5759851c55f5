"""On an idle, healthy fleet the first load brings what the lookup promised: pools of one process, over real sockets."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import kvpool_native
from kvpool.config.peer_options import PeerConfig
from kvpool.ids import ConnectionId
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.peers.circuit_breaker import BreakerState
from kvpool.peers.control import records as r
from kvpool.protocol.records import messages as m
from kvpool.states import Level
from kvpool.tiers.peer import pull_driver
from tests.rigs.nodes.fleet import Node, peer_config
from tests.rigs.nodes.stream_relay import CuttingRelay
from tests.rigs.tiers.tiered_pool import CHUNK, LAYOUT, key_of, medium_of, payload

pytestmark = pytest.mark.asyncio
RANKS = 8


@asynccontextmanager
async def fleet_of(
    nodes: int, *, dram_chunks: int = 400, offers: PeerConfig | None = None, has_disk: bool = False
) -> AsyncIterator[tuple[Node, list[Node]]]:
    """`here`, and so many other nodes that it follows."""
    here = Node("here", dram_chunks)
    media = [medium_of(2 * dram_chunks)] if has_disk else []
    fleet = [Node(f"node-{number}", dram_chunks, media=media) for number in range(nodes)]
    for node in (*fleet, here):
        await node.start(offers or peer_config())
    for node in fleet:
        await here.join(node)
    yield here, fleet
    for node in (here, *fleet):
        await node.stop()


async def save(here: Node, node: Node, keys: Sequence[bytes]) -> None:
    """A node stores a chain, and `here` knows."""
    if not keys:
        return
    assert await node.pool.save(keys) == len(keys)
    if node is not here:
        here.believe(node, keys)


def promised(here: Node, keys: Sequence[bytes]) -> int:
    """What a lookup finds: the leading chunks that are here, and behind them those that any node has."""
    view = kvpool_native.RemoteView(here.hints.mapping)
    index = kvpool_native.IndexView(here.pool.pool.memory.index)
    chunks = len(index.lookup(b"".join(keys)))
    while chunks < len(keys) and view.has(keys[chunks]):
        chunks += 1
    return chunks


async def load_first(here: Node, keys: Sequence[bytes]) -> tuple[int, int, int]:
    """What a lookup promises of a chain, what is leased of that, and what then comes."""
    hit = promised(here, keys)
    pool = here.pool
    leased = await pool.serve(pool.pool.chains.acquire(pool.session, m.Acquire(b"".join(keys[:hit]))))
    loaded = await pool.load(keys[:hit])
    if leased.lease:
        pool.pool.leases.release(pool.session, leased.lease)
    return hit, leased.chunks, loaded


def finished(parts: Parts[m.Leased]) -> m.Leased:
    """The answer to a request that waits for nothing."""
    answers: list[m.Leased] = []

    def serve() -> Parts[None]:
        answers.append((yield from parts))

    assert set(serve()) <= {None}, "it waits for something"
    return answers[0]


def pulls_of(node: Node) -> int:
    return node.server.counts["pulls"]


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_nodes_have_of_it(seed: int) -> None:
    """Each node has the beginning of a prompt, as long as it drew; some nodes have all of it."""
    async with fleet_of(5) as (here, fleet):
        drawn = random.Random(seed)
        for prompt in range(6):
            keys = [key_of(seed, prompt, number) for number in range(drawn.randint(1, 60))]
            for node in (here, *fleet):
                await save(here, node, keys[: drawn.randint(0, len(keys))])
            hit, leased, loaded = await load_first(here, keys)
            assert hit == leased == loaded, (seed, prompt, len(keys))


async def test_a_prompt_that_many_nodes_have_is_pulled_from_one_of_them() -> None:
    keys = [key_of(1, number) for number in range(80)]
    async with fleet_of(8) as (here, fleet):
        for node in fleet:
            assert await node.pool.save(keys) == len(keys)
        drawn = random.Random(7)
        for at in range(0, len(keys), 4):  # each hears of it in an order of its own
            for node in drawn.sample(list(fleet), len(fleet)):
                here.believe(node, keys[at : at + 4])
        assert await load_first(here, keys) == (80, 80, 80)
        assert sum(map(pulls_of, fleet)) == 1


async def test_each_rank_pulls_its_whole_run_at_once_and_acquire_waits_for_nothing() -> None:
    chunks = 200
    columns = [[key_of(3, rank, number) for number in range(chunks)] for rank in range(RANKS)]
    async with fleet_of(1, dram_chunks=2 * RANKS * chunks) as (here, fleet):
        (there,) = fleet
        for rank, keys in enumerate(columns):
            there.pool.session = there.pool.pool.open_session(
                ConnectionId(20 + rank), "model", replace(LAYOUT, rank=rank, world=RANKS)
            )
            await save(here, there, keys)
        pool = here.pool.pool
        session = pool.open_session(ConnectionId(30), "model", replace(LAYOUT, rank=None, world=RANKS))
        packed = b"".join(key for keys in columns for key in keys)
        parts = pool.chains.acquire(session, m.Acquire(packed))
        leased = finished(parts)
        assert leased.chunks == chunks, "before the first answer"
        assert set(leased.tiers) == {Level.PEER}
        await here.pool.until_moved(lambda: pool._tiering.holds == 0)
        lease = pool._readers.find(session, leased.lease)
        assert lease is not None
        for keys, (hold,) in zip(columns, lease.holds.values(), strict=True):
            slots = pool._directory.columns([hold])
            assert set(slots.levels) == {Level.DRAM}
            for key, offset in zip(keys, memoryview(slots.offsets).cast("Q"), strict=True):
                assert here.pool.arena[offset : offset + CHUNK].tobytes() == payload(key), "wrong bytes"
        assert pulls_of(there) == RANKS
        pool.leases.release(session, leased.lease)
        pool.drop_connection(session.connection)
        for rank in range(1, RANKS):
            there.pool.pool.drop_connection(ConnectionId(19 + rank))


@pytest.mark.parametrize("lent", [0, 3], ids=["nothing", "little"])
async def test_a_node_that_lends_too_little_costs_no_prompt_its_chunks(lent: int) -> None:
    """Two nodes have all of them; one offers nothing, or the first chunks alone."""
    async with fleet_of(2) as (here, fleet):
        poor, other = fleet
        serve = poor.offers.serve

        def lend(puller: object, pull: r.Pull, answer: Callable[[r.Offer | r.Refused], bool]) -> None:
            if lent and not pull.first:
                serve(puller, replace(pull, keys=pull.keys[: 32 * lent]), answer)  # type: ignore[arg-type]
            else:
                answer(r.Offer(pull.pull, 0, b"", 0, "", b"", b""))

        poor.offers.serve = lend  # type: ignore[method-assign]
        for prompt in range(24):
            keys = [key_of(4, prompt, number) for number in range(12)]
            for node in fleet:
                await save(here, node, keys)
            assert await load_first(here, keys) == (12, 12, 12), prompt
        record = here.tier.nodes.find(poor.name)
        assert record is None or record.pulls <= 2, "it is asked after the other one"
        assert here.tier.nodes.of(other.name).failures == 0


async def test_a_node_that_lends_too_little_is_asked_where_no_other_has_it_and_again_after_a_while() -> None:
    async with fleet_of(2) as (here, fleet):
        poor, _ = fleet
        keys, alone = ([key_of(5, prompt, number) for number in range(12)] for prompt in range(2))
        await save(here, poor, keys)
        here.believe(poor, [*keys, key_of(5, 9)])
        await save(here, poor, alone)
        assert await load_first(here, [*keys, key_of(5, 9)]) == (13, 13, 12)
        record = here.tier.nodes.of(poor.name)
        assert record.deferred_s > 0
        assert "had none of 1 chunks that it had announced" in record.last_error
        assert await load_first(here, alone) == (12, 12, 12)
        here.clock.advance(60)
        assert not record.deferred_s


async def rot(node: Node, keys: Sequence[bytes], chunk: int) -> None:
    """Change a byte of a chunk where it lies."""
    pool = node.pool
    held = await pool.serve(pool.pool.chains.acquire(pool.session, m.Acquire(b"".join(keys))))
    pool.arena[memoryview(held.offsets).cast("Q")[chunk]] ^= 1
    pool.pool.leases.release(pool.session, held.lease)


def checks_of(node: Node) -> tuple[int, int]:
    """Chunks that it has compared for others, and those of them that were bad."""
    return node.offers.stats()["compared_chunks"], node.pool.pool.measure({}).index["checksum_failures"]


async def test_a_rotten_chunk_costs_one_request_and_its_node_drops_it() -> None:
    keys = [key_of(6, number) for number in range(12)]
    async with fleet_of(2) as (here, fleet):
        rotten, other = fleet
        await save(here, rotten, keys)
        await rot(rotten, keys, 5)
        assert (await load_first(here, keys))[2] == 5
        await rotten.pool.until_moved(lambda: checks_of(rotten) == (1, 1))
        assert not rotten.pool.pool._directory.place_of(keys[5])[1]
        assert rotten.pool.pool._directory.place_of(keys[4])[1]
        await save(here, other, keys)
        assert await load_first(here, keys) == (12, 12, 12)


async def test_what_is_whole_is_not_dropped_whatever_others_say_of_it() -> None:
    keys, unknown = ([key_of(number, chunk) for chunk in range(12)] for number in (10, 11))
    async with fleet_of(1) as (here, fleet):
        (there,) = fleet
        await save(here, there, keys)
        assert await load_first(here, keys) == (12, 12, 12)
        link, layout = here.links[there.name], list(LAYOUT.to_wire())
        link.report_wrong(r.Wrong("model", layout, b"", unknown[0]))
        link.report_wrong(r.Wrong("model", layout, unknown[0], keys[1]))
        link.report_wrong(r.Wrong("another model", layout, b"", keys[0]))
        for _ in range(20):  # and more than it compares in a second
            for parent, key in zip([b"", *keys], keys, strict=False):
                link.report_wrong(r.Wrong("model", layout, parent, key))
        await there.pool.until_moved(lambda: checks_of(there)[0] > 0)
        assert checks_of(there)[0] < 200
        assert checks_of(there)[1] == 0
        assert all(there.pool.pool._directory.place_of(key)[1] for key in keys)
        await there.pool.until_moved(lambda: there.pool.pool.measure({}).index["leases"] == 0)


async def test_a_stream_where_nothing_answers_is_noted_until_bytes_come() -> None:
    async with fleet_of(1) as (here, fleet):
        (there,) = fleet
        stream, record = there.offers.stream, here.tier.nodes.of(there.name)
        first, second = ([key_of(12, prompt, number) for number in range(4)] for prompt in range(2))
        for keys in (first, second):
            await save(here, there, keys)
        there.offers.stream = "tcp://127.0.0.1:1"  # where nobody listens
        assert (await load_first(here, first))[2] == 0
        assert record.unreachable == "tcp://127.0.0.1:1"
        there.offers.stream = stream
        assert await load_first(here, second) == (4, 4, 4)
        assert record.unreachable == ""


def sessions_of_ranks(node: Node, ranks: int) -> list[EngineSession]:
    """A session of each rank, which end with the node."""
    layouts = [replace(LAYOUT, rank=rank, world=ranks) for rank in range(ranks)]
    return [
        node.pool.pool.open_session(ConnectionId(20 + layout.rank), "model", layout)  # type: ignore[operator]
        for layout in layouts
    ]


async def load_ranks(here: Node, columns: Sequence[Sequence[bytes]]) -> int:
    """How many chunks of a scheduler's lease land on every rank, with the bytes of their keys."""
    pool, ranks = here.pool.pool, len(columns)
    session = pool.open_session(ConnectionId(30), "model", replace(LAYOUT, rank=None, world=ranks))
    packed = b"".join(key for keys in columns for key in keys)
    leased = await here.pool.serve(pool.chains.acquire(session, m.Acquire(packed)))
    await here.pool.until_moved(lambda: pool._tiering.holds == 0)
    lease, landed = pool._readers.find(session, leased.lease), []
    for keys, (hold,) in zip(columns, lease.holds.values() if lease is not None else [], strict=lease is not None):
        slots = pool._directory.columns([hold])
        there = [level == Level.DRAM for level in slots.levels]
        for key, offset, is_there in zip(keys, memoryview(slots.offsets).cast("Q"), there, strict=False):
            assert not is_there or here.pool.arena[offset : offset + CHUNK].tobytes() == payload(key), "wrong bytes"
        landed.append(there.index(False) if False in there else len(there))
    pool.drop_connection(session.connection)
    return min(landed, default=0)


@pytest.mark.parametrize("offered", [120, 60], ids=["two ranks", "one rank"])
async def test_ranks_that_exceed_what_one_node_is_offered_come_one_after_the_other(offered: int) -> None:
    """However long that takes: the owner sends 1.6 MB in a second."""
    columns = [[key_of(20, rank, number) for number in range(60)] for rank in range(RANKS)]
    offers = peer_config(offered=offered * CHUNK, rate=1_600_000)
    async with fleet_of(1, dram_chunks=1200, offers=offers) as (here, fleet):
        (there,) = fleet
        mine = there.pool.session
        for session, keys in zip(sessions_of_ranks(there, RANKS), columns, strict=True):
            there.pool.session = session
            await save(here, there, keys)
        assert await load_ranks(here, columns) == 60
        assert here.tier._driver.counts["busy"] > 0
        there.pool.session = mine
        for rank in range(RANKS):
            there.pool.pool.drop_connection(ConnectionId(20 + rank))


async def test_a_node_that_never_has_room_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_driver, "BUSY_S", 0.0)
    keys = [key_of(27, number) for number in range(6)]
    async with fleet_of(1) as (here, fleet):
        (there,) = fleet
        full = r.Refused(r.RefusalCode.BUSY, "no room")
        there.offers.serve = lambda _puller, _pull, answer: answer(full)  # type: ignore[method-assign,assignment]
        await save(here, there, keys)
        assert await load_first(here, keys) == (6, 6, 0)
        assert pulls_of(there) == 1, "it is not asked until the pull's time is over"
        assert here.tier.nodes.of(there.name).breaker.state is BreakerState.CLOSED


async def test_a_pull_that_asks_for_room_again_and_again_is_one_that_failed() -> None:
    keys, asked = [key_of(28, number) for number in range(6)], []
    async with fleet_of(1) as (here, fleet):
        (there,) = fleet
        serve = there.offers.serve

        def serve_fourth(puller: Any, pull: Any, answer: Any) -> None:
            asked.append(pull)
            if len(asked) < 4:
                answer(r.Refused(r.RefusalCode.BUSY, "no room"))
            else:
                serve(puller, pull, answer)

        there.offers.serve = serve_fourth  # type: ignore[method-assign]
        await save(here, there, keys)
        assert await load_first(here, keys) == (6, 6, 6)
        record = here.tier.nodes.of(there.name)
        assert (len(asked), record.pulls, record.failures) == (4, 1, 1)


async def test_nodes_that_ask_one_owner_at_once_all_get_their_chunks() -> None:
    """Together more than it leases for others."""
    owner = Node("owner", 400)
    pullers = [Node(f"puller-{number}", 400) for number in range(4)]
    for node in (owner, *pullers):
        await node.start(peer_config(rate=1_600_000))
    chains = [[key_of(21, number, chunk) for chunk in range(90)] for number in range(4)]
    for node, keys in zip(pullers, chains, strict=True):
        await node.join(owner)
        await save(node, owner, keys)
    loads = [load_first(node, keys) for node, keys in zip(pullers, chains, strict=True)]
    assert await asyncio.gather(*loads) == [(90, 90, 90)] * 4
    for node in (*pullers, owner):
        await node.stop()


async def test_a_part_behind_what_its_owner_has_only_on_disk_is_read_with_what_is_before() -> None:
    keys = [key_of(22, number) for number in range(110)]
    async with fleet_of(1, dram_chunks=120, has_disk=True) as (here, fleet):
        (there,) = fleet
        await save(here, there, keys)
        assert await there.pool.demote() == 0
        await there.pool.flush("dram")
        await save(here, here, keys[:70])
        assert await load_first(here, keys) == (110, 110, 110)


@pytest.mark.parametrize("fault", ["unreachable", "refused"])
async def test_a_stream_that_does_not_come_about_costs_nothing_where_another_node_has_the_chunks(fault: str) -> None:
    keys = [key_of(23, number) for number in range(12)]
    async with fleet_of(2) as (here, fleet):
        dead, other = fleet
        if fault == "unreachable":
            dead.offers.stream = "tcp://127.0.0.1:1"  # where nobody listens
        else:
            dead.offers.stream = other.offers.stream  # which does not know the ticket
        for node in fleet:
            await save(here, node, keys)
        for _ in range(2):
            assert await load_first(here, keys) == (12, 12, 12)
            await here.pool.flush("dram")
        assert pulls_of(dead) <= 1
        assert here.tier.verify() == []


@pytest.mark.parametrize("extents", [(0,), (0, 0), (0, 5)], ids=["one", "both", "one in the middle"])
@pytest.mark.parametrize("has_other", [False, True], ids=["alone", "another node"])
async def test_connections_that_end_before_an_extent_cost_nothing_where_another_node_has_the_chunks(
    extents: tuple[int, ...], has_other: bool
) -> None:
    """And the pull ends in any case, so that the next load asks anew."""
    keys = [key_of(28, number) for number in range(12)]
    async with fleet_of(2) as (here, fleet):
        cut, other = fleet
        relay = CuttingRelay(cut.offers.stream, *extents)
        cut.offers.stream = relay.address
        for node in (cut, other) if has_other else (cut,):
            await save(here, node, keys)
        here.tier.nodes.of(other.name).defer(here.clock)  # the other one is asked first
        hit, leased, loaded = await load_first(here, keys)
        assert (hit, leased) == (12, 12)
        assert loaded == 12 if has_other and 5 not in extents else loaded < 12 or has_other
        await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
        assert here.tier.verify() == []
        here.clock.advance(60)
        assert await load_first(here, keys) == (12, 12, 12)
        relay.close()


async def test_ranks_wait_for_the_trial_of_a_node_that_was_suspended() -> None:
    columns = [[key_of(24, rank, number) for number in range(20)] for rank in range(4)]
    async with fleet_of(1) as (here, fleet):
        (there,) = fleet
        mine = there.pool.session
        for session, keys in zip(sessions_of_ranks(there, 4), columns, strict=True):
            there.pool.session = session
            await save(here, there, keys)
        breaker = here.tier.nodes.of(there.name).breaker
        for _ in range(3):
            permit = breaker.ask_permit()
            assert permit is not None
            breaker.fail(permit)
        assert await load_ranks(here, columns) == 0
        here.clock.advance(100)
        assert await load_ranks(here, columns) == 20
        there.pool.session = mine
        for rank in range(4):
            there.pool.pool.drop_connection(ConnectionId(20 + rank))


async def test_many_small_pulls_wait_in_line_and_no_node_is_blamed() -> None:
    chains = [[key_of(26, number)] for number in range(600)]
    async with fleet_of(1, dram_chunks=700) as (here, fleet):
        (there,) = fleet
        for keys in chains:
            await save(here, there, keys)
        leased = [
            await here.pool.serve(here.pool.pool.chains.acquire(here.pool.session, m.Acquire(keys[0])))
            for keys in chains
        ]
        await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
        stats = here.pool.pool.measure({}).tiers["peer"]
        assert (stats["peer.pulled_chunks"], stats["peer.failed_chunks"]) == (600, 0)
        assert here.tier.nodes.of(there.name).failures == 0
        for one in leased:
            here.pool.pool.leases.release(here.pool.session, one.lease)
