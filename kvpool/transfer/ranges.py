"""Ranges of a buffer, taken and given back: first fit, in whole pages. One thread.

Invariant: `_free` has the free ranges in order of their offsets, none beside another, and `taken_bytes` with their sizes is the
size of the buffer.
"""

from kvpool.ids import PAGE_BYTES


class Ranges:
    """See the module. The buffer is `size` bytes from `first` on."""

    def __init__(self, first: int, size: int) -> None:
        assert size % PAGE_BYTES == 0
        self._free = [(first, size)]
        self._size = size
        self.taken_bytes = 0

    def __repr__(self) -> str:
        return f"<Ranges {self.taken_bytes} of {self._size} bytes taken>"

    def fits(self, size: int) -> bool:
        """Whether so many bytes could be taken from an empty buffer."""
        return _whole_pages(size) <= self._size

    def take_range(self, size: int) -> int | None:
        """The offset of so many bytes; None where no free range is long enough."""
        size = _whole_pages(size)
        for number, (offset, length) in enumerate(self._free):
            if length >= size:
                self._free[number : number + 1] = [(offset + size, length - size)] if length > size else []
                self.taken_bytes += size
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Give back what `take` answered for this size."""
        size = _whole_pages(size)
        self.taken_bytes -= size
        assert self.taken_bytes >= 0
        joined: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (offset, size)]):
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                assert not joined or sum(joined[-1]) < begin, "a range was given back twice"
                joined.append((begin, length))
        self._free = joined


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
