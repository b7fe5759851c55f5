"""Namespaces and size classes by user: those that a user's connections use, each once, and those of its stored chunks.

A user is a uid by the kernel. A user may have `share` of what the others leave, and always one. A user that joins a namespace
without an owner owns it until it is given back: stored chunks retain it when the last connection has ended, and count for its
owner. A connection that counts for no user (an operator's) is not bound, and its namespaces count as others'; so do those that
a restart has restored.

Control thread only. Invariants: `_namespaces` counts a user's connections by namespace, `_geometries` the namespaces
among these by size class; a user without any is in neither. `_owned` has each owned namespace once, under its owner.
"""

from collections import Counter
from collections.abc import Iterable, Set
from typing import Protocol

from kvpool.errors import Refused
from kvpool.ids import NamespaceId

Geometry = tuple[int, int]  # a chunk's bytes and extents


class OpenNamespace(Protocol):
    """A namespace that connections have open."""

    @property
    def id(self) -> NamespaceId:
        """Its number."""

    @property
    def geometry(self) -> Geometry:
        """The geometry of its size class."""


class NamespacesByUser:
    """Namespaces of each user of one daemon."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._namespaces: dict[int, Counter[NamespaceId]] = {}
        self._geometries: dict[int, Counter[Geometry]] = {}
        self._owner: dict[NamespaceId, int] = {}
        self._owned: dict[int, dict[NamespaceId, Geometry]] = {}

    def __repr__(self) -> str:
        return f"<NamespacesByUser {len(self._namespaces)} users>"

    def join(self, user: int, opened: Iterable[OpenNamespace]) -> None:
        """A connection of this user has these open from now on."""
        namespaces = self._namespaces.setdefault(user, Counter())
        geometries = self._geometries.setdefault(user, Counter())
        for one in opened:
            geometries[one.geometry] += not namespaces[one.id]
            namespaces[one.id] += 1
            if self._owner.setdefault(one.id, user) == user:
                self._owned.setdefault(user, {})[one.id] = one.geometry

    def leave(self, user: int, opened: Iterable[OpenNamespace]) -> None:
        """A connection of this user that has joined these has ended."""
        namespaces, geometries = self._namespaces[user], self._geometries[user]
        for one in opened:
            namespaces[one.id] -= 1
            if not namespaces[one.id]:
                del namespaces[one.id]
                geometries[one.geometry] -= 1
                if not geometries[one.geometry]:
                    del geometries[one.geometry]
        if not namespaces:
            del self._namespaces[user], self._geometries[user]

    def give_back(self, namespace: NamespaceId) -> None:
        """Remove a namespace, which no connection has open."""
        user = self._owner.pop(namespace, None)
        if user is not None:
            del self._owned[user][namespace]
            if not self._owned[user]:
                del self._owned[user]

    @property
    def is_bounding(self) -> bool:
        """Whether a user may have less than all of it."""
        return self._share < 1.0

    def namespaces_of(self, user: int) -> Set[NamespaceId]:
        """The user's namespaces."""
        return self._namespaces.get(user, {}).keys() | self._owned.get(user, {}).keys()

    def geometries_of(self, user: int) -> Set[Geometry]:
        """Size classes of the user's namespaces."""
        return self._geometries.get(user, {}).keys() | set(self._owned.get(user, {}).values())

    @property
    def owned(self) -> Set[NamespaceId]:
        """All namespaces with an owner."""
        return self._owner.keys()

    def may_keep(self, wanted: int, *, most: int, of_others: int) -> bool:
        """Whether a user may have so many open while `of_others` of `most` are others'."""
        return wanted <= self._limit(most=most, of_others=of_others)

    def refusal(self, user: int, what: str, *, kept: int, most: int, of_others: int) -> Refused:
        """The refusal for a user that has `kept` open and requests more. `what` is counted, in the plural."""
        limit = self._limit(most=most, of_others=of_others)
        return Refused(
            "full",
            f"uid {user} keeps {what} by its connections and its chunks, {kept} of {most}, and may keep "
            f"{limit} now (server.user_quota is {self._share:g}): end idle connections that hold one "
            "(kvpoolctl connections, kvpoolctl disconnect ID), or drop chunks of models that are no longer served "
            "(kvpoolctl flush --model MODEL)",
        )

    def verify(self, users: "Counter[NamespaceId]") -> list[str]:
        """Broken invariants, one line each. `users`: how many connections use each namespace."""
        counted: Counter[NamespaceId] = Counter()
        for namespaces in self._namespaces.values():
            counted.update(namespaces)
        problems = ["namespaces: users have joined one more often than connections"] if counted - users else []
        for user, namespaces in self._namespaces.items():
            if sum(self._geometries[user].values()) != len(namespaces):
                problems.append(f"namespaces: size classes of uid {user} are not those of its namespaces")
        owners = {namespace: user for user, owned in self._owned.items() for namespace in owned}
        if owners != self._owner or not all(self._owned.values()):
            problems.append("namespaces: owners and what they own are not the same")
        return problems

    def _limit(self, *, most: int, of_others: int) -> int:
        return max(1, int(self._share * (most - of_others)))
