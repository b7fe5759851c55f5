"""Landings: the ends of chunks that were read into the arena, from a tier of any kind.

    PROMOTING ──all extents have landed──► READY
        └──anything else──► dropped with its descendants

Control thread only; no I/O.
"""

import logging

import kvpool_native
from kvpool import failpoint
from kvpool.clock import Clock
from kvpool.key_column import SHOWN_DIGITS
from kvpool.log_pace import LogPace
from kvpool.states import LoadFault, SaveState
from kvpool.tiers.base import Finished, Outcome

log = logging.getLogger(__name__)


class Landings:
    """Landings of chunks of one tier, with their counts."""

    def __init__(self, directory: kvpool_native.Directory, tier: str, clock: Clock) -> None:
        """`directory`: the arena's. `tier`: the name of the tier that the chunks come from."""
        self._directory = directory
        self._tier = tier
        self._faults = LogPace(clock)
        self.chunks = 0
        self.failed_chunks = 0

    def __repr__(self) -> str:
        return f"<Landings from {self._tier}, {self.chunks} good, {self.failed_chunks} failed>"

    def settle_chunk(self, key: bytes, generation: int, finished: Finished) -> bool:
        """Note that a chunk has landed, with its token ids if known, or failed. `generation`: of its slot in the arena.

        Whether all its extents have landed.
        """
        failpoint.reach("daemon.promote.landed")
        is_done = finished.outcome is Outcome.DONE
        if is_done and self._directory.has_landed(key, generation):
            self.chunks += self._directory.landed(key, generation, finished.tokens)
            return True
        self.failed_chunks += 1
        if is_done and (end := self._faults.take_line()) is not None:
            log.error(
                "the %s tier reported chunk %s as read, and not all of its extents have landed%s",
                self._tier,
                key.hex()[:SHOWN_DIGITS],
                end,
            )
        is_bad = finished.outcome is Outcome.BAD_SOURCE
        self._directory.fail_landing(key, generation, LoadFault.SOURCE if is_bad else LoadFault.PATH)
        return False

    def give_up(self, keys: list[bytes], generations: list[int]) -> None:
        """Give up the slots of chunks that nobody reads."""
        for key, generation in zip(keys, generations, strict=True):
            self._directory.fail_landing(key, generation, LoadFault.PATH)


def leading(states: bytes) -> int:
    """How many leading chunks have a slot, by the states of an answer."""
    count = 0
    while count < len(states) and states[count] in (SaveState.PRESENT, SaveState.RESERVED):
        count += 1
    return count
