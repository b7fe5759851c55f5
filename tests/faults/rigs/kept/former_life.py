"""Former life: a dead daemon's index, whose mapping lives on in a process that had it, and which nobody writes any more.

A chunk is found by it if and only if it was visible at the kill: what a new life over kept memory must have, and no more.
"""

from collections.abc import Mapping

import kvpool_client as kv
from kvpool.states import Level
from tests.faults.rigs.kept.prompts import SETS, Prompts
from tests.rigs.daemon import Daemon
from tests.rigs.sets import names_of

IN_DRAM = bytes([Level.DRAM])
Found = dict[tuple[str, int], int]


def withheld_slots(daemon: Daemon) -> int:
    """How many slots nobody may use, because a former life's writers may still write to them."""
    return int(daemon.info().get("dram_withheld_slots", 0))


class Watcher:
    """A Pool for each model, connected in every life; remembers the index of the last one."""

    def __init__(self, pools: Mapping[Prompts, kv.Pool]) -> None:
        self._pools = pools
        first = next(iter(pools.values()))
        session = first._link.session
        assert session is not None, "it is made while the daemon lives"
        self._index = session.index

    def found(self) -> Found:
        """How many leading chunks of each chain the index of that life has now in DRAM, or had at its death."""
        return {
            (prompts.model, number): self._find(prompts, pool, number)
            for prompts, pool in self._pools.items()
            for number in range(prompts.count)
        }

    def _find(self, prompts: Prompts, pool: kv.Pool, number: int) -> int:
        if prompts.model == SETS:
            roots = pool._sets._roots_of(0)
            levels = self._index.probe(roots, names_of(number))
        else:
            levels = self._index.lookup(prompts.keys(pool, number).columns()[0])
        return len(levels) - len(levels.lstrip(IN_DRAM))
