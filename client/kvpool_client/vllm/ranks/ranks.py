"""Ranks of an engine: which of them hold the same KV, and what each has of a chunk.

    apart   each rank (or the ranks that hold the same KV) has chunks of its own: shard i of `world`
    joint   all ranks have parts of the same chunks, so that engines of any tensor-parallel size and any stages share them

Immutable; any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool_client.vllm.support import Unserved


@dataclass(frozen=True, slots=True)
class Ranks:
    """`tensor`: ranks of a tensor-parallel group; `replicas`: ranks in a row that hold the same KV, one of which saves;
    `stages`: layers of each pipeline stage, none where there is one alone; `is_joint`: see the module."""

    tensor: int
    replicas: int
    stages: tuple[int, ...]
    is_joint: bool

    @property
    def count(self) -> int:
        """All ranks of the engine."""
        return self.tensor * max(1, len(self.stages))

    @property
    def shards(self) -> int:
        """The `world` of the layout."""
        return 1 if self.is_joint else self.count // self.replicas

    @property
    def tickets(self) -> int:
        """Tickets that a lease needs, each claimed once by every shard, or in a joint engine by every rank."""
        return 1 if self.is_joint else self.replicas

    @property
    def claims(self) -> int | None:
        """How often a ticket is claimed, where it is not once by every shard."""
        return self.count if self.is_joint else None

    def ticket_of(self, rank: int) -> int:
        """Which of a lease's tickets a rank claims."""
        return rank % self.tickets

    def is_writer(self, rank: int) -> bool:
        """Whether a rank saves what it has."""
        return rank % self.replicas == 0

    def shard_of(self, rank: int) -> int:
        """A rank's number in the layout."""
        return 0 if self.is_joint else rank % self.count // self.replicas


def groups_of_heads(total: int, distinct: int, head_groups: int) -> int:
    """Head groups of layers with `total` KV heads, of which `distinct` ranks have different ones; at most one for each head.
    Raises Unserved where groups cannot have equally many heads, or ranks equally many groups."""
    groups = total if head_groups % total == 0 else head_groups
    check_groups(groups, distinct, total, "KV heads")
    return groups


def check_groups(groups: int, distinct: int, count: int, what: str) -> None:
    """Check that groups divide what all ranks have together, and ranks the groups. Raises Unserved."""
    if count % groups or groups % distinct:
        raise Unserved(
            "uneven_heads",
            f"kvpool.head_groups is {groups}, expected a divisor of {count} {what} and a multiple of {distinct} ranks with "
            "different heads",
        )


def layers_of_model(stages: Sequence[int], own: int) -> int:
    """Layers of the whole model: those of all stages, or of the one that there is."""
    return sum(stages) if stages else own
