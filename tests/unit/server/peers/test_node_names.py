"""Names of nodes: a name belongs to the key that showed it first, until its node shows another one or is no member any more."""

from types import SimpleNamespace
from typing import cast

import pytest

from kvpool.index.remote_chunks import NodeName
from kvpool.peers.control.identity import PeerLife
from kvpool.peers.control.link import PeerLink
from kvpool.peers.control.name_claims import NameClaims
from kvpool.peers.members.member import Member
from kvpool.server.peers.node_names import NodeNames

NAME, OTHER = NodeName("gpu-1"), NodeName("gpu-2")


def link_of(port: int, key: bytes, name: str = "", fault: str = "") -> PeerLink:
    life = PeerLife(name, bytes(16), "", is_new=False) if name else None
    return cast(PeerLink, _Link(Member(f"tcp://127.0.0.1:{port}", key), life, fault))


class _Link(SimpleNamespace):
    def __init__(self, member: Member, life: PeerLife | None, fault: str) -> None:
        super().__init__(member=member, life=life, fault=fault)

    __hash__ = object.__hash__  # type: ignore[assignment]


def show(names: NodeNames, link: PeerLink, name: str, links: list[PeerLink], life: int = 0) -> bool:
    """A link connects, to a node of this name (empty: it ends), in a life."""
    link.life = PeerLife(name, bytes([life] * 16), "", is_new=False) if name else None
    return names.note_link(link, links)


def test_a_name_belongs_to_the_key_that_showed_it_first() -> None:
    first, second, again = link_of(1, b"one"), link_of(2, b"two"), link_of(3, b"one")
    links, names = [first, second, again], NodeNames("here")
    assert show(names, first, NAME, links)
    assert not show(names, second, NAME, links)
    assert names.is_double(second)
    assert names.count_doubles() == 1
    assert show(names, again, NAME, links), "another address of it"
    assert not show(names, second, "", links), "a double that ends was not used"
    assert show(names, second, OTHER, links)
    assert names.count_doubles() == 0


def test_a_node_that_is_away_keeps_its_name() -> None:
    first, second = link_of(1, b"one"), link_of(2, b"two")
    links, names = [first, second], NodeNames("here")
    assert show(names, first, NAME, links)
    assert show(names, first, "", links)
    assert not show(names, second, NAME, links)
    assert names.take_freed(links) == []
    renewed = link_of(1, b"one")
    assert show(names, renewed, NAME, [renewed, second]), "a new link to the same member"


def test_a_name_is_free_when_its_node_shows_another_one() -> None:
    wrong, right = link_of(1, b"one"), link_of(2, b"two")
    links, names = [wrong, right], NodeNames("here")
    assert show(names, wrong, NAME, links)
    assert not show(names, right, NAME, links)
    assert show(names, wrong, "", links)
    assert names.take_freed(links) == []
    assert show(names, wrong, OTHER, links)
    assert names.take_freed(links) == [right]
    assert not names.is_double(right)
    assert not show(names, wrong, NAME, links), "it belongs to the other key now"


def test_a_name_is_free_when_no_member_has_its_key() -> None:
    first, second = link_of(1, b"one"), link_of(2, b"two")
    names = NodeNames("here")
    assert show(names, first, NAME, [first, second])
    assert not show(names, second, NAME, [first, second])
    assert names.take_freed([second]) == [second]
    assert not show(names, first, NAME, [first, second])


@pytest.mark.parametrize("key", [b"", b"one"], ids=["no keys", "a shared key"])
def test_of_nodes_that_share_a_key_and_a_name_one_is_used_at_a_time(key: bytes) -> None:
    first, second = link_of(1, key), link_of(2, key)
    links, claims = [first, second], NameClaims()
    claims.watch(lambda: [(link.life.node, link.life.incarnation) for link in links if link.life])
    names = NodeNames("here", claims, shared_key=b"one")
    assert show(names, first, NAME, links, life=1)
    assert not show(names, second, NAME, links, life=2)
    assert names.is_double(second)
    assert "it calls itself 'gpu-1', as 127.0.0.1:1 does, and is not used" in names.problems(links)[0]
    assert show(names, first, "", links)
    assert names.take_freed(links) == [second], "it may be the first one, at another address"
    assert not show(names, first, NAME, links, life=1)


def test_the_life_that_asks_this_node_is_the_one_that_it_asks() -> None:
    first, second = link_of(1, b""), link_of(2, b"")
    links, claims, asking = [first, second], NameClaims(), [(str(NAME), bytes([2] * 16))]
    claims.watch(lambda: [(link.life.node, link.life.incarnation) for link in links if link.life])
    claims.watch(lambda: asking)
    names = NodeNames("here", claims)
    assert claims.claim(*asking[0])
    assert not show(names, first, NAME, links, life=1)
    assert show(names, second, NAME, links, life=2)
    show(names, second, "", links)
    assert names.take_freed(links) == [], "it still asks"
    asking.clear()
    assert names.take_freed(links) == [first]


def test_a_node_with_two_addresses_is_no_double_of_itself() -> None:
    first, second = link_of(1, b""), link_of(2, b"")
    names = NodeNames("here")
    assert show(names, first, NAME, [first, second], life=1)
    assert show(names, second, NAME, [first, second], life=1)


def test_problems_name_both_nodes_and_what_to_do() -> None:
    first, second = link_of(1, b"one"), link_of(2, b"two")
    third = link_of(3, b"three", fault="refused: self: this node has the same name")
    links, names = [first, second, third], NodeNames("here")
    show(names, first, NAME, links)
    show(names, second, NAME, links)
    remedy = "give each node a peer.name of its own, and restart the one that has the wrong name"
    assert names.problems(links) == [
        f"peers: 127.0.0.1:2: it calls itself 'gpu-1', as 127.0.0.1:1 does, and is not used: {remedy}",
        f"peers: 127.0.0.1:3 has this node's name, 'here': {remedy}",
    ]


def test_problems_are_bounded() -> None:
    first = link_of(1, b"one")
    doubles = [link_of(number, bytes([number])) for number in range(2, 40)]
    links, names = [first, *doubles], NodeNames("here")
    for link in links:
        show(names, link, NAME, links)
    problems = names.problems(links)
    assert len(problems) == 9
    assert problems[-1] == "peers: 30 more nodes have names of others"
