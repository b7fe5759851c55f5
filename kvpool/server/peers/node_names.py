"""Names of nodes: each belongs to the member that showed it first, until its node shows another name or is no member any more.

Hints and measurements are kept by the names in Hellos. A node that takes another node's name would get its pulls, and the other
one would be asked no more: a link with a name that is taken is a double, and is not used until the name is free. A node that is
away keeps its name from nodes with other keys. In a fleet that shares one key pair, or has none, the name goes to the next node
that shows it (`NameClaims`): it may be the same one elsewhere. Loop thread only, but for what says "any thread". Bounded: names
and doubles of known members alone.

Invariant: a name belongs to a member only while that is known and has shown it last. No double has its name.
"""

from collections.abc import Collection

from kvpool.index.remote_chunks import NodeName
from kvpool.peers.control.link import PeerLink
from kvpool.peers.control.name_claims import NameClaims
from kvpool.peers.control.records import RefusalCode
from kvpool.peers.link_state import REFUSED

_REMEDY = "give each node a peer.name of its own, and restart the one that has the wrong name"
_PROBLEMS_MAX = 8
_Shower = tuple[str, bytes]  # a member that has shown a name: its identity, which outlives its links, and its key


class NodeNames:
    """See the module. `links` of a call: those to all members, ready or not."""

    def __init__(self, own: str, claims: NameClaims | None = None, *, shared_key: bytes = b"") -> None:
        """`own`: this node's name. `claims`: of nodes without keys, or with the `shared_key`, this node's own."""
        self._own = own
        self._claims = claims or NameClaims()
        self._shared = (b"", shared_key)
        self._shown: dict[_Shower, NodeName] = {}
        self._owners: dict[NodeName, _Shower] = {}
        self._doubles: dict[PeerLink, NodeName] = {}

    def __repr__(self) -> str:
        return f"<NodeNames {len(self._owners)}, {len(self._doubles)} doubles>"

    def note_link(self, link: PeerLink, links: Collection[PeerLink]) -> bool:
        """A link has become ready, or no longer is. Whether that is one of a node with a name of its own."""
        was_double = self._doubles.pop(link, None) is not None
        if link.life is None:
            return not was_double
        name = NodeName(link.life.node)
        self._shown[_shower(link)] = name
        self._drop_names(links)
        if self._may_have(link, name):
            return True
        self._doubles[link] = name
        return False

    def take_freed(self, links: Collection[PeerLink]) -> list[PeerLink]:
        """The doubles whose names have become free: they have them now, and are doubles no longer."""
        self._drop_names(links)
        freed = [link for link, name in self._doubles.items() if self._may_have(link, name)]
        for link in freed:
            del self._doubles[link]
        return freed

    def is_double(self, link: PeerLink) -> bool:
        """Whether a link is ready, but not used, because its node's name is that of another one."""
        return link in self._doubles

    def fault_of(self, link: PeerLink, links: Collection[PeerLink]) -> str:
        """What is wrong with a double, in a line. Any thread."""
        name = link.life.node if link.life is not None else ""
        owners = [one for one in links if one is not link and self._shown.get(_shower(one)) == name]
        owner = next((_address(one) for one in owners if not self.is_double(one)), "another node")
        return f"it calls itself {name!r}, as {owner} does, and is not used"

    def problems(self, links: Collection[PeerLink]) -> list[str]:
        """Nodes with the names of others, a line for each, with what to do. Any thread."""
        found = [
            f"peers: {_address(link)}: {self.fault_of(link, links)}: {_REMEDY}"
            for link in links
            if self.is_double(link) and link.life is not None
        ]
        found += [
            f"peers: {_address(link)} has this node's name, {self._own!r}: {_REMEDY}"
            for link in links
            if link.fault.startswith(f"{REFUSED}{RefusalCode.SELF}:")
        ]
        left_out = len(found) - _PROBLEMS_MAX
        return [
            *found[:_PROBLEMS_MAX],
            *([f"peers: {left_out} more nodes have names of others"] if left_out > 0 else []),
        ]

    def count_doubles(self) -> int:
        """How many nodes are not used, because their names are those of others. Any thread."""
        return len(self._doubles)

    def _may_have(self, link: PeerLink, name: NodeName) -> bool:
        """Whether a name is that of the link's node, which has it from now on."""
        owner, shower = self._owners.get(name), _shower(link)
        if link.life is None or (owner is not None and owner[1] != shower[1]):
            return False
        if shower[1] in self._shared and not self._claims.claim(name, link.life.incarnation):
            return False
        self._owners[name] = shower
        return True

    def _drop_names(self, links: Collection[PeerLink]) -> None:
        """Forget members that are known no longer, and names that these have shown last. A key that has shown a name from
        another address keeps it."""
        known = {_shower(one) for one in links}
        self._shown = {shower: name for shower, name in self._shown.items() if shower in known}
        for name, owner in list(self._owners.items()):
            if self._shown.get(owner) != name:
                others = [one for one, shown in self._shown.items() if shown == name and one[1] == owner[1]]
                del self._owners[name]
                if others:
                    self._owners[name] = others[0]


def _shower(link: PeerLink) -> _Shower:
    return link.member.identity, link.member.public_key


def _address(link: PeerLink) -> str:
    return link.member.endpoint.removeprefix("tcp://")
