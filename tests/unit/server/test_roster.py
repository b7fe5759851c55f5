"""Slots for connections: bounds in all and by user, those reserved for operators, and memory for unfinished requests."""

import pytest

from kvpool.clock import MonotonicClock
from kvpool.errors import Refused
from kvpool.ids import ConnectionId
from kvpool.protocol.records import messages as m
from kvpool.server.connections.input_budget import COUNTED_BYTES, InputBudget
from kvpool.server.connections.local_socket import Peer
from kvpool.server.connections.roster import OPERATOR_CONNECTIONS, Roster

OPERATOR = Peer(1, 0, 0)


def user(uid: int) -> Peer:
    return Peer(1, uid, uid)


def roster_of(max_connections: int, user_quota: float = 1.0) -> Roster:
    return Roster(max_connections, user_quota, MonotonicClock(), lambda peer: peer == OPERATOR)


def fill(roster: Roster, peer: Peer) -> int:
    """The number of connections that a user gets."""
    count = 0
    while _gets_in(roster, peer):
        count += 1
    return count


def _gets_in(roster: Roster, peer: Peer) -> bool:
    try:
        roster.begin_handshake(peer)
    except Refused:
        return False
    return True


def test_a_user_has_its_share_of_what_the_others_leave() -> None:
    roster = roster_of(100, 0.75)
    assert fill(roster, user(7)) == 75
    assert fill(roster, user(8)) == 18  # three quarters of 25
    assert fill(roster, user(7)) == 0
    roster.end_handshake(user(7))
    assert fill(roster, user(8)) == 1
    with pytest.raises(Refused, match=r"uid 8 has 19 connections.*server.user_quota is 0.75"):
        roster.begin_handshake(user(8))


def test_every_user_has_one_connection_while_there_is_room() -> None:
    roster = roster_of(4, 0.0)
    assert [fill(roster, user(uid)) for uid in (5, 6, 7, 8, 9)] == [1, 1, 1, 1, 0]


def test_operators_are_accepted_when_engines_have_all_connections() -> None:
    roster = roster_of(3)
    assert fill(roster, user(7)) == 3
    with pytest.raises(Refused, match=r"server.max_connections is 3 and all are in use"):
        roster.begin_handshake(user(8))
    roster.begin_handshake(OPERATOR)
    roster.check_role(OPERATOR, m.ROLE_ADMIN)
    with pytest.raises(Refused, match="all are in use"):
        roster.check_role(OPERATOR, m.ROLE_ENGINE)
    assert fill(roster, OPERATOR) == OPERATOR_CONNECTIONS - 1


def test_the_oldest_unfinished_request_is_disconnected_first() -> None:
    ended: list[int] = []
    budget = InputBudget(lambda connection: ended.append(connection), bytes_max=4 * COUNTED_BYTES)
    for number in (1, 2, 3, 4):
        budget.note_unfinished(ConnectionId(number), COUNTED_BYTES)
    budget.note_unfinished(ConnectionId(1), 0)  # the rest came
    budget.note_unfinished(ConnectionId(5), COUNTED_BYTES)
    assert ended == []
    budget.note_unfinished(ConnectionId(5), 2 * COUNTED_BYTES)
    assert ended == [2]
    assert budget.of(ConnectionId(2)) == 0
    budget.note_unfinished(ConnectionId(6), COUNTED_BYTES - 1)
    assert ended == [2]
    assert repr(budget) == f"<InputBudget {4 * COUNTED_BYTES} of {4 * COUNTED_BYTES} bytes, 3 connections>"
