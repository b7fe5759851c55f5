"""Names of nodes: a name belongs to the key that showed it first, until no member has that key."""

from types import SimpleNamespace
from typing import cast

from kvpool.index.remote_chunks import NodeName
from kvpool.peers.control.link import PeerLink
from kvpool.server.peers.node_names import NodeNames

NAME, OTHER = NodeName("gpu-1"), NodeName("gpu-2")


def link_of(key: bytes) -> PeerLink:
    return cast(PeerLink, SimpleNamespace(member=SimpleNamespace(public_key=key)))


def test_a_name_belongs_to_the_key_that_showed_it_first() -> None:
    first, second = link_of(b"one"), link_of(b"two")
    links, names = [first, second], NodeNames()
    assert names.claim(NAME, first, links)
    assert not names.claim(NAME, second, links)
    assert names.claim(OTHER, second, links)
    assert names.claim(NAME, link_of(b"one"), links), "its next connection, or another address of it"


def test_a_name_is_free_when_no_member_has_its_key() -> None:
    first, second = link_of(b"one"), link_of(b"two")
    names = NodeNames()
    assert names.claim(NAME, first, [first, second])
    assert names.claim(NAME, second, [second])
    assert not names.claim(NAME, first, [first, second])


def test_nodes_that_share_a_key_share_its_names() -> None:
    first, second = link_of(b""), link_of(b"")
    names = NodeNames()
    assert names.claim(NAME, first, [first, second])
    assert names.claim(NAME, second, [first, second])
