"""Placed run: chunks of one run elsewhere that get slots in the arena, part by part, and are pulled together.

A request about thousands of chunks places them in parts, so that others are served between these; asked for they are once, when
the last part has its slots: a request to another node costs a round trip, and a lease there. Values of the control thread.

Invariant: the columns are of the chunks number `first` and following of `keys`, one after the other where they are a chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import kvpool_native
from kvpool.ids import HoldId
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.packed_numbers import u64_of
from kvpool.tiers.base import Moves
from kvpool.tiers.remote import NOBODY, Asker, PullOrder, RemoteRun

_ROOT = KeyColumn(b"")


@dataclass(slots=True)
class PlacedRun:
    """See the module. `keys`: of a chain from its root, or where `is_chained` is false of chunks without a parent; `run`: where
    they come from, its `end` among `keys`; of chunks that `are_alone` none waits for another one. `holds`: on what was placed.
    `generations`: of the slots."""

    namespace: Namespace
    keys: KeyColumn
    run: RemoteRun
    is_urgent: bool = True
    asker: Asker = NOBODY
    is_chained: bool = True
    are_alone: bool = False
    first: int = 0
    placed: list[int] = field(default_factory=list)
    holds: list[HoldId] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<PlacedRun {len(self.placed)} chunks from {self.run.node!r}>"

    def follows(self, number: int) -> bool:
        """Whether a chunk may be pulled together with those that were placed."""
        return not self.placed or not self.is_chained or number == self.placed[-1] + 1

    def add_slots(self, numbers: Sequence[int], at: Sequence[int], made: kvpool_native.Reserved) -> None:
        """Chunks number `numbers` that have got the slots at these places of an answer."""
        self.first = self.first if self.placed else numbers[0]
        self.placed += numbers
        offsets, slots, generations = u64_of(made.offsets), u64_of(made.slots), u64_of(made.generations)
        self.offsets += [offsets[place] for place in at]
        self.slots += [slots[place] for place in at]
        self.generations += [generations[place] for place in at]

    def moves(self) -> Moves:
        """Where the chunks go. Offsets and generations elsewhere are not known."""
        keys = list(self.keys.chosen(self.placed))
        nowhere = [0] * len(keys)
        parents = self.keys[self.first : self.first + len(keys)].parents(self.keys.before(self.first))
        return Moves(
            keys=keys,
            parents=parents if self.is_chained else [b""] * len(keys),
            offsets=nowhere,
            generations=nowhere,
            arena_offsets=self.offsets,
            arena_slots=self.slots,
        )

    def order(self) -> PullOrder:
        """The rest of the order to pull them."""
        before = self.keys[: self.first] if self.is_chained else _ROOT
        return PullOrder(self.run, before, self.is_urgent, self.asker, are_alone=self.are_alone)

    def take_holds(self) -> list[HoldId]:
        """The holds, which belong to the caller from now on; nothing is placed any more."""
        holds, self.holds = self.holds, []
        self.placed, self.offsets, self.slots, self.generations = [], [], [], []
        return holds
