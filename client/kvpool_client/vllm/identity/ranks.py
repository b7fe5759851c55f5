"""Ranks of an engine: which of them hold the same KV, and what each has of a chunk.

    apart   each rank (or the ranks that hold the same KV) has chunks of its own: shard i of `world`
    joint   all ranks have parts of the same chunks, so that engines of any tensor-parallel size and any stages share them

Immutable; any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.layout import Layout
from kvpool.layouts.share import Share
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

    @property
    def distinct(self) -> int:
        """Ranks of a tensor-parallel group with different heads."""
        return self.tensor // self.replicas

    def share_of(self, rank: int, layout: Layout) -> Share | tuple[Share, ...] | None:
        """What a rank has of a chunk, with groups of each one's; None where its chunks are its own. Requires: a layout for
        which `heads_of_model` came back; of one stage where it has groups."""
        if not self.is_joint:
            return None
        stage, tensor_rank = divmod(rank % self.count, self.tensor)
        shares = [Share.of_rank(part, tensor_rank // self.replicas, self.distinct) for part in layout.group_layouts]
        if layout.groups:
            assert not self.stages
            return tuple(shares)
        if not self.stages:
            return shares[0]
        return Share(sum(self.stages[:stage]), self.stages[stage], shares[0].first_group, shares[0].groups)


def heads_of_model(heads: int, ranks: Ranks, head_groups: int) -> int:
    """KV heads of the whole model, of which a rank has `heads`. Raises Unserved where head groups cannot have equally many, or
    ranks equally many groups."""
    total = heads * ranks.distinct
    if total % head_groups or head_groups % ranks.distinct:
        raise Unserved(
            "uneven_heads",
            f"kvpool.head_groups is {head_groups}, expected a divisor of {total} KV heads and a multiple of {ranks.distinct} "
            "ranks with different heads",
        )
    return total


def stage_layers(stages: Sequence[int], own: int) -> int:
    """Layers of the whole model: those of all stages, or of the one that there is."""
    return sum(stages) if stages else own
