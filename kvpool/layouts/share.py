"""Share: the part of every chunk that one rank of an engine has: a rectangle of layers and head groups.

    TP 1      all layers, all groups           every engine of a model has chunks of one layout, and one key for each:
    TP 4      all layers, groups / 4           a rank finds the extents of its heads in what an engine of any other size stored
    PP        some layers, all groups

A Share is no part of a layout or of a key. Immutable; any thread.
"""

from dataclasses import dataclass, replace

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every chunk that one rank has: `layers` layers from `first_layer` on, and of each `groups` head groups from
    `first_group` on. `Share.of_rank` has that of a tensor-parallel rank; `connect` takes it, and checks it."""

    first_layer: int
    layers: int
    first_group: int = 0
    groups: int = 1

    @classmethod
    def whole(cls, layout: Layout) -> "Share":
        """All of a chunk."""
        return cls(0, layout.layers, 0, layout.head_groups)

    @classmethod
    def of_rank(cls, layout: Layout, rank: int, size: int) -> "Share":
        """What a rank of a tensor-parallel engine of this size has. Raises InvalidArgument where the groups cannot be divided.

        Where there are fewer groups than ranks, ranks that follow each other have the same group.
        """
        groups = layout.head_groups
        if not 0 <= rank < size:
            raise InvalidArgument(f"rank is {rank} of {size}, expected one from 0 on, below the size")
        if groups % size and size % groups:
            raise InvalidArgument(
                f"rank is {rank} of {size}, expected ranks that {groups} head groups can be divided for"
            )
        count = max(1, groups // size)
        return cls(0, layout.layers, rank * groups // size, count)

    def check(self, layout: Layout) -> None:
        """Check that chunks of the layout have this part. Raises InvalidArgument."""
        _check_range("layers", self.first_layer, self.layers, layout.layers)
        _check_range("groups", self.first_group, self.groups, layout.head_groups)

    @property
    def has_first_extent(self) -> bool:
        """Whether a chunk begins with this part: of the ranks of an engine, one counts the chunks for all of them."""
        return not self.first_layer and not self.first_group

    def is_whole(self, layout: Layout) -> bool:
        """Whether this is all of a chunk's KV."""
        return self == Share.whole(layout)

    def extents(self, layout: Layout) -> tuple[int, ...]:
        """The numbers of its extents in a chunk, in their order."""
        starts = (layer * layout.head_groups + self.first_group for layer in self._layer_range)
        return tuple(start + group for start in starts for group in range(self.groups))

    def of_layout(self, layout: Layout) -> Layout:
        """The geometry of this part alone: what the rank's engine gives and gets. It names no chunks."""
        heads = layout.kv_heads // layout.head_groups * self.groups
        return replace(layout, layers=self.layers, kv_heads=heads, head_groups=self.groups, stages=(), rank=0, world=1)

    @property
    def _layer_range(self) -> range:
        return range(self.first_layer, self.first_layer + self.layers)


def _check_range(name: str, first: int, count: int, most: int) -> None:
    numbers = (first, count)
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise InvalidArgument(f"share of {name} is {numbers!r}, expected integers")
    if first < 0 or count < 1 or first + count > most:
        raise InvalidArgument(f"share is {count} {name} from {first} on, expected some of the layout's {most}")
