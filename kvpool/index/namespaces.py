"""Namespaces that engines have opened: model and layout, and the directory's number for each.

A chunk belongs to the namespace of the connection that stored it and is served to no other, whichever key is requested.

A namespace without chunks that no connection uses is given back when room for others is needed, and so is a size class without
a namespace. Events name a namespace by its number until they are dropped, so a number is reused only when all numbers are used
up, and after `on_numbers_reused` was called.

One user has at most a share of the namespaces that the others leave (see `namespaces_by_user`), so that others can open theirs.

Control thread only, but for `by_id` and `opened`. Invariant: one number for one (model, layout fingerprint) that is known.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from typing import Protocol

import kvpool_native
from kvpool.errors import LayoutMismatch, Refused
from kvpool.ids import NamespaceId, SizeClassId
from kvpool.index.namespaces_by_user import Geometry, NamespacesByUser
from kvpool.layout import Layout

NAMESPACES_MAX = 4096
# Numbers given before one is reused: events and `kvpoolctl why` name the namespaces of removed chunks by them.
NUMBERS_MAX = 4 * NAMESPACES_MAX
SIZE_CLASSES_MAX = 64  # the native arena's MAX_CLASSES
# Namespaces given back in one go: about a millisecond.
GIVEN_BACK_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Namespace:
    """One rank's chunks of one model in one layout."""

    id: NamespaceId
    size_class: SizeClassId
    model: str
    layout: Layout
    extents: int = field(init=False)  # of a chunk

    def __post_init__(self) -> None:
        object.__setattr__(self, "extents", self.layout.extents)  # made once: every save needs it

    @property
    def geometry(self) -> Geometry:
        """Bytes and extents of its chunks, which name its size class."""
        return self.layout.stored_bytes, self.layout.extents


class TierSlots(Protocol):
    """The slots of a tier beside the arena: its directory's namespaces, and its size classes by a layout's chunks."""

    def add_namespace(self, number: NamespaceId) -> None:
        """A namespace is new; numbers come in their order."""

    def is_empty_namespace(self, number: NamespaceId) -> bool:
        """Whether a namespace has no chunks there."""

    def fits(self, layout: Layout) -> bool:
        """Whether such chunks can be stored there. Makes nothing."""

    def size_class_of(self, layout: Layout) -> SizeClassId | None:
        """The class of such chunks, made where it is new; None where they do not fit."""

    def give_back(self, geometry: Geometry) -> None:
        """No namespace has chunks of this geometry: its class serves the next new one."""


class Namespaces:
    """All namespaces that are known, NAMESPACES_MAX at most.

    Invariants: a namespace has the same number in the directory of every tier; a lower tier has classes of those chunks alone
    that DRAM has one of, so that nobody uses them up by asking for what cannot be stored; `_users` counts the connections that
    have joined each namespace; `_by_id` has every number given, `_given_back` the numbers that stand for no namespace any more.
    """

    def __init__(self, directory: kvpool_native.Directory, user_quota: float = 1.0) -> None:
        """`user_quota`: one user's share of the namespaces that the others leave."""
        self._directory = directory
        self._of_users = NamespacesByUser(user_quota)
        self._others: list[tuple[TierSlots, Callable[[Namespace], None]]] = []
        self._lower: list[TierSlots] = []
        self.on_numbers_reused: Callable[[], None] = lambda: None
        self._size_classes: dict[Geometry, SizeClassId] = {}
        self._by_identity: dict[tuple[str, bytes], Namespace] = {}
        self._by_id: dict[NamespaceId, Namespace] = {}
        self._given_back: deque[NamespaceId] = deque()
        self._reusable = 0  # of those, the first ones: no event names them any more
        self._users: Counter[NamespaceId] = Counter()
        self._of_ranks: dict[tuple[str, Layout], dict[int, Namespace]] = {}
        self.opened = 0  # how many were made so far
        self.on_made: Callable[[Namespace], None] = lambda _: None  # it has no chunks yet
        self.on_given_back: Callable[[Namespace], None] = lambda _: None
        self.on_opened: Callable[[], None] = lambda: None  # called after each; must not wait

    def __len__(self) -> int:
        return len(self._by_identity)

    def add_lower(self, slots: TierSlots, on_given_back: Callable[[Namespace], None]) -> None:
        """Have a lower tier know what is opened. `on_given_back`: a namespace without chunks is forgotten."""
        assert not self._by_id
        self._lower.append(slots)
        self._others.append((slots, on_given_back))

    def add_upper(self, slots: TierSlots) -> None:
        """Have a tier above the arena know what is opened."""
        assert not self._by_id
        self._others.append((slots, lambda _: None))

    def find(self, model: str, layout: Layout) -> Namespace | None:
        """The namespace, if it is known."""
        return self._by_identity.get((model, layout.fingerprint()))

    def open(self, model: str, layout: Layout) -> Namespace:
        """The namespace of a model and one rank's layout, made where it is new. Raises LayoutMismatch or Refused."""
        found = self.find(model, layout)
        if found is not None:
            return found
        if not self.has_room_for(1):
            raise _too_many()
        size_class = self._size_class_of(layout)
        namespace = Namespace(self._new_number(), size_class, model, layout)
        self._by_identity[model, layout.fingerprint()] = namespace
        self._by_id[namespace.id] = namespace
        self._directory.set_chunk_tokens(namespace.id, layout.chunk_tokens)
        self.opened += 1
        self.on_made(namespace)
        self.on_opened()
        return namespace

    def open_ranks(self, model: str, layout: Layout, user: int | None = None) -> dict[int, Namespace]:
        """The namespaces of all ranks of a layout. `user`: whose share they count for, if anybody's.

        Raises LayoutMismatch or Refused, and has then made none, or some that nobody uses.
        """
        if user is not None and self._of_users.is_bounding:
            self._check_share(user, model, layout)
            self._check_class_share(user, _geometries_of(layout))
        known = self._of_ranks.get((model, layout))
        if known is not None:
            return known
        layouts = {rank: layout.for_rank(rank) for rank in layout.ranks}
        if not self.has_room_for(sum(self.find(model, rank_layout) is None for rank_layout in layouts.values())):
            raise _too_many()
        opened: dict[int, Namespace] = {}
        try:
            for rank, rank_layout in layouts.items():
                opened[rank] = self.open(model, rank_layout)
                # In use, so that it is not given back for the next stage's chunks.
                self.join([opened[rank]])
        finally:
            self.leave(opened.values())
        if layout.rank is None:  # a thousand ranks take 10 ms, and every new connection needs them again
            self._of_ranks[model, layout] = opened
        return opened

    def open_groups(self, model: str, layout: Layout, user: int | None = None) -> list[dict[int, Namespace]]:
        """The namespaces of each group of a layout, by rank; see `open_ranks`."""
        opened: list[dict[int, Namespace]] = []
        try:
            for index in range(max(1, len(layout.groups))):
                opened.append(self.open_ranks(model, layout.of_group(index), user))
                # In use, so that they are not given back for the next group's, and count for the user.
                self.join(opened[-1].values(), user)
        finally:
            for namespaces in opened:
                self.leave(namespaces.values(), user)
        return opened

    def join(self, namespaces: Collection[Namespace], user: int | None = None) -> None:
        """Join: a connection uses these from now on, and they count for its user's share, if it has one."""
        self._users.update(namespace.id for namespace in namespaces)
        if user is not None:
            self._of_users.join(user, namespaces)

    def leave(self, namespaces: Collection[Namespace], user: int | None = None) -> None:
        """A connection that has joined these has ended."""
        if user is not None:
            self._of_users.leave(user, namespaces)
        for namespace in namespaces:
            self._users[namespace.id] -= 1
            if not self._users[namespace.id]:
                del self._users[namespace.id]

    def by_id(self, namespace_id: NamespaceId) -> Namespace:
        """The namespace of a number that the directory gave, given back or not. Any thread, where the number is not reused
        meanwhile."""
        return self._by_id[namespace_id]

    def place_of(self, number: int) -> dict[str, str]:
        """The model of a namespace, and the role of its group where it is one's, for people."""
        found = self.by_id(NamespaceId(number))
        role = found.layout.group
        return {"model": found.model} if role is None else {"model": found.model, "group": str(role)}

    def has_room_for(self, count: int) -> bool:
        """Whether `count` further namespaces can be opened. Gives back what is needed for them."""
        while len(self._by_identity) + count > NAMESPACES_MAX:
            if count > NAMESPACES_MAX or not self._give_back_some():
                return False
        return True

    def of_model(self, model: str) -> list[Namespace]:
        """Every known namespace of a model."""
        return [namespace for namespace in self._by_identity.values() if namespace.model == model]

    def all(self) -> list[Namespace]:
        """Every known namespace."""
        return list(self._by_identity.values())

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        known = {namespace.id for namespace in self._by_identity.values()}
        problems = []
        if known | set(self._given_back) != set(self._by_id) or known & set(self._given_back):
            problems.append("namespaces: a number is neither known nor given back, or both")
        if not set(self._users) <= known:
            problems.append("namespaces: a connection uses one that was given back")
        if any(self._size_classes.get(namespace.geometry) != namespace.size_class for namespace in self.all()):
            problems.append("namespaces: one has another size class than its geometry")
        if not self._of_users.owned <= known:
            problems.append("namespaces: a user owns one that was given back")
        return problems + self._of_users.verify(self._users)

    def _check_share(self, user: int, model: str, layout: Layout) -> None:
        """Check that the user may open a layout's namespaces too. Gives back what is needed for them. Raises Refused."""
        while True:
            own = self._of_users.namespaces_of(user)
            if self._of_users.may_keep(
                len(own) + len(layout.ranks), most=NAMESPACES_MAX, of_others=len(self._by_identity)
            ):
                return  # whichever of them it has already
            found = [self.find(model, layout.for_rank(rank)) for rank in layout.ranks]
            new = [one for one in found if one is None or one.id not in own]
            of_others = len(self._by_identity) - len(own) - sum(one is not None for one in new)
            if not new or self._of_users.may_keep(len(own) + len(new), most=NAMESPACES_MAX, of_others=of_others):
                return
            if not self._give_back_some():
                raise self._of_users.refusal(
                    user, "models, layouts and ranks", kept=len(own), most=NAMESPACES_MAX, of_others=of_others
                )

    def _check_class_share(self, user: int, geometries: Set[Geometry]) -> None:
        """Check that the user may open chunks of these sizes too. Raises Refused."""
        while True:
            own = self._of_users.geometries_of(user)
            wanted = len(own | geometries)
            of_others = self._size_classes.keys() - own - geometries
            if wanted == len(own) or self._of_users.may_keep(wanted, most=SIZE_CLASSES_MAX, of_others=len(of_others)):
                return
            of_others &= {namespace.geometry for namespace in self._by_identity.values()}
            if self._of_users.may_keep(wanted, most=SIZE_CLASSES_MAX, of_others=len(of_others)):
                return
            if not self._give_back_some():
                raise self._of_users.refusal(
                    user, "chunk sizes", kept=len(own), most=SIZE_CLASSES_MAX, of_others=len(of_others)
                )

    def _new_number(self) -> NamespaceId:
        if len(self._by_id) < NUMBERS_MAX:
            number = NamespaceId(self._directory.add_namespace())
            for slots, _ in self._others:
                slots.add_namespace(number)
            return number
        if not self._reusable:
            self.on_numbers_reused()
            self._reusable = len(self._given_back)
        self._reusable -= 1
        return self._given_back.popleft()

    def _give_back_some(self) -> bool:
        """Drop namespaces without chunks and connections, GIVEN_BACK_AT_ONCE at most. Whether there were any."""
        unused = [namespace for namespace in self._by_identity.values() if self._is_unused(namespace)]
        for namespace in unused[:GIVEN_BACK_AT_ONCE]:
            del self._by_identity[namespace.model, namespace.layout.fingerprint()]
            self._given_back.append(namespace.id)
            self._of_users.give_back(namespace.id)
            self.on_given_back(namespace)
            for _, on_given_back in self._others:
                on_given_back(namespace)
        if unused:
            self._of_ranks.clear()
        return bool(unused)

    def _is_unused(self, namespace: Namespace) -> bool:
        return (
            namespace.id not in self._users
            and self._directory.is_empty_namespace(namespace.id)
            and all(slots.is_empty_namespace(namespace.id) for slots, _ in self._others)
        )

    def _size_class_of(self, layout: Layout) -> SizeClassId:
        geometry = (layout.stored_bytes, layout.extents)
        if geometry not in self._size_classes:
            instead = self._unused_class() if len(self._size_classes) == SIZE_CLASSES_MAX else None
            fits_below = not self._lower or any(slots.fits(layout) for slots in self._lower)
            try:
                size_class = self._directory.add_class(*geometry, fits_below, None if instead is None else instead[1])
            except ValueError as error:
                raise LayoutMismatch(f"chunks of {layout.stored_bytes} bytes cannot be stored: {error}") from error
            for slots, _ in self._others:
                if instead is not None:
                    slots.give_back(instead[0])
                slots.size_class_of(layout)
            if instead is not None:
                del self._size_classes[instead[0]]
            self._size_classes[geometry] = SizeClassId(size_class)
        return self._size_classes[geometry]

    def _unused_class(self) -> tuple[Geometry, SizeClassId]:
        """A size class of no namespace, which then becomes another one. Raises Refused where each has one that is in use."""
        while True:
            used = {namespace.geometry for namespace in self._by_identity.values()}
            for geometry, size_class in self._size_classes.items():
                if geometry not in used:
                    return geometry, size_class
            if not self._give_back_some():
                raise Refused(
                    "full",
                    f"this daemon has chunks of {SIZE_CLASSES_MAX} sizes, as many as there may be: drop those of a model that "
                    "is no longer served (kvpoolctl flush --model MODEL), or end idle connections that hold one "
                    "(kvpoolctl connections)",
                )


def _geometries_of(layout: Layout) -> set[Geometry]:
    """The sizes of chunks that the ranks of a layout have: one for each length of a stage."""
    one_of_each = [layout.for_rank(rank) for rank in layout.ranks] if layout.stages else [layout]
    return {(each.stored_bytes, each.extents) for each in one_of_each}


def _too_many() -> Refused:
    return Refused(
        "full",
        f"this daemon has chunks of {NAMESPACES_MAX} models, layouts and ranks, as many as there may be: drop those of a model "
        "that is no longer served (kvpoolctl flush --model MODEL), or end idle connections that hold one "
        "(kvpoolctl connections)",
    )
