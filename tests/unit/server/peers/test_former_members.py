"""Former members: bounded in number and time, and none of them is a member."""

from types import SimpleNamespace
from typing import cast

from kvpool.peers.control.link import PeerLink
from kvpool.peers.members.member import Member
from kvpool.server.peers.former_members import FORMER_MAX, FORMER_S, FormerMembers
from tests.rigs.clock import HandClock


def link_of(number: int) -> PeerLink:
    return cast(PeerLink, SimpleNamespace(member=Member(f"tcp://127.0.0.1:{number}", node=f"node-{number}")))


def test_those_that_left_are_shown_for_a_while() -> None:
    clock = HandClock()
    former, first, second = FormerMembers(clock), link_of(1), link_of(2)
    former.note_left(first)
    clock.advance(FORMER_S - 1)
    former.note_left(second)
    assert former.links() == [first, second]
    clock.advance(2)
    assert former.links() == [second]


def test_one_that_is_a_member_again_is_none_of_them() -> None:
    former = FormerMembers(HandClock())
    former.note_left(link_of(1))
    former.note_joined("node-1")
    former.note_joined("node-2")
    assert former.links() == []


def test_the_latest_ones_are_kept() -> None:
    former, links = FormerMembers(HandClock()), [link_of(number) for number in range(FORMER_MAX + 3)]
    for link in links:
        former.note_left(link)
    assert former.links() == links[3:]
