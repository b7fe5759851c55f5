"""Reservations: owners, deadlines, and the rest of one that expired."""

from typing import Any

import pytest

from kvpool.clock import NS_PER_S
from kvpool.ids import ConnectionId, ReservationId, SaveId
from kvpool.index.reservations import Reservations, ReservedRun

TTL_NS = 1000
ANN, BOB = ConnectionId(1), ConnectionId(2)
SESSION: Any = None  # no run here is asked for its layout


def _run(chunks: int, *holders: int) -> ReservedRun:
    return ReservedRun(SESSION, chunks, 2, 2, [ReservationId(holder) for holder in holders])


def _with(*holders: int, owner: ConnectionId = ANN, now_ns: int = 0) -> Reservations:
    """Reservations 1 and so on."""
    reservations = Reservations(TTL_NS)
    for holder in holders:
        reservations.add_reservation(owner, [_run(4, holder)], now_ns)
    return reservations


def test_what_has_slots_is_of_one_reservation() -> None:
    reservations = _with(5)
    assert reservations.verify() == []
    reservations.add_reservation(BOB, [_run(1, 5)], 0)
    assert reservations.verify() == ["reservations: something that has slots is in two of them"]


def test_a_run_names_the_holders_of_its_chunks() -> None:
    assert _run(4, 5).slices(1, 3) == [(5, 1, 2)]
    assert _run(3, 5, 6, 7).slices(1, 3) == [(6, 0, 1), (7, 0, 1)]
    assert _run(1, 5).slices(0, 1) == [(5, 0, 1)]


def test_an_ended_reservation_is_forgotten() -> None:
    reservations = _with(5, 6)
    found = reservations.find(SaveId(1), ANN)
    assert found is not None
    reservations.remove_reservation(found)
    assert reservations.find(SaveId(1), ANN) is None
    assert (len(reservations), reservations.count_of(ANN), reservations.verify()) == (1, 1, [])
    with pytest.raises(KeyError):
        reservations.remove_reservation(found)


@pytest.mark.parametrize("number", [-1, 0, 2, 2**63, 2**64 - 1, 2**64, -(2**70)])
def test_a_number_that_was_not_given_is_of_no_reservation(number: int) -> None:
    assert _with(5).find(SaveId(number), ANN) is None


def test_a_reservation_expires_once_and_still_belongs_to_its_owner() -> None:
    reservations = _with(5, now_ns=7)
    assert reservations.expire(TTL_NS + 6) == []
    (expired,) = reservations.expire(TTL_NS + 7)
    assert expired.is_expired
    assert reservations.expire(TTL_NS + 8) == []
    assert reservations.find(SaveId(1), ANN) is expired
    assert reservations.of_owner(ANN) == [expired]


def test_a_writer_is_overdue_when_the_time_that_it_was_welcomed_with_has_passed_again() -> None:
    """A shorter time to live is for those that begin from now on; their writers may be of before."""
    ttl_ns = 60 * NS_PER_S
    reservations = Reservations(ttl_ns)
    reservations.change_ttl(NS_PER_S)
    reservations.add_reservation(ANN, [_run(4, 5)], 0)
    assert len(reservations.expire(NS_PER_S)) == 1
    assert reservations.overdue(NS_PER_S + ttl_ns - 1) == set()
    assert reservations.overdue(NS_PER_S + ttl_ns) == {ANN}


def test_a_fully_committed_reservation_that_was_not_ended_is_found() -> None:
    reservations = Reservations(TTL_NS)
    first, second = _run(4, 5), _run(1, 6)
    reservations.add_reservation(ANN, [first, second], 0)
    first.committed = 4
    assert reservations.verify() == []
    second.committed = 1
    assert reservations.verify() == ["reservation 1: 5 of 5 chunks committed"]
