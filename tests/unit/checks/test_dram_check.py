"""Reports of bad chunks: bytes are read and compared, and only compared chunks are dropped."""

import asyncio

from kvpool.checks.dram_check import DramCheck
from kvpool.ids import ChunkExtent, CorruptChunk, HoldId
from kvpool.tiers.bad_chunk_log import BadChunkLog
from tests.rigs.events.journal_rig import LAYOUT, Rig, key
from tests.rigs.flushing import flush_whole


class Readers:
    """Stands for the transfer threads: every chunk is found bad, once `go_on` is set."""

    def __init__(self) -> None:
        self.asked: list[ChunkExtent] = []
        self.go_on = asyncio.Event()

    async def find_corrupt(self, extents: tuple[ChunkExtent, ...]) -> tuple[CorruptChunk, ...]:
        self.asked += extents
        await self.go_on.wait()
        return tuple(CorruptChunk(extent, (0,)) for extent in extents)


def _acquire(rig: Rig, names: list[int]) -> HoldId:
    column = b"".join(key(names[: at + 1]) for at in range(len(names)))
    held = rig.memory.acquire(rig.namespace.id, column)
    assert held.chunks == len(names)
    return HoldId(held.id)


def test_a_report_drops_chunks_that_were_read_and_found_bad() -> None:
    async def play() -> None:
        rig, reading = Rig(), Readers()
        dram_check = DramCheck(rig.memory, reading.find_corrupt, BadChunkLog("dram", rig.clock))
        rig.store([1, 2, 3])
        hold = _acquire(rig, [1, 2, 3])
        reading.go_on.set()
        await dram_check.check_reported(hold, 1, LAYOUT)
        rig.memory.release(hold, rig.tick())
        assert reading.asked[0].key == key([1, 2])
        assert dram_check.stats() == {"checksum_failures": 1, "corrupt_reports": 1, "corrupt_reports_early": 0}
        assert rig.memory.stats()["chunks"] == 1
        assert rig.memory.verify() == []

    asyncio.run(play())


def test_a_late_verdict_does_not_drop_a_chunk_saved_again() -> None:
    async def play() -> None:
        rig, reading = Rig(), Readers()
        dram_check = DramCheck(rig.memory, reading.find_corrupt, BadChunkLog("dram", rig.clock))
        rig.store([1, 2, 3])
        hold = _acquire(rig, [1, 2, 3])
        report = asyncio.ensure_future(dram_check.check_reported(hold, 0, LAYOUT))
        while not reading.asked:
            await asyncio.sleep(0)
        rig.memory.discard(key([1]))
        rig.store([1, 2, 3])
        reading.go_on.set()
        await report
        rig.memory.release(hold, rig.tick())
        assert rig.memory.stats()["chunks"] == 3
        assert rig.memory.stats()["dropped_chunks"] == 0
        assert rig.memory.verify() == []

    asyncio.run(play())


def test_a_report_about_chunks_that_have_not_landed_reads_and_drops_nothing() -> None:
    async def play() -> None:
        rig, reading = Rig(), Readers()
        dram_check = DramCheck(rig.memory, reading.find_corrupt, BadChunkLog("dram", rig.clock))
        rig.store([1, 2])
        rig.demote()
        rig.demote()
        flush_whole(rig.memory, rig.tick())
        column = key([1]) + key([1, 2])
        made = rig.memory.promote(rig.namespace.id, rig.namespace.size_class, b"", column, rig.tick())
        hold = _acquire(rig, [1, 2])
        await dram_check.check_reported(hold, 0, LAYOUT)
        assert reading.asked == []
        assert dram_check.stats()["corrupt_reports_early"] == 1
        for at in range(2):
            generation = int.from_bytes(made.generations[8 * at : 8 * at + 8], "little")
            assert rig.memory.landed(column[32 * at : 32 * at + 32], generation)
        rig.memory.release(hold, rig.tick())
        rig.memory.release(made.id, rig.tick())
        assert rig.memory.stats()["chunks"] == 2
        assert rig.memory.verify() == rig.files.verify() == []

    asyncio.run(play())
