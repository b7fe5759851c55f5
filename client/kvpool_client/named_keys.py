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
        """The keys of names [keys, 32] behind the root of each rank. Raises InvalidArgument."""
        try:
            packed = kvpool_native.name_keys(roots, names)
        except TypeError as error:
            raise wrong_names("keys", names) from error
        return cls(packed, group=group, ranks=keys_in(roots))

    def __len__(self) -> int:
        return keys_in(self.packed) // self._ranks

    def columns(self) -> tuple[bytes, ...]:
        """The keys by the number of their group, of the first rank; nothing is in the place of others."""
        return (*[b""] * self.group, self.packed[: packed_bytes(len(self))])


def wrong_names(name: str, given: object) -> InvalidArgument:
    """What is wrong with what is no C-contiguous array of names."""
    found = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else type(given).__name__
    if isinstance(given, np.ndarray) and given.dtype == np.uint8 and given.shape[1:] == (KEY_BYTES,):
        found += " with gaps or in another order"
    return InvalidArgument(f"{name} is {found}, expected a C-contiguous array of uint8 [keys, {KEY_BYTES}]")


def ancestors_first(names: Names, parents: Names) -> Sequence[int] | None:
    """The chunks of a set in an order that has each behind its parent, where that is in the set; None where they stand so.
    What goes round in a circle is cut somewhere. Raises InvalidArgument for parents that are no names."""
    is_right = isinstance(parents, np.ndarray) and parents.dtype == np.uint8 and parents.shape == names.shape
    if not is_right or not parents.flags.c_contiguous:
        raise wrong_names("parents", parents)
    count = len(names)
    places = {key: at for at, key in reversed(list(enumerate(KeyColumn(names.tobytes()))))}
    parent_of = [places.get(key, -1) for key in KeyColumn(parents.tobytes())]
    if all(parent < at for at, parent in enumerate(parent_of)):
        return None
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
