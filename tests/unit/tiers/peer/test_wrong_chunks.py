"""Tests of chunks that have wrong bytes on a node that does not compare them: one is no fault of the node, several are."""

import pytest

from kvpool.peers.circuit_breaker import BreakerState
from tests.unit.tiers.peer.test_pulled_runs import KEYS, window_rig

pytestmark = pytest.mark.asyncio


async def test_a_chunk_that_is_wrong_again_and_again_is_no_fault_of_its_node() -> None:
    async with window_rig() as rig:
        await rig.save(rig.there, KEYS[:3])
        there = rig.there.pool
        rig.there.offers.check = lambda *_: None  # type: ignore[method-assign]
        (offset, _) = there.pool._directory.place_of(KEYS[1])
        there.arena[offset] ^= 1
        record = rig.here.tier.nodes.of(rig.there.name)
        for _ in range(6):
            assert (await rig.load([KEYS[1]]))[1] == 0
            rig.here.believe(rig.there, [KEYS[1]])  # announced again: asked for at once
        assert record.failures == 6
        assert record.breaker.state is BreakerState.CLOSED
        assert await rig.load([KEYS[0], KEYS[2]]) == (2, 2)
        there.arena[offset] ^= 1


async def test_several_chunks_that_are_wrong_are_a_fault_of_their_node() -> None:
    async with window_rig() as rig:
        await rig.save(rig.there, KEYS[:3])
        there = rig.there.pool
        rig.there.offers.check = lambda *_: None  # type: ignore[method-assign]
        for key in KEYS[:3]:
            (offset, _) = there.pool._directory.place_of(key)
            there.arena[offset] ^= 1
            assert (await rig.load([key]))[1] == 0
        assert rig.here.tier.nodes.of(rig.there.name).breaker.state is BreakerState.OPEN
        for key in KEYS[:3]:
            (offset, _) = there.pool._directory.place_of(key)
            there.arena[offset] ^= 1
