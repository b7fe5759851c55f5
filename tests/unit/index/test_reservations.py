"""Reservations: owners, deadlines, and the rest of one that expired."""

import pytest

from kvpool.clock import NS_PER_S
from kvpool.index.reservations import Reservations
from kvpool.types import ConnectionId, ReservationId

TTL_NS = 1000
ANN, BOB = ConnectionId(1), ConnectionId(2)


def _with(*numbers: int, owner: ConnectionId = ANN, now_ns: int = 0) -> Reservations:
    reservations = Reservations(TTL_NS)
    for number in numbers:
        reservations.add(ReservationId(number), owner, chunks=4, extents=2, kv_extents=2, now_ns=now_ns)
    return reservations


def test_a_reservation_belongs_to_its_owner_alone() -> None:
    reservations = _with(5)
    found = reservations.find(ReservationId(5), ANN)
    assert found is not None
    assert (found.chunks, found.extents, found.committed, found.is_expired) == (4, 2, 0, False)
    assert reservations.find(ReservationId(5), BOB) is None
    assert reservations.find(ReservationId(6), ANN) is None


def test_a_number_is_used_once_at_a_time() -> None:
    reservations = _with(5)
    with pytest.raises(AssertionError):
        reservations.add(ReservationId(5), BOB, chunks=1, extents=1, kv_extents=1, now_ns=0)


def test_an_empty_reservation_is_refused() -> None:
    with pytest.raises(AssertionError):
        _with().add(ReservationId(1), ANN, chunks=0, extents=1, kv_extents=1, now_ns=0)


def test_an_ended_reservation_is_forgotten() -> None:
    reservations = _with(5, 6)
    found = reservations.find(ReservationId(5), ANN)
    assert found is not None
    reservations.end(found)
    assert reservations.find(ReservationId(5), ANN) is None
    assert (len(reservations), reservations.count_of(ANN), reservations.verify()) == (1, 1, [])
    with pytest.raises(KeyError):
        reservations.end(found)


def test_owners_have_their_own() -> None:
    reservations = _with(1, 2)
    reservations.add(ReservationId(3), BOB, chunks=1, extents=1, kv_extents=1, now_ns=0)
    assert sorted(entry.id for entry in reservations.of_owner(ANN)) == [1, 2]
    assert [entry.id for entry in reservations.of_owner(BOB)] == [3]
    assert reservations.of_owner(ConnectionId(9)) == []


def test_a_reservation_expires_once_and_still_belongs_to_its_owner() -> None:
    reservations = _with(5, now_ns=7)
    assert reservations.expire(TTL_NS + 6) == []
    (expired,) = reservations.expire(TTL_NS + 7)
    assert expired.is_expired
    assert reservations.expire(TTL_NS + 8) == []
    assert reservations.find(ReservationId(5), ANN) is expired
    assert reservations.of_owner(ANN) == [expired]


def test_a_writer_is_overdue_when_the_time_that_it_was_welcomed_with_has_passed_again() -> None:
    """A shorter time to live is for those that begin from now on; their writers may be of before."""
    ttl_ns = 60 * NS_PER_S
    reservations = Reservations(ttl_ns)
    reservations.change_ttl(NS_PER_S)
    reservations.add(ReservationId(5), ANN, chunks=4, extents=3, kv_extents=3, now_ns=0)
    assert len(reservations.expire(NS_PER_S)) == 1
    assert reservations.overdue(NS_PER_S + ttl_ns - 1) == set()
    assert reservations.overdue(NS_PER_S + ttl_ns) == {ANN}


def test_a_fully_committed_reservation_that_was_not_ended_is_found() -> None:
    reservations = _with(5)
    found = reservations.find(ReservationId(5), ANN)
    assert found is not None
    found.committed = 3
    assert reservations.verify() == []
    found.committed = 4
    assert reservations.verify() == ["reservation 5: 4 of 4 chunks committed"]
