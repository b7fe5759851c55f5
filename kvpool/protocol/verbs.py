"""Verbs: requests that a connection may send, each declared once, at the method that answers it.

    @verb(m.Renew, roles=ENGINE)
    def renew(self, session: EngineSession, request: m.Renew) -> m.Done: ...

Everything else derives from these declarations: the dispatch of requests (`handlers_of`), who may send them, the labels of
their metrics and, checked by tests, the list in docs/protocol.md. Pure; any thread.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvpool.protocol.records import messages as m

ENGINE = frozenset({m.ROLE_ENGINE})
OPERATOR = frozenset({m.ROLE_ADMIN})
EVERYBODY = ENGINE | OPERATOR

_MARK = "_answered_requests"
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Verb:
    """A request's record, the roles whose connections may send it, and the name of the method that answers it."""

    record: type[Any]
    roles: frozenset[str]
    method: str


def verb(*records: type[Any], roles: frozenset[str]) -> Callable[[_Method], _Method]:
    """Declare that a method answers requests of these records, from connections of these roles."""

    def declare(method: _Method) -> _Method:
        setattr(method, _MARK, (records, roles))
        return method

    return declare


def verbs_of(*owners: type[Any]) -> tuple[Verb, ...]:
    """The verbs that classes declare, in the order of their kinds. REQUIRES: none is declared twice."""
    found: dict[int, Verb] = {}
    for owner in owners:
        for name, member in vars(owner).items():
            records, roles = getattr(member, _MARK, ((), frozenset()))
            for record in records:
                assert record.KIND not in found, f"{record.__name__} is declared twice, in {owner.__name__} again"
                found[record.KIND] = Verb(record, roles, name)
    return tuple(found[kind] for kind in sorted(found))


def handlers_of(
    role: str, owners: Iterable[Any], *leading: object
) -> dict[int, tuple[type[Any], Callable[[Any], Any]]]:
    """By kind, the record and the function that answers it, of the verbs of `owners` for a role.

    `leading`: arguments of their methods before the request.
    """
    return {
        each.record.KIND: (each.record, partial(getattr(owner, each.method), *leading))
        for owner in owners
        for each in verbs_of(type(owner))
        if role in each.roles
    }
