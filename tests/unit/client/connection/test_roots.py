"""Roots of key chains follow the daemon's domain."""

from types import SimpleNamespace
from typing import Any, cast

from kvpool.keys import root_key
from kvpool_client.connection.roots import Roots, ScopedRoots
from tests.rigs.layouts import HYBRID

MODEL = "m@1"


def expected(domain: bytes, salt: bytes, adapter: str) -> tuple[bytes, ...]:
    return tuple(root_key(domain, model=MODEL, adapter=adapter, salt=salt, layout=part) for part in HYBRID.parts)


def test_the_roots_of_a_scope_are_those_of_the_domain_that_the_link_has_seen_last() -> None:
    link = SimpleNamespace(domain=b"first")
    roots = Roots(MODEL, HYBRID)
    scoped = ScopedRoots(roots, cast(Any, link), salt=b"tenant", adapter="lora")
    first = scoped()
    assert first == expected(b"first", b"tenant", "lora")
    assert scoped() is first
    link.domain = b"second"
    assert scoped() == expected(b"second", b"tenant", "lora")
    link.domain = b"first"
    assert scoped() is first, "the table has them"


def test_scopes_of_one_table_have_roots_of_their_own() -> None:
    link, roots = SimpleNamespace(domain=b"domain"), Roots(MODEL, HYBRID)
    scopes = [(b"", ""), (b"tenant", ""), (b"", "lora")]
    scoped = [ScopedRoots(roots, cast(Any, link), salt=salt, adapter=adapter) for salt, adapter in scopes]
    assert [of_scope() for of_scope in scoped] == [expected(b"domain", salt, adapter) for salt, adapter in scopes]
