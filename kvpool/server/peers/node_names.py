"""Names of nodes: each belongs to the key that showed it first, while a member of that key is known.

Hints and measurements are kept by the names in Hellos. A node with a key of its own that takes another node's name would get
its pulls: a link of another key with a name that is taken is not used. In a fleet that shares one key pair names are not
protected from its own nodes. Loop thread only. Bounded: names of known members alone.
"""

from collections.abc import Iterable

from kvpool.index.remote_chunks import NodeName
from kvpool.peers.control.link import PeerLink


class NodeNames:
    """See the module."""

    def __init__(self) -> None:
        self._keys: dict[NodeName, bytes] = {}

    def __repr__(self) -> str:
        return f"<NodeNames {len(self._keys)}>"

    def claim(self, name: NodeName, link: PeerLink, links: Iterable[PeerLink]) -> bool:
        """Whether a link may have this name; it has it then. `links`: to all members, ready or not."""
        known = {one.member.public_key for one in links}
        self._keys = {taken: key for taken, key in self._keys.items() if key in known}
        return self._keys.setdefault(name, link.member.public_key) == link.member.public_key
