"""Two pools over real sockets: what one has stored is a hit on the other, and whatever fails is a miss."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.errors import Refused
from kvpool.ids import ConnectionId
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.protocol.records import messages as m
from kvpool.server.peers.offers import OFFERS_MAX
from kvpool.tiering.peer_allowance import PeerAllowance
from kvpool.tiers.peer.pulls import Pull
from tests.rigs.nodes.fleet import peer_config, two_nodes
from tests.rigs.nodes.stream_relay import StreamRelay
from tests.rigs.tiers.tiered_pool import CHUNK, LAYOUT, key_of

pytestmark = pytest.mark.asyncio
KEYS = [key_of(7, number) for number in range(20)]


@pytest.mark.parametrize("has_disk", [False, True], ids=["dram", "disk"])
@pytest.mark.parametrize(("at_once", "parts"), [(6, 4), (1, 20)])
async def test_a_chain_beyond_what_one_node_is_offered_at_once_comes_whole_in_parts(
    at_once: int, parts: int, has_disk: bool
) -> None:
    async with two_nodes(offers=peer_config(offered=at_once * CHUNK), has_disk=has_disk) as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        if has_disk:
            assert await there.pool.demote() == 0
            await there.pool.until_moved(lambda: there.pool.pool._tiering.holds == 0)
        here.believe(there, KEYS)
        assert await here.pool.load(KEYS) == len(KEYS)
        stats = here.pool.pool.measure({}).tiers["peer"]
        assert (stats["peer.pulled_chunks"], stats["peer.failed_chunks"]) == (len(KEYS), 0)
        assert there.server.counts["pulls"] == parts
        await there.pool.until_moved(lambda: there.offers.stats()["offers"] == 0)
        assert there.pool.pool.measure({}).index["leases"] == 0


async def test_a_node_is_connected_while_it_makes_its_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two round trips: the request with the handshakes of its connections, then the tickets with the bytes."""
    async with two_nodes() as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        here.believe(there, KEYS)
        (stream,) = here.tier._transports
        happened: list[object] = []
        expect, ask, submit = stream.expect, here.tier._driver._asking.ask_node, stream.submit

        def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*given: Any, **named: Any) -> Any:
                happened.append(name)
                return call(*given, **named)

            return noted

        monkeypatch.setattr(stream, "expect", noting("connect", expect))
        monkeypatch.setattr(stream, "submit", noting("receive", submit))
        monkeypatch.setattr(here.tier._driver._asking, "ask_node", noting("ask", ask))
        assert await here.pool.load(KEYS) == len(KEYS)
        assert happened == ["connect", "ask", "receive"]
        assert there.server.counts["pulls"] == 1


@pytest.mark.parametrize("owner", ["", "there"], ids=["known", "named"])
async def test_of_a_chain_that_no_request_can_name_whole_comes_what_one_can(
    monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    monkeypatch.setattr(r, "PULL_KEYS_MAX", 8)
    async with two_nodes() as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        here.believe(there, [] if owner else KEYS)
        for _ in range(2):
            assert await here.pool.load(KEYS, owner=owner) == 8
        assert await here.pool.save(KEYS[:12]) == 12
        assert await here.pool.load(KEYS, owner=owner) == 12


@pytest.mark.parametrize("has_disk", [False, True], ids=["dram", "disk"])
async def test_chains_that_are_asked_for_at_once_come_whole_in_parts(has_disk: bool) -> None:
    async with two_nodes(offers=peer_config(offered=4 * CHUNK), has_disk=has_disk) as (here, there):
        chains = [[key_of(30 + chain, number) for number in range(9)] for chain in range(4)]
        for keys in chains:
            assert await there.pool.save(keys) == len(keys)
            here.believe(there, keys)
        if has_disk:
            assert await there.pool.demote() == 0
        leased = [
            await here.pool.serve(here.pool.pool.chains.acquire(here.pool.session, m.Acquire(b"".join(keys))))
            for keys in chains
        ]
        assert [one.chunks for one in leased] == [9] * 4
        await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
        stats = here.pool.pool.measure({}).tiers["peer"]
        assert (stats["peer.pulled_chunks"], stats["peer.failed_chunks"]) == (36, 0)
        for one in leased:
            here.pool.pool.leases.release(here.pool.session, one.lease)
        for keys in chains:
            assert await here.pool.load(keys) == len(keys)


async def test_a_node_that_leaves_between_two_parts_costs_what_it_has_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_nodes(offers=peer_config(offered=6 * CHUNK)) as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        here.believe(there, KEYS)
        driver = here.tier._driver
        bring_part = driver._bring_part

        async def leave_first(pull: Pull) -> str:
            if pull.first == 12:  # the second part has come
                monkeypatch.setattr(driver, "_link_of", lambda _: None)
            return await bring_part(pull)

        monkeypatch.setattr(driver, "_bring_part", leave_first)
        assert await here.pool.load(KEYS) == 12
        await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
        assert here.tier.verify() == []
        monkeypatch.undo()
        assert await here.pool.load(KEYS) == len(KEYS), "nothing is held against it"


async def test_a_node_that_is_named_is_asked_although_nothing_is_known_of_it() -> None:
    async with two_nodes() as (here, there):
        assert await there.pool.save(KEYS[:15]) == 15
        assert await here.pool.load(KEYS, owner="nobody") == 0
        assert await here.pool.load(KEYS, owner="here") == 0
        asked = there.server.counts["pulls"]
        assert await here.pool.load(KEYS, owner="there") == 15
        assert there.server.counts["pulls"] == asked + 2, "once more for what was not offered at first"
        record = here.tier.nodes.find("there")
        assert record is not None
        assert (record.pulls, record.read_bytes) == (1, 15 * CHUNK)
        there.server.close()
        await here.pool.until_moved(lambda: here.links[there.name].life is None)
        assert await here.pool.load(KEYS, owner="there") == 15, "the rest is a miss at once"
        assert record.pulls == 1


async def test_a_named_node_that_had_nothing_is_not_asked_again_at_once() -> None:
    async with two_nodes() as (here, there):
        for _ in range(20):
            assert await here.pool.load(KEYS, owner="there") == 0
        assert there.server.counts["pulls"] == 1
        assert here.pool.pool.measure({}).tiers["peer"]["peer.failed_pulls_unasked"] == 19
        assert await there.pool.save(KEYS) == len(KEYS)
        here.believe(there, KEYS)
        assert await here.pool.load(KEYS, owner="there") == len(KEYS), "what is known of it counts before"


async def test_requests_without_end_that_name_a_node_delay_no_pull_of_it() -> None:
    async with two_nodes() as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        session, pool = here.pool.pool.open_session(ConnectionId(9), "model", LAYOUT), here.pool.pool
        for number in range(200):
            request = m.Acquire(key_of(99, number), owner="there")
            leased = await here.pool.serve(pool.chains.acquire(session, request))
            assert leased.chunks <= 1
        assert int(pool.measure({}).tiers["peer"]["peer.failed_pulls_unasked"]) >= 200 - 64
        here.believe(there, KEYS)
        begun_ns = here._clock.now_ns()
        assert await here.pool.load(KEYS) == len(KEYS)
        assert here._clock.now_ns() - begun_ns < 1e9
        assert there.server.counts["pulls"] <= 14
        await here.pool.until_moved(lambda: pool._tiering.holds == 0)
        pool.drop_connection(session.connection)


async def test_bytes_and_marks_that_are_changed_on_the_way_are_a_miss() -> None:
    async with two_nodes() as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        here.believe(there, KEYS)
        relay = StreamRelay(there.offers.stream)
        there.offers.stream = relay.address
        assert await here.pool.load(KEYS) == 0
        assert relay.forged > 0
        assert here.pool.pool.measure({}).tiers["peer"]["peer.pulled_chunks"] == 0
        relay.close()


class WatchedAllowance(PeerAllowance):
    """Remembers the most that was taken at once."""

    most = 0

    def take_bytes(self, peer: ConnectionId, size: int) -> None:
        super().take_bytes(peer, size)
        self.most = max(self.most, self.taken)


async def test_what_is_read_from_disk_for_others_is_bounded_and_goes_on_behind() -> None:
    allowance = WatchedAllowance(4 * CHUNK)
    async with two_nodes(has_disk=True) as (here, there):
        there.pool.pool._tiering.lower[0].promotions.for_peers = allowance
        assert await there.pool.save(KEYS) == len(KEYS)
        assert await there.pool.demote() == 0
        await there.pool.flush("dram")
        here.believe(there, KEYS)
        assert await here.pool.load(KEYS) == len(KEYS)
        assert allowance.most == 3 * CHUNK
        await there.pool.flush("dram")
        assert await there.pool.load(KEYS) == len(KEYS), "engines here have no such bound"
        assert allowance.most == 3 * CHUNK
        assert allowance.taken == 0


async def test_one_peer_has_a_quarter_of_all_offers_at_most() -> None:
    async with two_nodes() as (here, there):
        limit = OFFERS_MAX // 4
        assert await there.pool.save(KEYS[:1]) == 1
        link = here.links[there.name]
        for number in range(limit):
            offer = await link.request(pull_of_first(link), 5.0)
            assert offer.chunks == 1, f"offer {number}"
        with pytest.raises(Refused, match="as many offers"):
            await link.request(pull_of_first(link), 5.0)
        link.release(limit)
        await there.pool.until_moved(lambda: there.offers.stats()["offers"] < limit)
        assert (await link.request(pull_of_first(link), 5.0)).chunks == 1


async def test_a_node_that_encrypts_takes_no_plain_chunks() -> None:
    async with two_nodes(wants_encrypted=True) as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        here.believe(there, KEYS)
        assert await here.pool.load(KEYS) == 0
        stats, record = here.pool.pool.measure({}).tiers["peer"], here.tier.nodes.of(there.name)
        counted = stats["peer.failed_pulls_unencrypted"], stats["peer.pulled_chunks"], record.failures
        assert (counted, record.last_error[:29]) == ((1, 0, 1), "would send chunks unencrypted")
        await there.pool.until_moved(lambda: there.offers.stats()["offers"] == 0)
        assert there.offers.stats()["sent_bytes"] == 0


def pull_of_first(link: PeerLink) -> r.Pull:
    """A pull of one chunk, of which nothing will be received."""
    return r.Pull(link.next_pull(), "model", list(LAYOUT.to_wire()), b"", 0, KEYS[0], 60_000, False)


async def test_only_what_is_missing_is_sent() -> None:
    async with two_nodes() as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        assert await here.pool.save(KEYS[:13]) == 13
        here.believe(there, KEYS)
        assert await here.pool.load(KEYS) == len(KEYS)
        await there.pool.until_moved(lambda: there.offers.stats()["offers"] == 0)
        assert there.offers.stats()["sent_bytes"] // CHUNK == len(KEYS) - 13


async def test_hints_beyond_what_the_owner_has_are_misses_and_it_is_not_asked_again_for_a_while() -> None:
    async with two_nodes() as (here, there):
        assert await there.pool.save(KEYS[:6]) == 6
        here.believe(there, KEYS)
        assert await here.pool.load(KEYS) == 6
        asked = there.server.counts["pulls"]
        assert (asked, await here.pool.load(KEYS)) == (2, 6)
        assert there.server.counts["pulls"] == asked
        assert here.hints.count_of(there.name) == len(KEYS), "only events say what a node has"
        here.clock.advance(3.1)
        assert await here.pool.load(KEYS) == 6
        assert there.server.counts["pulls"] == asked + 1


async def test_what_is_declined_to_another_layout_or_model_is_still_a_hit_for_the_right_one() -> None:
    async with two_nodes() as (here, there):
        assert await there.pool.save(KEYS) == len(KEYS)
        here.believe(there, KEYS)
        right = here.pool.session
        for number, (model, layout) in enumerate(
            (("model", replace(LAYOUT, layers=4)), ("other", LAYOUT), ("model", replace(LAYOUT, head_dim=32)))
        ):
            here.pool.session = here.pool.pool.open_session(ConnectionId(9 + number), model, layout)
            chains = here.pool.pool.chains
            leased = await here.pool.serve(chains.acquire(here.pool.session, m.Acquire(b"".join(KEYS))))
            await here.pool.until_moved(lambda: here.pool.pool._tiering.holds == 0)
            if leased.lease:
                here.pool.pool.leases.release(here.pool.session, leased.lease)
        assert there.offers.stats()["pulls_empty"] == 3
        here.pool.session = right
        assert await here.pool.load(KEYS) == len(KEYS)


async def test_a_model_that_the_owner_does_not_know_is_a_miss_and_is_not_made_there() -> None:
    async with two_nodes() as (here, there):
        here.believe(there, KEYS)
        here.pool.session = here.pool.pool.open_session(ConnectionId(9), "other", LAYOUT)
        known = len(there.pool.pool.namespaces)
        assert await here.pool.load(KEYS) == 0
        assert len(there.pool.pool.namespaces) == known
        assert there.offers.stats()["pulls_empty"] == 1


async def test_nodes_that_believe_one_another_do_not_ask_in_a_circle() -> None:
    async with two_nodes() as (here, there):
        await there.join(here)
        here.believe(there, KEYS)
        there.believe(here, KEYS)
        assert await here.pool.load(KEYS) == 0
        assert here.offers.stats()["pulls_empty"] + here.offers.stats()["pulls_served"] == 0


async def test_random_requests_on_two_nodes_get_right_bytes_or_none(seed: int) -> None:
    chance = random.Random(seed)
    chains = [[key_of(chain, number) for number in range(1 + chain % 11)] for chain in range(12)]
    async with two_nodes(has_disk=True) as (here, there):

        def pulled() -> int:
            counted = (node.pool.pool.measure({}).tiers["peer"]["peer.pulled_chunks"] for node in (here, there))
            return sum(int(chunks) for chunks in counted)

        await there.join(here)
        steps = 0
        while steps < 150 or (not pulled() and steps < 3000):  # by chance the first of them pull nothing
            steps += 1
            one, other = chance.sample([here, there], 2)
            keys = chance.choice(chains)
            drawn = chance.random()
            if drawn < 0.3:
                one.believe(other, keys[: chance.randrange(1, len(keys) + 1)])
            elif drawn < 0.4:
                await one.pool.flush()
            elif drawn < 0.6:
                await one.pool.save(keys[: chance.randrange(1, len(keys) + 1)])
            else:
                await one.pool.load(keys, is_patient=chance.random() < 0.8)
            one.pool.assert_sound()
        await here.pool.until_moved(lambda: sum(node.pool.pool._tiering.holds for node in (here, there)) == 0)
        assert pulled() > 0, "nothing was pulled"


async def test_a_breaker_stays_open_for_the_same_life_and_closes_for_another() -> None:
    async with two_nodes() as (here, there):
        here.believe(there, KEYS)
        assert await here.pool.load(KEYS) == 0
        record = here.tier.nodes.find("there")
        life = here.links[there.name].life
        assert record is not None
        assert life is not None
        while (permit := record.breaker.ask_permit()) is not None:
            record.breaker.fail(permit)
        here.tier.note_life(there.name, life.incarnation)
        assert here.tier.is_silent(there.name)
        here.tier.note_life(there.name, bytes(16))
        assert not here.tier.is_silent(there.name)
