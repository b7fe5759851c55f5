"""A pool in this process with a tier in memory under DRAM, an engine's way to save and load, and its next life."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.ids import KEY_BYTES, ConnectionId
from kvpool.index.parts import Parts
from kvpool.layout import Layout
from kvpool.pool.lower_tiers import Planner
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import Level, SaveState
from kvpool.tiers.dram.kept.kept_memory import KeptMemory
from kvpool.tiers.slots import SlotSizes
from tests.rigs.reserve_requests import reserve_alone
from tests.rigs.tiers.memory_tier import Medium, MemoryTier, planner

LAYOUT = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=32)
CHUNK = LAYOUT.chunk_bytes
MOVED_S = 180.0
T = TypeVar("T")


def key_of(*named: int) -> bytes:
    """A key for these numbers."""
    key: bytes = kvpool_native.blake3(struct.pack(f"<{len(named)}q", *named))
    return key


def payload(key: bytes, layout: Layout = LAYOUT) -> bytes:
    """The bytes of a key's chunk; its extents differ."""
    times = layout.extent_bytes // KEY_BYTES
    return b"".join((key[extent:] + key[:extent]) * times for extent in range(layout.extents))


def medium_of(chunks: int) -> Medium:
    """Memory for so many chunks."""
    return Medium(SlotSizes(-(-CHUNK * chunks // (8 * 4096)) * 4096, 8, 2 * chunks))


class TieredPool:
    """One life of a pool.

    `tiers`: the lower tiers, one for each medium, the fastest first. `kinds`: planners of further tiers. `kept`: what
    outlives it.
    """

    def __init__(
        self,
        media: Sequence[Medium],
        dram_chunks: int,
        *options: str,
        levels: Sequence[Level] = (Level.SSD,),
        kinds: Sequence[Planner] = (),
        layout: Layout = LAYOUT,
        kept: KeptMemory | None = None,
    ) -> None:
        self.layout = layout
        self.tiers: list[MemoryTier] = []
        planners: list[Planner] = [
            planner(medium, self.tiers, level=level, seed=number)
            for number, (medium, level) in enumerate(zip(media, levels, strict=True))
        ]
        wanted = [
            f"dram.capacity={dram_chunks * layout.chunk_bytes}B",
            "dram.prefault=false",
            "dram.connection_quota=1.0",
            *options,
        ]
        self.pool = Pool(load_config(None, wanted), MonotonicClock(), [*planners, *kinds], kept)
        self.session = self.pool.open_session(ConnectionId(1), "model", layout)
        self.arena = self.pool._dram.arena.view()

    @property
    def tier(self) -> MemoryTier:
        """The only one."""
        (tier,) = self.tiers
        return tier

    async def start(self) -> None:
        """Serve."""
        await self.pool.start()

    async def stop(self) -> None:
        """End, with nothing broken."""
        self.assert_sound()
        self.pool.drop_connection(self.session.connection)
        assert await self.pool.stop()

    def assert_sound(self) -> None:
        """Every book agrees with every other."""
        problems = self.pool.verify()["problems"]
        assert not problems, problems

    async def serve(self, parts: Parts[T]) -> T:
        """The answer to a request."""
        while True:
            try:
                awaited = next(parts)
            except StopIteration as end:
                answer: T = end.value
                return answer
            await (asyncio.sleep(0) if awaited is None else awaited)

    async def save(self, keys: Sequence[bytes]) -> int:
        """Save a chain: how many of its chunks are stored now."""
        return len(await self.saved(keys))

    async def saved(self, keys: Sequence[bytes]) -> list[bytes]:
        """Save a chain, or chunks alone where the layout's have no parent: which of them are stored now. Others may be on their
        way from another tier, before these."""
        packed = b"".join(keys)
        request = reserve_chain(b"", packed) if self.session.layout.is_chained else reserve_alone(0, packed)
        made = await self.serve(self.pool.chains.reserve(self.session, request))
        sums = b""
        for number, state in enumerate(made.states):
            if state == SaveState.RESERVED:
                (offset,) = struct.unpack_from("<Q", made.offsets, 8 * number)
                size, extents = self.layout.chunk_bytes, self.layout.extents
                self.arena[offset : offset + size] = np.frombuffer(payload(keys[number], self.layout), np.uint8)
                sums += kvpool_native.extent_checksums(self.pool._dram.arena, offset, size // extents, extents)
        states = list(made.states)
        if made.reservation:
            done = await self.serve(self.pool.chains.commit(self.session, m.Commit(made.reservation, sums, b"")))
            reserved = [number for number, state in enumerate(states) if state == SaveState.RESERVED]
            for number, state in zip(reserved, done.states, strict=True):
                states[number] = state
        return [key for key, state in zip(keys, states, strict=False) if state in {SaveState.PRESENT, SaveState.STORED}]

    async def load(self, keys: Sequence[bytes], *, is_patient: bool = True, owner: str = "") -> int:
        """Lease a chain and compare what has landed: how many leading chunks are there, each with the bytes of its key.

        `is_patient`: waits until all that is leased has landed or failed. `owner`: the node that is named.
        """
        leased = await self.serve(self.pool.chains.acquire(self.session, m.Acquire(b"".join(keys), owner=owner)))
        if not leased.lease:
            return 0
        lease = self.pool._readers.find(self.session, leased.lease)
        assert lease is not None
        ((hold,),) = lease.holds.values()
        if is_patient:
            await self.until_moved(
                lambda: not {Level.SSD, Level.PEER} & set(self.pool._directory.columns([hold]).levels)
            )
        slots = self.pool._directory.columns([hold])
        landed, size = 0, self.layout.chunk_bytes
        while landed < lease.chunks and slots.levels[landed] in (Level.HBM, Level.DRAM):
            (offset,) = struct.unpack_from("<Q", slots.offsets, 8 * landed)
            assert self.arena[offset : offset + size].tobytes() == payload(keys[landed], self.layout), "wrong bytes"
            landed += 1
        self.pool.leases.release(self.session, leased.lease)
        return landed

    async def until_moved(self, is_so: Callable[[], bool]) -> None:
        """Until a condition holds."""

        async def look() -> None:
            while not is_so():
                await asyncio.sleep(0.001)

        await asyncio.wait_for(look(), MOVED_S)

    async def demote(self) -> int:
        """Demote all chunks that DRAM alone has; the number that the lower tiers still lack."""
        return (await self.pool.demote_all(MOVED_S))["left"]

    async def flush(self, tier: str = "") -> None:
        """Drop all chunks that are not held."""
        await self.serve(self.pool.flush(None, None, tier))
