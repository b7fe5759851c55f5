"""Table of who has which block, as events make it: a bounded number of entries, each event some time after its change.

One table stands for those of all nodes. A node's own table lacks its own blocks, so the shared one has room for
N / (N - 1) times as many entries, and whoever asks names the node that is left out. A full table forgets the entry that came
first, as events show no uses. Without a bound it is what a router knows. One thread.

Invariant: `_entries` has each pair of a block and a node in `_owners` once, the oldest first.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

ENTRY_BYTES = 32
NOBODY = -1
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Owners:
    """The nodes that have the longest run of some blocks, and its length."""

    blocks: int
    nodes: AbstractSet[int]


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A block that came to a node's pool, or left it."""

    block: int
    has_come: bool


class RemoteIndex:
    """See the module. `entries_max` None: no bound."""

    def __init__(self, entries_max: int | None, delay_ns: int) -> None:
        assert entries_max is None or entries_max > 0
        assert delay_ns >= 0
        self._entries_max = entries_max
        self._delay_ns = delay_ns
        self._owners: dict[int, set[int]] = {}
        self._entries: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._coming: deque[tuple[int, int, Sequence[BlockChange]]] = deque()
        self.entries_peak = 0
        self.forgotten = 0

    def __repr__(self) -> str:
        return f"<RemoteIndex {len(self._entries)} entries, {len(self._coming)} batches on their way>"

    def publish(self, node: int, changes: Sequence[BlockChange], now_ns: int) -> None:
        """Have the changes of a node known after the delay."""
        assert not self._coming or self._coming[-1][0] <= now_ns + self._delay_ns
        self._coming.append((now_ns + self._delay_ns, node, changes))

    def advance(self, now_ns: int) -> None:
        """Apply the events that have come by now."""
        while self._coming and self._coming[0][0] <= now_ns:
            _, node, changes = self._coming.popleft()
            for change in changes:
                if change.has_come:
                    self._add(change.block, node)
                else:
                    self._remove(change.block, node)

    def find(self, chain: Sequence[int], *, asker: int = NOBODY) -> Owners:
        """The longest run of the chain's first blocks that one node other than the asker is known to have."""
        nodes: AbstractSet[int] = _NONE
        for depth, block in enumerate(chain):
            owners: AbstractSet[int] = self._owners.get(block, _NONE)
            left = nodes & owners if depth else owners - {asker}
            if not left:
                return Owners(depth, nodes)
            nodes = left
        return Owners(len(chain), nodes)

    def forget(self, chain: Sequence[int], node: int) -> None:
        """Remove what a node was found not to have."""
        for block in chain:
            self._remove(block, node)

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        pairs = {(block, node) for block, nodes in self._owners.items() for node in nodes}
        wrong = (
            [] if pairs == set(self._entries) else [f"{len(pairs ^ set(self._entries))} entries are in one place only"]
        )
        if self._entries_max is not None and len(self._entries) > self._entries_max:
            wrong.append(f"{len(self._entries)} entries, expected {self._entries_max} at most")
        return wrong

    def _add(self, block: int, node: int) -> None:
        owners = self._owners.setdefault(block, set())
        if node in owners:
            return
        owners.add(node)
        self._entries[block, node] = None
        if self._entries_max is not None and len(self._entries) > self._entries_max:
            oldest = next(iter(self._entries))
            self._remove(*oldest)
            self.forgotten += 1
        self.entries_peak = max(self.entries_peak, len(self._entries))

    def _remove(self, block: int, node: int) -> None:
        if self._entries.pop((block, node), self) is self:
            return
        owners = self._owners[block]
        owners.remove(node)
        if not owners:
            del self._owners[block]
