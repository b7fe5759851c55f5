"""Due prefixes: leased prefixes of which more is to be copied, the oldest first.

A prefix that is due already is not added again: a client may lease one chain a thousand times. Beyond DUE_MAX prefixes or
DUE_CHUNKS_MAX chunks the oldest is left out, which only means that it is not copied. Control thread only. Invariant: `_chunks`
counts the chunks of all prefixes here.
"""

from collections import OrderedDict

from kvpool.ids import NamespaceId
from kvpool.tiering.copies.placement import LeasedPrefix

# Guesses: more than the leases of a second, and keys of two megabytes.
DUE_MAX = 1024
DUE_CHUNKS_MAX = 65_536


class DuePrefixes:
    """See the module. `left_out`: prefixes that were not copied for lack of room here."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[tuple[NamespaceId, bytes], LeasedPrefix] = OrderedDict()
        self._chunks = 0
        self.left_out = 0

    def __repr__(self) -> str:
        return f"<DuePrefixes {len(self)} of {self._chunks} chunks>"

    def __len__(self) -> int:
        return len(self._prefixes)

    def add_prefix(self, prefix: LeasedPrefix, *, is_next: bool = False) -> None:
        """Add a prefix behind the others, or before them."""
        name = _name_of(prefix)
        if name in self._prefixes:
            return
        self._prefixes[name] = prefix
        self._chunks += len(prefix.keys)
        if is_next:
            self._prefixes.move_to_end(name, last=False)
        while len(self) > 1 and (len(self) > DUE_MAX or self._chunks > DUE_CHUNKS_MAX):
            self.take_prefix()
            self.left_out += 1

    def take_prefix(self) -> LeasedPrefix:
        """The next prefix, which is here no more. REQUIRES: there is one."""
        _, prefix = self._prefixes.popitem(last=False)
        self._chunks -= len(prefix.keys)
        return prefix

    def clear(self) -> None:
        """Forget all."""
        self._prefixes.clear()
        self._chunks = 0


def _name_of(prefix: LeasedPrefix) -> tuple[NamespaceId, bytes]:
    return prefix.namespace.id, prefix.keys[-1]
