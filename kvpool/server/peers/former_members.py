"""Former members: the closed links to nodes that have left, so that operators see what became of them.

A node that is a member again is none of them. Bounded: the latest `FORMER_MAX`, each for `FORMER_S`. Loop thread only.
"""

from collections import OrderedDict

from kvpool.clock import Clock, Deadline
from kvpool.peers.control.link import PeerLink

FORMER_MAX = 32
FORMER_S = 900.0


class FormerMembers:
    """See the module. By identity, the one that left longest ago first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: OrderedDict[str, tuple[PeerLink, Deadline]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<FormerMembers {len(self._links)}>"

    def note_left(self, link: PeerLink) -> None:
        """A member has left, and this was the link to it."""
        self._links[link.member.identity] = link, Deadline(FORMER_S, self._clock)
        self._links.move_to_end(link.member.identity)
        if len(self._links) > FORMER_MAX:
            self._links.popitem(last=False)

    def note_joined(self, identity: str) -> None:
        """A node is a member, perhaps again."""
        self._links.pop(identity, None)

    def links(self) -> list[PeerLink]:
        """The closed link to each."""
        for identity in [identity for identity, (_, end) in self._links.items() if end.has_passed()]:
            del self._links[identity]
        return [link for link, _ in self._links.values()]
