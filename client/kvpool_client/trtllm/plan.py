"""Plan of a step, from the scheduler half to the worker halves; records of plain values that the engine broadcasts.

Nothing here acts. Tokens travel as packed int32, block ids and slots as tuples, one for each layer group: an engine whose
layers are not divided has one.
"""

from dataclasses import dataclass, replace

NO_BLOCK = -1


# By layer group: of each a number for every chunk.
ByGroup = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy staged chunks `slots` into the engine's blocks `block_ids`. `sequence` rises by one from order to order."""

    sequence: int
    slots: ByGroup
    block_ids: ByGroup


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save chunks `first_chunk` up to `end` of the prompt `tokens` from `block_ids`, once this step's layers have run.

    `priorities`: the engine's priority of each of these chunks. `windows`: of each layer group with a window the chunks to
    save, before the step's end; its pages may be the engine's again in the next step. Of full groups, which save all of the
    order's chunks, they are empty.
    """

    request_id: int
    tokens: bytes
    salt: bytes
    adapter: str
    first_chunk: int
    end: int
    block_ids: ByGroup
    priorities: tuple[int, ...]
    windows: ByGroup

    def followed_by(self, later: "SaveOrder") -> "SaveOrder":
        """One order for both; `later` is of the same request and begins where this one ends."""
        assert later.first_chunk == self.end
        assert len(later.block_ids) == len(self.block_ids)
        return replace(
            later,
            first_chunk=self.first_chunk,
            block_ids=_joined(self.block_ids, later.block_ids),
            priorities=self.priorities + later.priorities,
            windows=_joined(self.windows, later.windows),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `board` and `staging` name shared memory (`staging` is empty until all ranks have posted their geometry).

    `staging_slots`: of each layer group. `dropped`: requests whose blocks belong to others from this step on; their saves must
    have ended before it begins.
    """

    board: str
    staging: str
    staging_bytes: int
    staging_slots: tuple[int, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    dropped: tuple[int, ...] = ()


def _joined(first: ByGroup, second: ByGroup) -> ByGroup:
    return tuple(one + other for one, other in zip(first, second, strict=True))
