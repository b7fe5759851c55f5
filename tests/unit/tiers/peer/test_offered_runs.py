"""Tests of what an owner offers of chunks without a parent, to peers that ask for what no honest one asks for."""

from dataclasses import replace

import pytest

from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.layouts.groups import FULL, STATE, GroupRole
from kvpool.protocol.records import messages as m
from kvpool.states import SaveState
from tests.rigs.tiers.tiered_pool import LAYOUT
from tests.unit.tiers.peer.test_pulled_runs import DRAM_CHUNKS, KEYS, WINDOWED, window_rig

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("role", [GroupRole(FULL, 0, 0), GroupRole(STATE, 0, 0)])
async def test_a_peer_gets_no_chunks_of_another_group_than_it_names(role: GroupRole) -> None:
    """Chunks that have no parent, asked for as those of a full group, or of another one that is in use here."""
    async with window_rig() as rig:
        other = replace(LAYOUT, group=role)
        await rig.save(rig.there, KEYS)
        in_use = rig.there.pool.pool.open_session(ConnectionId(40), "model", other)
        assert (await rig.ask(rig.there, KEYS, layout=other)).chunks == 0
        assert (await rig.ask(rig.there, KEYS)).chunks == len(KEYS)
        rig.there.pool.pool.drop_connection(in_use.connection)


async def test_keys_of_a_full_group_that_are_no_chain_are_offered_up_to_the_first() -> None:
    async with window_rig() as rig:
        full = replace(LAYOUT, group=GroupRole(FULL, 0, 0))
        pool = rig.there.pool
        windowed, pool.session = pool.session, pool.pool.open_session(ConnectionId(41), "model", full)
        for key in KEYS[:4]:
            assert await pool.save([key]) == 1
        assert (await rig.ask(rig.there, KEYS[:4], layout=full)).chunks == 1
        pool.pool.drop_connection(pool.session.connection)
        pool.session = windowed


async def test_a_chunk_that_has_a_parent_in_a_windows_namespace_is_not_offered() -> None:
    """What follows another chunk is no chunk of a run, whoever has stored it."""
    async with window_rig() as rig:
        pool, own = rig.there.pool.pool, rig.there.pool.session.own
        made = pool._directory.reserve(own.id, own.size_class, b"", b"".join(KEYS[:3]), 1)
        assert list(pool._directory.commit(made.id, 0, bytes(4 * own.layout.extents * 3), 1)) == [SaveState.STORED] * 3
        assert pool._directory.end_reservation(made.id, 1)
        assert (await rig.ask(rig.there, KEYS[:3])).chunks == 1
        assert (await rig.ask(rig.there, KEYS[1:3])).chunks == 0


async def test_peers_together_hold_no_more_of_memory_than_their_share() -> None:
    async with window_rig() as rig:
        await rig.save(rig.there, KEYS)
        pool = rig.there.pool.pool
        session = EngineSession(
            ConnectionId(77), WINDOWED, "model", dict(rig.there.pool.session.namespaces), 0, ConnectionId(78)
        )
        pool._directory.share_among_holders(8 / DRAM_CHUNKS)
        leased = await rig.there.pool.serve(pool.chains.acquire_for_peer(session, KeyColumn.of(KEYS)))
        assert leased.chunks == 8
        pool.leases.release(session, leased.lease)
        pool._directory.share_among_holders(1.0)


async def test_an_engine_that_takes_a_windows_chunks_for_a_chain_harms_no_link() -> None:
    """Chunks without a parent, and such behind one that is here, asked for as a chain: the owner refuses nothing."""
    async with window_rig() as rig:
        pool = rig.here.pool
        await rig.save(rig.there, KEYS[:6])
        await rig.save(rig.here, KEYS[:1])
        for chain in (KEYS[3:6], KEYS[:3], [*KEYS[1:3], *KEYS[1:3]]):
            leased = await pool.serve(pool.pool.chains.acquire(pool.session, m.Acquire(b"".join(chain))))
            assert leased.chunks <= len(chain)
            await pool.until_moved(lambda: pool.pool._tiering.holds == 0)
            if leased.lease:
                pool.pool.leases.release(pool.session, leased.lease)
        assert rig.here.links[rig.there.name].life is not None
