"""Records of nodes: what this node has experienced with each of the others that it has asked.

Bounded: beyond `NODES_MAX` the one that was asked longest ago is forgotten. One thread.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvpool.clock import Clock, Deadline
from kvpool.log_pace import LogPace
from kvpool.peers.back_off import Uniform
from kvpool.peers.circuit_breaker import CircuitBreaker
from kvpool.tiers.peer.pace import Pace

NODES_MAX = 2048
# For so long a node that has brought less than it seemed to have is asked after the others (guess).
DEFERRED_S = 10.0


@dataclass(slots=True)
class NodeRecord:
    """One node. `pulls`: asked for; `failures`: of them, those that brought less than was offered, or no offer. `last_error`:
    why the last of these did. `life`: the one that was asked last. `faults`: of what is logged about it. `deferred`: until then
    others that have the same chunks are asked first."""

    breaker: CircuitBreaker
    pace: Pace
    faults: LogPace
    pulls: int = 0
    failures: int = 0
    read_bytes: int = 0
    last_error: str = ""
    life: bytes = b""
    deferred: Deadline | None = None
    moving: Deadline | None = None  # until then chunks of it have come a moment ago
    unreachable: str = ""  # where its bytes should have come from, while nothing answers there

    def begin_life(self, life: bytes) -> None:
        """It has begun anew: what failed before says nothing about it."""
        self.life = life
        self.breaker.reset()
        self.deferred, self.unreachable, self.last_error = None, "", ""

    @property
    def deferred_s(self) -> float:
        """For how long others are asked first."""
        return 0.0 if self.deferred is None else self.deferred.remaining_s()

    def defer(self, clock: Clock) -> None:
        """It has brought less than it seemed to have."""
        self.deferred = Deadline(DEFERRED_S, clock)

    def fail(self, error: str, *, is_first: bool) -> None:
        """A pull has failed; `is_first`: and had not failed here before, so that it counts."""
        self.failures += is_first
        self.last_error = error


class NodeRecords:
    """See the module."""

    def __init__(self, clock: Clock, random: Uniform) -> None:
        self._clock = clock
        self._random = random
        self._records: OrderedDict[str, NodeRecord] = OrderedDict()

    def __repr__(self) -> str:
        return f"<NodeRecords of {len(self._records)}>"

    def of(self, node: str) -> NodeRecord:
        """The record of a node that is asked now."""
        if node not in self._records:
            if len(self._records) >= NODES_MAX:
                self._records.popitem(last=False)
            breaker = CircuitBreaker(self._clock, self._random)
            self._records[node] = NodeRecord(breaker, Pace(self._clock), LogPace(self._clock))
        self._records.move_to_end(node)
        return self._records[node]

    def find(self, node: str) -> NodeRecord | None:
        """The record of a node, if it was ever asked."""
        return self._records.get(node)

    def is_deferred(self, node: str) -> bool:
        """Whether others are asked before a node."""
        record = self._records.get(node)
        return record is not None and record.deferred_s > 0

    def all(self) -> list[tuple[str, NodeRecord]]:
        """Every record, the node that was asked longest ago first."""
        return list(self._records.items())
