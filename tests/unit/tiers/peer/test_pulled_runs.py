"""Tests of runs of chunks without a parent between two pools over real sockets: one pull for all that one node has."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

import kvpool_native
from kvpool.ids import ConnectionId
from kvpool.key_column import KeyColumn
from kvpool.layouts.groups import WINDOW, GroupRole
from kvpool.peers.control import records as r
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.states import Level, SaveState
from tests.rigs.nodes.fleet import Node, peer_config
from tests.rigs.reserve_requests import reserve_alone
from tests.rigs.tiers.tiered_pool import LAYOUT, TieredPool, key_of, medium_of, payload

pytestmark = pytest.mark.asyncio
WINDOWED = replace(LAYOUT, group=GroupRole(WINDOW, 64 * LAYOUT.chunk_tokens, 0))
KEYS = [key_of(5, number) for number in range(20)]
DRAM_CHUNKS = 400


class Rig:
    """`here` pulls from `there`, and from a `third` node, each with a session of the window's chunks."""

    def __init__(self, *, has_disk: bool) -> None:
        self.here = Node("here", DRAM_CHUNKS)
        self.there = Node("there", DRAM_CHUNKS, media=[medium_of(2 * DRAM_CHUNKS)] if has_disk else ())
        self.third = Node("third", DRAM_CHUNKS)

    async def start(self) -> None:
        for node in (self.there, self.third, self.here):
            await node.start(peer_config())
            pool = node.pool
            pool.pool.drop_connection(pool.session.connection)
            pool.session = pool.pool.open_session(ConnectionId(1), "model", WINDOWED)
        await self.here.join(self.there)
        await self.here.join(self.third)

    async def stop(self) -> None:
        for node in (self.here, self.there, self.third):
            await node.stop()

    async def save(self, node: Node, keys: Sequence[bytes]) -> None:
        """A node stores these chunks, and `here` knows."""
        for key in keys:
            assert await node.pool.save([key]) == 1
        if node is not self.here:
            self.here.believe(node, keys)

    def pulls(self, node: Node) -> int:
        """Pulls that a node was asked for."""
        return node.server.counts["pulls"]

    async def load(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Lease a run: how many chunks were leased, and how many landed, each with the bytes of its key."""
        pool = self.here.pool
        leased = await pool.serve(pool.pool.chains.acquire_for_peer(pool.session, KeyColumn.of(keys)))
        lease = pool.pool._readers.find(pool.session, leased.lease)
        if lease is None:
            return 0, 0
        assert len(leased.offsets) == len(leased.generations) == len(leased.slots) == 8 * leased.chunks

        def levels() -> list[int]:
            (holds,) = lease.holds.values()
            return list(pool.pool._directory.columns(holds).levels)

        await pool.until_moved(lambda: Level.PEER not in levels())
        landed = 0
        for number, level in enumerate(levels()):
            if level == Level.DRAM:
                (offset,) = struct.unpack_from("<Q", leased.offsets, 8 * number)
                size = LAYOUT.chunk_bytes
                assert pool.arena[offset : offset + size].tobytes() == payload(keys[number]), "wrong bytes"
                landed += 1
        pool.pool.leases.release(pool.session, leased.lease)
        await pool.until_moved(lambda: pool.pool._tiering.holds == 0)
        return leased.chunks, landed

    async def ask(self, node: Node, keys: Sequence[bytes], *, layout: object = WINDOWED) -> r.Offer:
        """The offer to a pull as any peer can send it; what is offered is released."""
        link = self.here.links[node.name]
        wire = list(layout.to_wire())  # type: ignore[attr-defined]
        offer: r.Offer = await link.request(
            r.Pull(link.next_pull(), "model", wire, b"", 0, b"".join(keys), r.DEADLINE_MS_MAX, False), 180.0
        )
        link.release(offer.pull)
        return offer


@asynccontextmanager
async def window_rig(*, has_disk: bool = False) -> AsyncIterator[Rig]:
    """A rig of which nothing is held and nothing was refused when it ends."""
    rig = Rig(has_disk=has_disk)
    await rig.start()
    yield rig
    for node in (rig.there, rig.third):
        await node.pool.until_moved(lambda: node.offers.stats()["offers"] == 0)  # noqa: B023 - awaited at once
        assert node.pool.pool.measure({}).index["leases"] == 0
        assert sum(node.server.counts[f"refused.{code}"] for code in r.REFUSAL_CODES) == 0
    await rig.stop()


async def test_a_run_on_another_node_is_one_pull() -> None:
    async with window_rig() as rig:
        await rig.save(rig.there, KEYS)
        assert await rig.load(KEYS) == (len(KEYS), len(KEYS))
        assert rig.pulls(rig.there) == 1
        assert await rig.load(KEYS) == (len(KEYS), len(KEYS)), "all of it is here now"
        assert rig.pulls(rig.there) == 1


async def test_a_longer_run_is_pulled_in_parts_of_what_one_request_may_name() -> None:
    keys = [key_of(6, number) for number in range(r.RUN_KEYS_MAX + 3)]
    async with window_rig() as rig:
        await rig.save(rig.there, keys)
        assert await rig.load(keys) == (len(keys), len(keys))
        assert rig.pulls(rig.there) == 2


async def test_a_run_over_two_nodes_is_a_pull_of_each() -> None:
    async with window_rig() as rig:
        await rig.save(rig.there, KEYS[:12])
        await rig.save(rig.third, KEYS[9:])
        assert await rig.load(KEYS) == (len(KEYS), len(KEYS))
        assert (rig.pulls(rig.there), rig.pulls(rig.third)) == (1, 1)


async def test_an_owner_that_has_half_offers_what_is_before_the_first_gap() -> None:
    async with window_rig() as rig:
        await rig.save(rig.there, KEYS[:7])
        await rig.save(rig.there, KEYS[8:])
        rig.here.believe(rig.there, KEYS)
        leased, landed = await rig.load(KEYS)
        assert (leased, landed) == (len(KEYS), 7)
        assert rig.pulls(rig.there) == 2
        leased, landed = await rig.load(KEYS)
        assert (leased, landed) == (7, 7), "the gap is not asked for again at once"
        assert rig.pulls(rig.there) == 2


async def test_chunks_on_the_owners_disk_are_promoted_there() -> None:
    async with window_rig(has_disk=True) as rig:
        await rig.save(rig.there, KEYS)
        assert await rig.there.pool.demote() == 0
        await rig.there.pool.flush("dram")
        await rig.save(rig.there, [KEYS[4]])
        assert await rig.load(KEYS) == (len(KEYS), len(KEYS))
        assert rig.pulls(rig.there) == 1


class Save:
    """A save of one chunk whose first extent has landed."""

    def __init__(self, pool: TieredPool, key: bytes) -> None:
        self._pool, self._key = pool, key

    async def begin(self) -> None:
        pool, extents = self._pool, LAYOUT.extents
        made = await pool.serve(pool.pool.chains.reserve(pool.session, reserve_alone(0, self._key)))
        (offset,) = struct.unpack("<Q", made.offsets)
        pool.arena[offset : offset + LAYOUT.chunk_bytes] = np.frombuffer(payload(self._key), np.uint8)
        self._reservation = made.reservation
        arena = pool.pool._dram.arena
        self._checks = kvpool_native.extent_checksums(arena, offset, LAYOUT.chunk_bytes // extents, extents)
        pool.pool.chains.land_saved(pool.session, one_way.LandSaved(self._reservation, 0, self._checks[:4]))

    async def commit(self) -> None:
        commit = m.Commit(self._reservation, self._checks, b"")
        done = await self._pool.serve(self._pool.pool.chains.commit(self._pool.session, commit))
        assert list(done.states) == [SaveState.STORED]


class NoListener:
    """A listener to saves that announces none."""

    def note_save(self, keys: KeyColumn) -> None:
        """Its first extent has landed."""

    def end_save(self, keys: KeyColumn, stored: int) -> None:
        """It has ended."""


async def test_what_is_just_being_saved_of_a_run_is_offered_behind_what_is_stored() -> None:
    async with window_rig() as rig:
        there = rig.there.pool
        there.pool.chains.writers.followed.listen(NoListener())
        await rig.save(rig.there, KEYS[:5])
        saves = [Save(there, key) for key in KEYS[5:8]]
        for save in saves:
            await save.begin()
        rig.here.believe(rig.there, KEYS[:8])
        loading = asyncio.get_running_loop().create_task(rig.load(KEYS[:8]))
        await there.until_moved(lambda: rig.there.offers.stats()["offers"] == 1)
        for save in saves:
            await save.commit()
        assert await loading == (8, 8)
        assert rig.pulls(rig.there) == 1


async def test_a_node_that_ends_leaves_nothing_held() -> None:
    async with window_rig() as rig:
        await rig.save(rig.there, KEYS)
        pool = rig.here.pool
        rig.there.server.close()
        leased = await pool.serve(pool.pool.chains.acquire_for_peer(pool.session, KeyColumn.of(KEYS)))
        await pool.until_moved(lambda: pool.pool._tiering.holds == 0)
        if leased.lease:
            pool.pool.leases.release(pool.session, leased.lease)
        assert await rig.load(KEYS) == (0, 0)


async def test_a_run_that_finds_no_room_is_whole_or_ends_where_room_does() -> None:
    """All of DRAM is leased but for some chunks: the run ends there, and all holds are released."""
    async with window_rig() as rig:
        pool, room = rig.here.pool, 6
        await rig.save(rig.there, KEYS)
        filler = [key_of(9, number) for number in range(DRAM_CHUNKS)]
        for key in filler:
            await pool.save([key])
        kept = [key for key in filler if pool.pool._directory.place_of(key)[1]][room:]
        leases = []
        for at in range(0, len(kept), r.RUN_KEYS_MAX):
            column = KeyColumn.of(kept[at : at + r.RUN_KEYS_MAX])
            leases.append(await pool.serve(pool.pool.chains.acquire_for_peer(pool.session, column)))
        leased, landed = await rig.load(KEYS)
        assert leased == landed == room
        for lease in leases:
            pool.pool.leases.release(pool.session, lease.lease)
        assert await rig.load(KEYS) == (len(KEYS), len(KEYS))
