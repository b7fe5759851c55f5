"""A pool in this process with a device in memory above DRAM, and an engine on it that reads the copies of what it leases."""

import struct
from collections.abc import Sequence

import numpy as np

from kvpool.layout import Layout
from kvpool.protocol.records import device as dm
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from kvpool.states import Level
from kvpool.tiering.copies.copy_link import CopyLink
from kvpool.tiering.copies.promotion_budget import EARNED, TRIED
from tests.rigs.tiers.memory_device import UUID, MemoryDevice, copy_planner
from tests.rigs.tiers.memory_tier import Medium
from tests.rigs.tiers.tiered_pool import TieredPool, payload

# 32 chunks of this layout fit the smallest device, of which four are copied at a time.
BIG = Layout(layers=2, kv_heads=8, head_dim=64, dtype="float16", chunk_tokens=16)
DEVICE_CHUNKS = (2 << 20) // BIG.chunk_bytes


class CopiesPool(TieredPool):
    """See the module. The engine is on the device once `open_device` was called."""

    def __init__(
        self, dram_chunks: int, *options: str, media: Sequence[Medium] = (), failures: list[str] | None = None
    ) -> None:
        self.devices: list[MemoryDevice] = []
        kinds = [copy_planner(self.devices, failures)]
        wanted = ["hbm.device=cuda:0", "hbm.capacity=2MiB", *options]
        super().__init__(media, dram_chunks, *wanted, kinds=kinds, layout=BIG, levels=[Level.SSD] * len(media))

    @property
    def device(self) -> MemoryDevice:
        """The only one."""
        (device,) = self.devices
        return device

    @property
    def link(self) -> CopyLink:
        """The link to the device tier."""
        (link,) = self.pool._tiering.copies
        return link

    async def open_device(self) -> None:
        """Wait for the device, and be an engine on it."""
        await self.until_moved(lambda: self.link.tier.can_copy)
        answer, _ = self.pool.device_copies.open(self.session, UUID)
        assert answer == mm.Memory(UUID, self.device.memory.size)

    def may_have_copied(self) -> float:
        """How many chunks may have been copied so far: the room once, what was earned, and trials."""
        counted, share = self.link.stats(), self.device.memory.size / self.pool._config.dram.capacity
        served = int(counted["hbm.served_chunks"])
        return DEVICE_CHUNKS + EARNED * served + TRIED * share * (int(counted["hbm.leased_chunks"]) - served)

    async def settled(self) -> None:
        """Until nothing is copied."""
        await self.until_moved(lambda: not self.link.stats()["hbm.waiting_prefixes"] and not self.link.pins)

    async def lease(self, keys: Sequence[bytes], *, set_of: int = 0) -> m.Leased:
        """A lease of a chain, or of a set of a group: see `Acquire`."""
        return await self.serve(self.pool.chains.acquire(self.session, m.Acquire(b"".join(keys), set_of=set_of)))

    def copies_of(self, leased: m.Leased, first: int = 0) -> list[tuple[int, int, int]]:
        """Offset, slot and generation of each copy of a lease's chunks from number `first` on, as an engine gets them."""
        found = self.pool.device_copies.find_copies(self.session, dm.FindCopies(leased.lease, first))
        columns = (np.frombuffer(column, "<u8").tolist() for column in (found.offsets, found.slots, found.generations))
        return list(zip(*columns, strict=True))

    async def read_copies(self, keys: Sequence[bytes]) -> int:
        """Lease a chain and read its copies as an engine does: how many leading chunks have one, with the bytes of its
        key."""
        leased = await self.lease(keys)
        if not leased.lease:
            return 0
        copied = 0
        for key, (offset, slot, generation) in zip(keys, self.copies_of(leased), strict=False):
            if not generation:
                break
            found = self.device.memory.view()[offset : offset + BIG.chunk_bytes].tobytes()
            assert self.pool._index_view.generation_at(slot) == generation
            assert found == payload(key, BIG), "a copy has wrong bytes"
            copied += 1
        self.pool.leases.release(self.session, leased.lease)
        return copied

    def generations(self, leased: m.Leased) -> list[int]:
        """The generations of a lease's chunks in the arena."""
        return list(struct.unpack(f"<{leased.chunks}Q", leased.generations))
