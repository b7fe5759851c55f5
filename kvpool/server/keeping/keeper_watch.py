"""Keeper watch: notices that the keeper process has ended while the daemon runs, and has another one keep the memory.

    kept ──its end──► waits AGAIN_S ──► another is started and given everything ──► kept
                      ▲         └── that failed: again after AGAIN_S
                      └── nobody has it from the start

Control thread only; what waits for the new process runs in an executor.
"""

import asyncio
import logging

from kvpool.server.keeping.descriptor_store import DescriptorStore
from kvpool.server.keeping.own_keeper import OwnKeeper
from kvpool.tiers.dram.kept.kept_memory import KeptMemory

log = logging.getLogger(__name__)

# A keeper that something kills again and again costs a process in this time.
AGAIN_S = 10.0


class KeeperWatch:
    """See the module. Invariant: a reader or a task is there while it watches, never both."""

    def __init__(self, keeper: OwnKeeper, kept: KeptMemory, again_s: float = AGAIN_S) -> None:
        self._keeper = keeper
        self._kept = kept
        self._again_s = again_s
        self._loop = asyncio.get_running_loop()
        self._watched: int | None = None
        self._task: asyncio.Task[None] | None = None
        if kept.is_kept:
            self._begin()
        else:
            self._task = self._loop.create_task(self._give_again())

    def stop(self) -> None:
        """Watch no more."""
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
            self._watched = None
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._watched = self._keeper.descriptor
        if self._watched is not None:
            self._loop.add_reader(self._watched, self._note_end)

    def _note_end(self) -> None:
        """Nothing is asked while it is watched: what can be read is the end."""
        assert self._watched is not None
        self._loop.remove_reader(self._watched)
        self._watched = None
        log.warning("%s has ended: dram is kept by nobody until another one is there", self._keeper.name)
        self._keeper.close()
        self._kept.note_lost("its keeper has ended, another one follows")
        self._task = self._loop.create_task(self._give_again())

    async def _give_again(self) -> None:
        logged = ""
        while True:
            await asyncio.sleep(self._again_s)
            if not self._kept.can_be_kept:
                return  # which was logged when it ended
            if await self._kept.give_again():
                break
            if logged != self._kept.why_unkept:
                logged = self._kept.why_unkept
                log.warning("dram is kept by nobody: %s", logged)
        log.info("dram is kept by %s", self._keeper.name)
        self._task = None
        self._begin()


def watch_keeper(keeper: DescriptorStore | OwnKeeper | None, kept: KeptMemory) -> KeeperWatch | None:
    """A watch over a keeper that can end, of memory that is kept or could not be handed over."""
    return KeeperWatch(keeper, kept) if isinstance(keeper, OwnKeeper) and kept.can_be_kept else None
