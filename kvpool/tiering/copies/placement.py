"""Placement: which chunks of a leased prefix are copied up into a tier, by its directory and a budget.

The leading chunks that have copies count as served, and their bytes earn for the budget. The chunks after them are copied as
far as the budget goes; which copies make room for them, the tier's directory decides. The daemon and the simulator share this
code, so that what the simulator measures is what the daemon does.

Metadata alone; no I/O and no clock. Control thread only. Invariant: all bytes copied are within the `PromotionBudget`.
"""

from dataclasses import dataclass

import kvpool_native
from kvpool.ids import HoldId, SizeClassId
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.packed_numbers import u64_of
from kvpool.tiering.copies.promotion_budget import PromotionBudget


@dataclass(slots=True)
class LeasedPrefix:
    """A leased prefix of which the `copied` leading chunks have copies."""

    namespace: Namespace
    keys: KeyColumn
    copied: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one of its chunks."""
        return self.namespace.layout.stored_bytes

    @property
    def left(self) -> int:
        """How many chunks have no copy."""
        return len(self.keys) - self.copied


class Placement:
    """See the module. `arena`, `copies`: the directories of the arena and of the tier; `budget`: what may be copied.

    `leased_chunks`, `served_chunks`: those of leases that were noted, and those of them that had a copy; their bytes alike.
    """

    def __init__(
        self, arena: kvpool_native.Directory, copies: kvpool_native.Directory, budget: PromotionBudget
    ) -> None:
        self._arena = arena
        self._copies = copies
        self._budget = budget
        self.leased_chunks = 0
        self.leased_bytes = 0
        self.served_chunks = 0
        self.served_bytes = 0

    def __repr__(self) -> str:
        return f"<Placement {self.served_chunks} chunks served, {self._budget!r}>"

    def note_lease(self, namespace: Namespace, hold: HoldId, *, is_set: bool) -> list[LeasedPrefix]:
        """The chunks of a hold in the arena are used: their copies have served them. Returns the prefixes of which some have
        none: the chain, or each chunk without a parent, as all of a set are. Takes as long as a lookup of them."""
        keys, chunk_bytes = KeyColumn(self._arena.keys_of([hold])), namespace.layout.stored_bytes
        size = len(keys) if namespace.layout.is_chained and not is_set else 1
        generations = u64_of(self._arena.copies([hold]).generations)
        copied = [_leading_copies(generations[first : first + size]) for first in range(0, len(keys), size)]
        served = sum(copied)
        missed_bytes = (len(keys) - served) * chunk_bytes
        self._budget.earn(served_bytes=served * chunk_bytes, missed_bytes=missed_bytes)
        self.leased_chunks += len(keys)
        self.leased_bytes += len(keys) * chunk_bytes
        self.served_chunks += served
        self.served_bytes += served * chunk_bytes
        return [
            LeasedPrefix(namespace, keys[number * size : (number + 1) * size], count)
            for number, count in enumerate(copied)
            if count < size
        ]

    def reserve(
        self, prefix: LeasedPrefix, size_class: SizeClassId, chunks_max: int, now_ns: int
    ) -> kvpool_native.Reserved | None:
        """Slots for the chunks after those that have copies, `chunks_max` at most; copies that are worth less are evicted for
        them. None where nothing is to be copied, or the budget allows nothing."""
        chunks = min(chunks_max, self._budget.affordable(prefix.chunk_bytes), prefix.left)
        if chunks <= 0:
            return None
        wanted = prefix.keys[prefix.copied : prefix.copied + chunks]
        before = prefix.keys.before(prefix.copied)
        return self._copies.reserve(prefix.namespace.id, size_class, before, wanted.packed, now_ns)

    def spend(self, chunks: int, chunk_bytes: int) -> None:
        """Count chunks as copied. REQUIRES: they were reserved, and nothing was spent since."""
        self._budget.spend(chunks * chunk_bytes)


def _leading_copies(generations: "memoryview[int]") -> int:
    return next((number for number, generation in enumerate(generations) if not generation), len(generations))
