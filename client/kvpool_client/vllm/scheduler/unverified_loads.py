"""Synchronous loads of steps under way: their blocks are in vLLM's prefix cache before anybody knows that they came.

vLLM puts the blocks of such a load into its own prefix cache when it allocates them. If the load fails, it leaves them there
because the request that uses them will compute them again; but until that is done, or for ever if the request is aborted or
preempted meanwhile, whoever finds them there reads what never came. So two things are needed of the connector: a request that
would share them is held back until the step has been reported, and what failed is taken out of the prefix cache.

Invariant: an entry goes when its step is reported, or when `STEPS_MAX` later ones have begun. The scheduler's thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool_client.vllm.scheduler.requests import Tracked

STEPS_MAX = 16
"""Steps that may be under way at once; vLLM runs one or two."""


@dataclass(frozen=True, slots=True)
class UnverifiedLoad:
    """`place` and `block_hash` of the first block that it fills: who shares any of them shares that one."""

    step: int
    place: int
    block_hash: bytes
    entry: Tracked


class UnverifiedLoads:
    """All of them."""

    def __init__(self) -> None:
        self._loads: list[UnverifiedLoad] = []

    def __repr__(self) -> str:
        return f"<UnverifiedLoads {len(self._loads)}>"

    def add(self, load: UnverifiedLoad) -> None:
        """A load that a step begins."""
        self._loads.append(load)

    def settle(self, step: int) -> list[UnverifiedLoad]:
        """Step `step` and those before it have been reported; their loads."""
        settled = [load for load in self._loads if load.step <= step]
        self._loads = [load for load in self._loads if load.step > step]
        return settled

    def begin(self, step: int) -> None:
        """Step `step` begins: what is still open of steps long past will never be reported."""
        if self._loads:
            self.settle(step - STEPS_MAX)

    def has_any_of(self, hashes: Sequence[bytes], held: int) -> bool:
        """Whether the first `held` of these blocks rest on a load that is not known to have gone well."""
        return any(load.place < held and bytes(hashes[load.place]) == load.block_hash for load in self._loads)


def blocks_from_the_first_bad(entries: Iterable[Tracked], bad: set[int]) -> set[int]:
    """The bad blocks, and in each request that has any of them all blocks behind the first one: they rest on it."""
    blocks = set(bad)
    for entry in entries:
        table = entry.table or []
        first = next((place for place, block in enumerate(table) if block in bad), len(table))
        blocks.update(table[first:])
    return blocks
