"""Named keys: those of chunks of one group that are each alone, which an engine names by 32 bytes of its own.

A key is behind the namespace's root what `Pool.keys_from_hashes` makes of that one hash, so that no two namespaces have it.
Pure; any thread.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool.key_column import KEY_BYTES, KeyColumn, keys_in, packed_bytes

Names = npt.NDArray[np.uint8]


class NamedKeys:
    """See the module. `packed`: of one rank after those of another; `group`: whose chunks they are."""

    scope = b""  # no event names an adapter or a salt for them

    def __init__(self, packed: bytes, *, group: int, ranks: int) -> None:
        self.packed = packed
        self.group = group
        self._ranks = ranks

    @classmethod
    def of(cls, names: Names, roots: bytes, group: int) -> "NamedKeys":
        """The keys of names behind the root of each rank. REQUIRES: `check_names`."""
        return cls(kvpool_native.name_keys(roots, names), group=group, ranks=keys_in(roots))

    def __len__(self) -> int:
        return keys_in(self.packed) // self._ranks

    def columns(self) -> tuple[bytes, ...]:
        """The keys by the number of their group, of the first rank; nothing is in the place of others."""
        return (*[b""] * self.group, self.packed[: packed_bytes(len(self))])


def check_names(name: str, given: object) -> None:
    """Check that these are names: only an array of numpy, because native code reads other buffers by strides that some do not
    have. Raises InvalidArgument."""
    found = type(given).__name__
    if isinstance(given, np.ndarray):
        found = f"{given.dtype} {list(given.shape)}"
        if given.dtype == np.uint8 and given.shape[1:] == (KEY_BYTES,):
            if given.flags.c_contiguous:
                return
            found += " with gaps or in another order"
    raise InvalidArgument(f"{name} is {found}, expected a C-contiguous numpy array of uint8 [keys, {KEY_BYTES}]")


def ancestors_first(names: Names, parents: Names) -> Sequence[int]:
    """The chunks of a set in an order that has each behind its parent, where that is in the set: as they are where they stand
    so. Of those with one name the first stays before the others. What goes round in a circle is cut somewhere. Raises
    InvalidArgument for parents that are no names, or not one for each."""
    check_names("parents", parents)
    count = len(names)
    if len(parents) != count:
        raise InvalidArgument(f"parents are {len(parents)}, expected {count}, one for each key")
    places = {key: at for at, key in reversed(list(enumerate(KeyColumn(names.tobytes()))))}
    parent_of = [places.get(key, -1) for key in KeyColumn(parents.tobytes())]
    if all(parent < at for at, parent in enumerate(parent_of)):
        return range(count)
    order: list[int] = []
    is_placed = bytearray(count)
    for first in range(count):
        path, at = [], first
        while at >= 0 and not is_placed[at]:
            is_placed[at] = 1
            path.append(at)
            at = parent_of[at]
        order += reversed(path)
    return order
