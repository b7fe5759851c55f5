"""Namespaces that engines have opened: model and layout, and the directory's number for each.

A chunk belongs to the namespace of the connection that stored it and is served to no other, whatever key is asked.
Control thread only. Invariant: one number for one (model, layout fingerprint); numbers are never reused.
"""

from dataclasses import dataclass
from typing import Protocol

import kvpool_native
from kvpool.errors import LayoutMismatch, Refused
from kvpool.layout import Layout
from kvpool.types import NamespaceId, SizeClassId

NAMESPACES_MAX = 4096
SIZE_CLASSES_MAX = 64  # the native arena's MAX_CLASSES


@dataclass(frozen=True, slots=True)
class Namespace:
    """One rank's chunks of one model in one layout."""

    id: NamespaceId
    size_class: SizeClassId
    model: str
    layout: Layout


class ClassesBelow(Protocol):
    """The size classes of the tier below, by a layout's chunks."""

    def fits(self, layout: Layout) -> bool:
        """Whether such chunks can have a place there. Makes nothing."""

    def of(self, layout: Layout) -> SizeClassId | None:
        """The class of such chunks, made where it is new; None where they do not fit."""


class Namespaces:
    """All namespaces of the daemon's life, bounded by NAMESPACES_MAX.

    Invariants: a namespace has the same number in the directory of every tier; the tier below has classes of those chunks alone
    that DRAM has one of, so that nobody uses them up by asking for what cannot be stored.
    """

    def __init__(self, directory: kvpool_native.Directory) -> None:
        self._directory = directory
        self.below: kvpool_native.Directory | None = None
        self.classes_below: ClassesBelow | None = None
        self._size_classes: dict[tuple[int, int], SizeClassId] = {}
        self._by_identity: dict[tuple[str, bytes], Namespace] = {}
        self._by_id: dict[NamespaceId, Namespace] = {}
        self._of_ranks: dict[tuple[str, Layout], dict[int, Namespace]] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def find(self, model: str, layout: Layout) -> Namespace | None:
        """The namespace, if an engine has opened it before."""
        return self._by_identity.get((model, layout.fingerprint()))

    def open(self, model: str, layout: Layout) -> Namespace:
        """The namespace of a model and one rank's layout, made where it is new. Raises LayoutMismatch or Refused."""
        found = self.find(model, layout)
        if found is not None:
            return found
        if not self.has_room_for(1):
            raise _too_many()
        size_class = self._size_class_of(layout)
        namespace = Namespace(NamespaceId(self._directory.add_namespace()), size_class, model, layout)
        if self.below is not None:
            below = self.below.add_namespace()
            assert below == namespace.id
        self._by_identity[model, layout.fingerprint()] = namespace
        self._by_id[namespace.id] = namespace
        return namespace

    def open_ranks(self, model: str, layout: Layout) -> dict[int, Namespace]:
        """The namespaces of all ranks of a layout, or of none. Raises LayoutMismatch or Refused."""
        known = self._of_ranks.get((model, layout))
        if known is not None:
            return known
        layouts = {rank: layout.for_rank(rank) for rank in layout.ranks}
        if not self.has_room_for(sum(self.find(model, rank_layout) is None for rank_layout in layouts.values())):
            raise _too_many()
        opened = {rank: self.open(model, rank_layout) for rank, rank_layout in layouts.items()}
        if layout.rank is None:  # a thousand ranks take 10 ms, and whoever greets again asks again
            self._of_ranks[model, layout] = opened
        return opened

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

    def _size_class_of(self, layout: Layout) -> SizeClassId:
        geometry = (layout.chunk_bytes, layout.layers)
        if geometry not in self._size_classes:
            if len(self._size_classes) == SIZE_CLASSES_MAX:
                raise Refused(
                    "full",
                    f"this daemon has {SIZE_CLASSES_MAX} chunk sizes already, {layout.chunk_bytes} bytes in "
                    f"{layout.layers} layers is one more: restart it to forget them",
                )
            below = self.classes_below
            try:
                size_class = self._directory.add_class(*geometry, below is None or below.fits(layout))
            except ValueError as error:
                raise LayoutMismatch(f"chunks of {layout.chunk_bytes} bytes cannot be stored: {error}") from error
            if below is not None:
                below.of(layout)
            self._size_classes[geometry] = SizeClassId(size_class)
        return self._size_classes[geometry]


def _too_many() -> Refused:
    return Refused("full", "this daemon knows as many models and layouts as it can: restart it to forget them")
