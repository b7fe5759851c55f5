"""Leases and tickets: who holds what, for how long, and which holds end with them."""

import random

import pytest

from kvpool.ids import TICKET_BYTES, ConnectionId, HoldId
from kvpool.index import leases as module
from kvpool.index.leases import Leases

TTL_NS = 1000
ANN, BOB = ConnectionId(1), ConnectionId(2)
IDENTITY = ("model", b"layout")


def _holds(*numbers: int) -> dict[int, list[HoldId]]:
    return {rank: [HoldId(number)] for rank, number in enumerate(numbers)}


def test_a_lease_belongs_to_its_owner_alone() -> None:
    leases = Leases(TTL_NS)
    lease = leases.grant(ANN, 3, _holds(7), now_ns=0)
    found = leases.find(lease.id, ANN)
    assert found is not None
    assert (found.id, found.holds) == (lease.id, {0: [7]})
    assert leases.find(lease.id, BOB) is None
    for number in (0, -1, lease.id + 1, 2**64, -(2**70)):
        assert leases.find(number, ANN) is None
    assert not leases.renew(lease.id, BOB, now_ns=1)
    assert leases.table.end_lease(lease.id, BOB) == []
    assert (len(leases), leases.count_of(ANN), leases.count_of(BOB)) == (1, 1, 0)


def test_a_lease_ends_at_its_deadline_and_not_before() -> None:
    leases = Leases(TTL_NS)
    leases.grant(ANN, 1, _holds(7), now_ns=5)
    assert leases.expire(TTL_NS + 4) == []
    assert leases.expire(TTL_NS + 5) == [7]
    assert leases.expire(TTL_NS + 5) == []


@pytest.mark.parametrize("how", ["drop", "expire", "tickets"])
def test_large_leases_are_ended_in_bounded_parts(how: str) -> None:
    leases = Leases(TTL_NS)
    for number in range(3 * module.ENDED_AT_ONCE // 1000):
        if how == "tickets":
            leases.issue_ticket(IDENTITY, ANN, 1000, _holds(number), now_ns=0)
        else:
            leases.grant(ANN, 1000, _holds(number), now_ns=0)
    parts = [leases.drop_owner(ANN) if how == "drop" else leases.expire(TTL_NS)]
    while leases.has_backlog:
        assert leases.verify() == []
        parts.append(leases.expire(0 if how == "drop" else TTL_NS))
    assert len(parts) >= 3
    assert all(1000 * len(part) <= module.ENDED_AT_ONCE + 1000 for part in parts)
    assert sorted(hold for part in parts for hold in part) == list(range(3 * module.ENDED_AT_ONCE // 1000))
    assert (len(leases), leases.tickets, leases.hold_count()) == (0, 0, 0)


def test_connections_that_leave_together_are_ended_one_after_the_other() -> None:
    leases = Leases(TTL_NS)
    for owner in (ANN, BOB):
        leases.grant(owner, module.ENDED_AT_ONCE, _holds(owner), now_ns=0)
        leases.grant(owner, 1, _holds(10 + owner), now_ns=0)
    back = leases.drop_owner(ANN) + leases.drop_owner(BOB)
    while leases.has_backlog:
        back += leases.expire(0)
    assert sorted(back) == [1, 2, 11, 12]
    assert leases.expired_leases == 0


def test_a_ticket_is_claimed_by_each_rank_once() -> None:
    leases = Leases(TTL_NS)
    ticket = leases.issue_ticket(IDENTITY, ANN, 4, _holds(10, 11), now_ns=0)
    assert len(ticket) == TICKET_BYTES
    entry = leases.find_ticket(ticket)
    assert entry is not None
    assert (entry.identity, entry.chunks) == (IDENTITY, 4)
    assert leases.take_from_ticket(ticket, 1) == [11]
    assert (leases.tickets, leases.hold_count()) == (1, 1)
    with pytest.raises(KeyError):
        leases.take_from_ticket(ticket, 1)
    assert leases.take_from_ticket(ticket, 0) == [10]
    assert leases.find_ticket(ticket) is None
    assert leases.tickets == 0


def test_a_returned_ticket_holds_nothing() -> None:
    leases = Leases(TTL_NS)
    ticket = leases.issue_ticket(IDENTITY, ANN, 4, _holds(10, 11), now_ns=0)
    leases.take_from_ticket(ticket, 0)
    assert leases.end_ticket(ticket) == [11]
    assert (leases.tickets, leases.hold_count(), leases.find_ticket(ticket)) == (0, 0, None)
    assert leases.verify() == []


def test_a_ticket_outlives_every_connection_until_its_deadline() -> None:
    leases = Leases(TTL_NS)
    ticket = leases.issue_ticket(IDENTITY, ANN, 4, _holds(10, 11), now_ns=0)
    leases.drop_owner(ANN)
    leases.take_from_ticket(ticket, 0)
    assert leases.expire(TTL_NS - 1) == []
    assert leases.expire(TTL_NS) == [11]
    assert leases.find_ticket(ticket) is None


def test_one_issuer_cannot_take_all_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICKETS_MAX", 8)
    leases = Leases(TTL_NS)
    issued = 0
    while leases.has_room_for_tickets(ANN, 1):
        leases.issue_ticket(IDENTITY, ANN, 1, _holds(100 + issued), now_ns=0)
        issued += 1
    assert issued == 4
    ticket = leases.issue_ticket(IDENTITY, BOB, 1, _holds(200), now_ns=0)
    assert leases.verify() == []
    leases.take_from_ticket(ticket, 0)
    leases.expire(TTL_NS)
    assert leases.verify() == []
    assert leases.has_room_for_tickets(ANN, 1)


def test_tickets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICKETS_MAX", 3)
    leases = Leases(TTL_NS)
    first = leases.issue_ticket(IDENTITY, ANN, 1, _holds(1), now_ns=0)
    leases.issue_ticket(IDENTITY, BOB, 1, _holds(2), now_ns=0)
    assert not leases.has_room_for_tickets(ConnectionId(3), 1)
    leases.take_from_ticket(first, 0)
    assert leases.has_room_for_tickets(ConnectionId(3), 1)


def test_what_a_connection_holds_is_bounded_tickets_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_CHUNKS_MAX", 10)
    leases = Leases(TTL_NS)
    leases.grant(ANN, 3, _holds(1, 2), now_ns=0)
    assert leases.has_room_for(ANN)
    ticket = leases.issue_ticket(IDENTITY, ANN, 4, _holds(3), now_ns=0)
    assert not leases.has_room_for(ANN)
    assert not leases.has_room_for_tickets(ANN, 1)
    assert leases.has_room_for(BOB)
    leases.take_from_ticket(ticket, 0)
    assert leases.has_room_for(ANN)
    assert leases.verify() == []


def test_what_tickets_hold_is_bounded_over_all_issuers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICKET_CHUNKS_MAX", 8)
    leases = Leases(TTL_NS)
    leases.issue_ticket(IDENTITY, ANN, 3, _holds(1, 2), now_ns=0)
    assert not leases.has_room_for_tickets(BOB, 3)
    assert leases.has_room_for_tickets(BOB, 2)
    leases.expire(TTL_NS)
    assert leases.has_room_for_tickets(BOB, 8)
    assert leases.verify() == []


def test_a_hold_in_two_places_is_found() -> None:
    leases = Leases(TTL_NS)
    leases.grant(ANN, 1, _holds(7), now_ns=0)
    assert leases.verify() == []
    leases.issue_ticket(IDENTITY, ANN, 1, _holds(7), now_ns=0)
    assert leases.verify() == ["leases: a hold is in two leases or tickets"]


def test_no_hold_is_lost_or_returned_twice(seed: int) -> None:
    chance, leases, now_ns = random.Random(seed), Leases(TTL_NS), 0
    live: set[int] = set()
    granted: list[tuple[int, ConnectionId]] = []
    tickets: list[bytes] = []
    for step in range(2000):
        now_ns += chance.randrange(200)
        owner = chance.choice((ANN, BOB))
        back: list[HoldId] = []
        verb = chance.choice(("grant", "grant", "ticket", "release", "claim", "renew", "expire", "drop"))
        if verb in ("grant", "ticket"):
            holds = _holds(2 * step, 2 * step + 1)
            live |= {2 * step, 2 * step + 1}
            if verb == "grant":
                granted.append((leases.grant(owner, 1, holds, now_ns).id, owner))
            else:
                tickets.append(leases.issue_ticket(IDENTITY, ANN, 1, holds, now_ns=now_ns))
        elif verb == "release" and granted:
            back = [HoldId(hold) for hold in leases.table.end_lease(*chance.choice(granted))]
        elif verb == "renew" and granted:
            leases.renew(*chance.choice(granted), now_ns)
        elif verb == "claim" and tickets:
            ticket = chance.choice(tickets)
            entry = leases.find_ticket(ticket)
            back = [*leases.take_from_ticket(ticket, chance.choice(sorted(entry.holds)))] if entry else []
        elif verb == "expire":
            back = leases.expire(now_ns)
        elif verb == "drop" and chance.random() < 0.1:
            back = leases.drop_owner(owner)
        assert set(back) <= live
        assert len(back) == len(set(back))
        live -= set(back)
        assert leases.hold_count() == len(live)
        assert leases.verify() == []


def test_a_ticket_for_several_claims_keeps_its_holds_until_it_ends() -> None:
    leases = Leases(TTL_NS)
    ticket = leases.issue_ticket(IDENTITY, ANN, 4, _holds(10), now_ns=0, claims=3)
    entry = leases.find_ticket(ticket)
    assert entry is not None
    assert (entry.claims, entry.held) == (3, 4)
    entry.claims -= 1
    assert leases.verify() == []
    assert leases.expire(TTL_NS) == [10]
    assert (leases.tickets, leases.find_ticket(ticket), leases.verify()) == (0, None, [])
