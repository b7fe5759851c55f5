"""Roots of a Pool's key chains, computed once for each domain, salt and adapter.

Any thread. Lock: `_lock` guards changes of the table; entries are read without it.
"""

import threading

from kvpool.keys import root_key
from kvpool.layout import Layout
from kvpool_client.connection.link import Link

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


class ScopedRoots:
    """The roots of one salt and adapter in the daemon's domain, for which a KeyChain asks whenever its keys are used."""

    __slots__ = ("_adapter", "_known", "_link", "_roots", "_salt")

    def __init__(self, roots: Roots, link: Link, *, salt: bytes, adapter: str) -> None:
        self._roots, self._link, self._salt, self._adapter = roots, link, salt, adapter
        domain = link.domain
        self._known = domain, roots.of(domain, salt, adapter)  # replaced, never changed

    def __call__(self) -> tuple[bytes, ...]:
        """The current ones; the same object while the domain is the same."""
        domain, roots = self._known
        if self._link.domain is not domain:
            domain = self._link.domain
            roots = self._roots.of(domain, self._salt, self._adapter)
            self._known = domain, roots
        return roots
