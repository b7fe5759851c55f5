"""Verbs: one declaration is all that a new one needs to be dispatched, bounded to its roles, and measured."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from kvpool.clock import MonotonicClock
from kvpool.pool.chains import Chains
from kvpool.pool.device_copies import DeviceCopies
from kvpool.pool.hint_handlers import HintHandlers
from kvpool.pool.lease_verbs import LeaseVerbs
from kvpool.pool.pool import Pool
from kvpool.pool.sharing.seeking import Seeking
from kvpool.pool.writers.staged_saves import StagedSaves
from kvpool.protocol.records import messages as m
from kvpool.protocol.verbs import ENGINE, EVERYBODY, OPERATOR, handlers_of, verb, verbs_of
from kvpool.server.connections.requests import ConnectionVerbs
from kvpool.server.metrics.request_times import RequestTimes
from kvpool.server.peers.peer_list import PeerVerbs
from kvpool.server.service import VERBS, OperatorVerbs, engine_handlers, operator_handlers
from kvpool.server.steering import SteeringVerbs


@dataclass(frozen=True, slots=True)
class Pin:
    """A request of an engine that no daemon has."""

    KIND: ClassVar[int] = 9001
    key: bytes


@dataclass(frozen=True, slots=True)
class AskPins:
    """A request of everybody that no daemon has."""

    KIND: ClassVar[int] = 9002


class Pins:
    """A class as a new verb's would be."""

    def __init__(self) -> None:
        self.pinned: list[tuple[str, bytes]] = []

    @verb(Pin, roles=ENGINE)
    def pin(self, session: str, request: Pin) -> m.Done:
        self.pinned.append((session, request.key))
        return m.Done()


class Asking:
    @verb(AskPins, roles=EVERYBODY)
    def pins(self, _request: AskPins) -> m.Report:
        return m.Report({"pins": 1})


def test_a_declared_verb_is_dispatched() -> None:
    pins = Pins()
    record, answer = handlers_of(m.ROLE_ENGINE, [pins], "session 1")[Pin.KIND]
    assert (record, answer(Pin(b"k"))) == (Pin, m.Done())
    assert pins.pinned == [("session 1", b"k")]


def test_a_role_that_is_not_named_has_no_handler() -> None:
    assert handlers_of(m.ROLE_ADMIN, [Pins()]) == {}
    for role in (m.ROLE_ENGINE, m.ROLE_ADMIN):
        assert handlers_of(role, [Asking()])[AskPins.KIND][1](AskPins()) == m.Report({"pins": 1})


def test_a_declared_verb_is_measured_under_its_name() -> None:
    times = RequestTimes(verbs_of(Pins, Asking))
    times.add_time(Pin.KIND, 5000)
    assert {name: sum(verb.counts) for name, verb in times.verbs().items()} == {"pin": 1, "ask_pins": 0}


def test_a_verb_declared_twice_is_refused() -> None:
    class Again:
        @verb(Pin, roles=OPERATOR)
        def other(self, request: Pin) -> m.Done:
            return m.Done()

    with pytest.raises(AssertionError, match="Pin is declared twice, in Again again"):
        verbs_of(Pins, Again)


def test_every_verb_of_the_daemon_has_its_handler() -> None:
    """Classes alone: nothing is called."""
    parts = {"chains": Chains, "leases": LeaseVerbs, "hints": HintHandlers, "staged": StagedSaves}
    parts["device_copies"] = DeviceCopies
    sharing = SimpleNamespace(seeking=object.__new__(Seeking))
    pool = cast(Pool, SimpleNamespace(sharing=sharing, **{name: object.__new__(part) for name, part in parts.items()}))
    served = {
        m.ROLE_ENGINE: engine_handlers(pool, cast(Any, None), user=None, clock=MonotonicClock()),
        m.ROLE_ADMIN: operator_handlers(
            pool,
            object.__new__(OperatorVerbs),
            object.__new__(SteeringVerbs),
            object.__new__(ConnectionVerbs),
            object.__new__(PeerVerbs),
        ),
    }
    for role, handlers in served.items():
        expected = {each.record.KIND: each.record for each in VERBS if role in each.roles}
        assert {kind: record for kind, (record, _) in handlers.items()} == expected
