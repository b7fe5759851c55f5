"""Roots of a Pool's key chains, computed once for each domain, salt and adapter.

Any thread. Lock: `_lock` guards changes of the table; entries are read without it.
"""

import threading

from kvpool.keys import root_key
from kvpool.layout import Layout

ROOTS_MAX = 4096


class Roots:
    """A bounded table of roots; a full one is cleared. Invariant: an entry never changes."""

    def __init__(self, model: str, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._lock = threading.Lock()
        self._known: dict[tuple[bytes, bytes, str], tuple[bytes, ...]] = {}  # changed under _lock

    def of(self, domain: bytes, salt: bytes, adapter: str) -> tuple[bytes, ...]:
        """The root of each column, by group and rank; the same object for the same arguments until the table is cleared."""
        wanted = (domain, salt, adapter)
        known = self._known.get(wanted)
        if known is not None:
            return known
        with self._lock:
            roots = tuple(
                root_key(domain, model=self._model, adapter=adapter, salt=salt, layout=part)
                for part in self._layout.parts
            )
            if len(self._known) >= ROOTS_MAX:
                self._known.clear()
            return self._known.setdefault(wanted, roots)
