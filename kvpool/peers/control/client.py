"""Control client: the links to all members. See `link.py` for one of them.

Loop thread only. At most LINKS_MAX links. Invariant: `_links` has one link for each member that was added and not dropped.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import zmq

from kvpool.clock import Clock
from kvpool.config.curve_keys import KeyPair
from kvpool.peers.back_off import Uniform
from kvpool.peers.control.identity import NodeIdentity
from kvpool.peers.control.link import LinkSettings, PeerLink
from kvpool.peers.guarded_listener import context_for_others
from kvpool.peers.loop_share import LoopShare
from kvpool.peers.members.member import Member, MembersChange

# Of a link: its DEALER, and the two ends of its monitor.
SOCKETS_PER_LINK = 3
_SOCKETS_OF_CONTEXT = 16
# What all links count together, from the start on.
COUNTED = dict.fromkeys(
    (
        *("connects", "disconnects", "failed_handshakes", "new_lives", "timeouts", "late_answers", "bad_answers"),
        *("refused", "unsent", "full", "too_many"),
    ),
    0,
)
# Of the loop's time, for the answers of all peers.
LOOP_SHARE = 0.2


LINKS_MAX = 1024


class ControlClient:
    """See the module. `on_change` is called with a link that has become ready, with one that no longer is, and with one
    that could not."""

    def __init__(
        self,
        on_change: Callable[[PeerLink], None],
        *,
        identity: NodeIdentity,
        keys: KeyPair | None,
        settings: LinkSettings,
        clock: Clock,
        random: Uniform,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._on_change = on_change
        self._identity = identity
        self._keys = keys
        self._settings = settings
        self._clock = clock
        self._random = random
        self._loop = loop
        self._links: dict[str, PeerLink] = {}
        self._share = LoopShare(LOOP_SHARE, clock)
        self.counts: Counter[str] = Counter()
        self._context = context_for_others()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_PER_LINK * LINKS_MAX + _SOCKETS_OF_CONTEXT)

    def __repr__(self) -> str:
        return f"<ControlClient {len(self._links)} links>"

    def add_member(self, member: Member) -> PeerLink | None:
        """The link to a member, made where it is new; one that has changed gets a new link. None where there are too many."""
        former = self._links.get(member.identity)
        if former is not None and (former.member.endpoint, former.member.public_key) == (
            member.endpoint,
            member.public_key,
        ):
            if former.member.incarnation != member.incarnation:
                former.hurry()
            former.member = member
            return former
        if former is None and len(self._links) >= LINKS_MAX:
            self.counts["too_many"] += 1
            return None
        self.drop(member)
        made = self._links[member.identity] = PeerLink(
            member,
            identity=self._identity,
            keys=self._keys,
            settings=self._settings,
            context=self._context,
            clock=self._clock,
            random=self._random,
            loop=self._loop,
            counts=self.counts,
            share=self._share,
            on_change=self._on_change,
        )
        return made

    def drop(self, member: Member) -> None:
        """End the link to a member, if there is one. What waits for it fails."""
        former = self._links.pop(member.identity, None)
        if former is not None:
            former.close()

    def follow(self, change: MembersChange) -> None:
        """Have a link to every member, and to nobody else."""
        for member in change.left:
            self.drop(member)
        for member in (*change.renewed, *change.joined):
            self.add_member(member)

    def links(self) -> list[PeerLink]:
        """Every link, ready or not."""
        return list(self._links.values())

    def link_to(self, identity: str) -> PeerLink | None:
        """The link to the member of this identity."""
        return self._links.get(identity)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        ready = sum(link.life is not None for link in self._links.values())
        return {**COUNTED, **self.counts, "links": len(self._links), "ready": ready}

    def close(self) -> None:
        """End every link."""
        for link in self.links():
            self.drop(link.member)
        self._context.destroy(linger=0)
