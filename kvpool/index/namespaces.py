"""Namespaces that engines have opened: model and layout, and the directory's number for each.

A chunk belongs to the namespace of the connection that stored it and is served to no other, whatever key is asked.
Control thread only. Invariant: one number for one (model, layout fingerprint); numbers are never reused.
"""

from dataclasses import dataclass

from kvpool.layout import Layout
from kvpool.types import NamespaceId, SizeClassId

NAMESPACES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Namespace:
    """One rank's chunks of one model in one layout."""

    id: NamespaceId
    size_class: SizeClassId
    model: str
    layout: Layout


class Namespaces:
    """All namespaces of the daemon's life, bounded by NAMESPACES_MAX."""

    def __init__(self) -> None:
        self._by_identity: dict[tuple[str, bytes], Namespace] = {}
        self._by_id: dict[NamespaceId, Namespace] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def find(self, model: str, layout: Layout) -> Namespace | None:
        """The namespace, if an engine has opened it before."""
        return self._by_identity.get((model, layout.fingerprint()))

    def add(self, namespace: Namespace) -> None:
        """Remember a new namespace. The caller has checked `has_room_for` and `find`."""
        identity = (namespace.model, namespace.layout.fingerprint())
        assert identity not in self._by_identity
        assert self.has_room_for(1)
        self._by_identity[identity] = namespace
        self._by_id[namespace.id] = namespace

    def by_id(self, namespace_id: NamespaceId) -> Namespace:
        """The namespace of a number that the directory gave."""
        return self._by_id[namespace_id]

    def has_room_for(self, count: int) -> bool:
        """Whether `count` further namespaces can be opened."""
        return len(self._by_identity) + count <= NAMESPACES_MAX

    def of_model(self, model: str) -> list[Namespace]:
        """Every namespace of a model."""
        return [namespace for namespace in self._by_identity.values() if namespace.model == model]

    def all(self) -> list[Namespace]:
        """Every namespace."""
        return list(self._by_identity.values())
