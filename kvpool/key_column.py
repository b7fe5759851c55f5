"""Key column: packed chunk keys, and the only module that slices them.

A column is immutable and has its keys one after the other in one `bytes`, which is what native calls and frames take
(`packed`); a part of it is a column again. Of a request for several ranks the column has the keys of one rank after those of
another. Pure; any thread.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import overload

KEY_BYTES = 32
KEY_DIGITS = 2 * KEY_BYTES  # of a key in hexadecimal
SHOWN_DIGITS = 16  # the first of them, where people read a key
_new = object.__new__


def packed_bytes(keys: int) -> int:
    """Bytes of a column of so many keys."""
    return keys * KEY_BYTES


def keys_in(packed: bytes) -> int:
    """Whole keys in bytes that may be a column."""
    return len(packed) // KEY_BYTES


class KeyColumn(Sequence[bytes]):
    """See the module. Invariant: `packed` is a whole number of keys, and never changes."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        """REQUIRES: whole keys; what comes from outside is checked before (`protocol.columns`)."""
        assert not len(packed) % KEY_BYTES, f"{len(packed)} bytes are no whole keys of {KEY_BYTES}"
        self.packed = packed

    @classmethod
    def of(cls, keys: Iterable[bytes]) -> "KeyColumn":
        """The column of keys that stand alone."""
        return cls(b"".join(keys))

    def __repr__(self) -> str:
        return f"<KeyColumn {len(self)} keys>"

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> "KeyColumn": ...
    def __getitem__(self, index: int | slice) -> "bytes | KeyColumn":
        """A key, or the column of a part. Raises IndexError for a key that is not there."""
        packed = self.packed
        if isinstance(index, slice):
            assert index.step is None, "a part of a column is one piece; see `chosen`"
            first, end = index.start or 0, index.stop
            part = _new(KeyColumn)  # whole keys by construction; places from the end mean the same in bytes
            part.packed = packed[first * KEY_BYTES : len(packed) if end is None else end * KEY_BYTES]
            return part
        start = index * KEY_BYTES
        key = packed[start : start + KEY_BYTES or None]
        if len(key) != KEY_BYTES:
            raise IndexError(f"key {index} of a column of {len(self)}")
        return key

    def __iter__(self) -> Iterator[bytes]:
        packed = self.packed
        return (packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))

    def __eq__(self, other: object) -> bool:
        return self.packed == other.packed if isinstance(other, KeyColumn) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed)

    def parents(self, parent: bytes) -> list[bytes]:
        """The parent of each key of a chain; that of the first one is `parent`."""
        return [parent, *self[:-1]] if self.packed else []

    def before(self, index: int, parent: bytes = b"") -> bytes:
        """The key before one of a chain; before the first it is `parent`."""
        return self[index - 1] if index else parent

    def find_any(self, wanted: Collection[bytes]) -> int:
        """The index of the first key that is one of these; the length where none is."""
        return next((index for index, key in enumerate(self) if key in wanted), len(self))

    def chosen(self, which: Iterable[int]) -> "KeyColumn":
        """The keys at these indexes, in their order."""
        packed = self.packed
        return KeyColumn(b"".join([packed[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in which]))

    def of_rank(self, rank: int, ranks: int) -> "KeyColumn":
        """One rank's keys of a column of as many for each of `ranks`."""
        if ranks == 1:
            return self
        size = len(self.packed) // ranks
        return KeyColumn(self.packed[rank * size : (rank + 1) * size])

    def by_rank(self, ranks: int) -> "list[KeyColumn]":
        """Each rank's keys."""
        return [self.of_rank(rank, ranks) for rank in range(ranks)]

    def part_of_ranks(self, ranks: int, *, first: int, end: int) -> "KeyColumn":
        """The keys from `first` up to `end` of each rank."""
        if ranks == 1:
            return self[first:end]
        return KeyColumn(b"".join(column[first:end].packed for column in self.by_rank(ranks)))

    def parts(self, keys: int) -> "Iterator[KeyColumn]":
        """The column in pieces of at most so many keys."""
        return (self[at : at + keys] for at in range(0, len(self), keys))
