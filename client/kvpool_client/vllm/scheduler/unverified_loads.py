"""Unverified loads: synchronous loads of running steps, whose blocks are in vLLM's prefix cache before their bytes are
verified.

vLLM puts the blocks of such a load into its own prefix cache when it allocates them. If the load fails, it leaves them there
because the request that uses them will compute them again; but until that is done, or for ever if the request is aborted or
preempted meanwhile, other requests that find them there read wrong KV. So two things are needed of the connector: a request
that would share them is held back until the step has been reported, and failed blocks are removed from the prefix cache.

Invariant: an entry is removed when its step is reported, or when `STEPS_MAX` later ones have begun. The scheduler's thread.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kvpool_client.vllm.scheduler.requests import Tracked

STEPS_MAX = 16
"""Steps that may be under way at once; vLLM runs one or two."""


@dataclass(frozen=True, slots=True)
class UnverifiedLoad:
    """`index` and `block_hash` of the first block that it fills: a request that shares any of its blocks shares that one."""

    step: int
    index: int
    block_hash: bytes
    entry: Tracked


class UnverifiedLoads:
    """All unverified loads: `loads`."""

    def __init__(self) -> None:
        self.loads: list[UnverifiedLoad] = []

    def __repr__(self) -> str:
        return f"<UnverifiedLoads {len(self.loads)}>"

    def add_load(self, load: UnverifiedLoad) -> None:
        """Add a load that a step begins."""
        self.loads.append(load)

    def settle_step(self, step: int) -> list[UnverifiedLoad]:
        """Remove the loads of step `step` and before, which have been reported, and return them."""
        settled = [load for load in self.loads if load.step <= step]
        self.loads = [load for load in self.loads if load.step > step]
        return settled

    def begin_step(self, step: int) -> None:
        """Step `step` begins: drop loads of steps so old that they will never be reported."""
        self.settle_step(step - STEPS_MAX)

    def has_any_of(self, hashes: Sequence[bytes], held: int) -> bool:
        """Whether the first `held` of these blocks depend on an unverified load."""
        return any(load.index < held and bytes(hashes[load.index]) == load.block_hash for load in self.loads)


def first_bad_block(entry: Tracked, bad: Container[int]) -> int | None:
    """The place of a request's first bad block in its table; None where it has none."""
    table = entry.tables[0] if entry.tables else []  # vLLM names bad blocks where there is one table
    return next((place for place, block in enumerate(table) if block in bad), None)


def blocks_from_the_first_bad(entries: Iterable[Tracked], bad: set[int]) -> set[int]:
    """The bad blocks, and in each request that has one of them all blocks after the first one, which depend on it."""
    blocks = set(bad)
    for entry in entries:
        first = first_bad_block(entry, bad)
        if entry.tables and first is not None:
            blocks.update(entry.tables[0][first:])
    return blocks
