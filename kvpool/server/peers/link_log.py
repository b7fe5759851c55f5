"""Link log: a line for each change of a link to another node, and what is wrong with those that cannot be used.

A node that is down is no fault of this one: its link is logged, and health is silent. What an operator has to change, here or
there, is a problem of health until it is over: keys, trust domain, version, a name twice, a port that nothing passes. It is one
from the second attempt that ends so: a connection that ends in the middle of a handshake looks like a wrong key.

A link that comes and goes writes LINES_AT_ONCE lines and then one in CATCH_UP_S, the last of which has its latest state. Loop
thread only, but for `problems`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from kvpool.clock import Clock
from kvpool.peers.control.link import WRONG_KEYS, PeerLink
from kvpool.peers.control.records import RefusalCode
from kvpool.peers.link_state import REFUSED
from kvpool.peers.token_bucket import TokenBucket
from kvpool.tiers.peer.node_records import NodeRecord

log = logging.getLogger(__name__)

ATTEMPTS = 2
LINES_AT_ONCE = 6
CATCH_UP_S = 30.0
_PROBLEMS_MAX = 8
# Of faults that the operator has to mend: what to do.
_REMEDIES = {
    WRONG_KEYS: "peer.members here has to have its public key, its peer.allow this node's, and peer.allow here its own"
    " (or a proxy there has nobody behind it)",
    f"{REFUSED}{RefusalCode.DOMAIN}:": "",  # the text of a refusal has its own remedy
    f"{REFUSED}{RefusalCode.VERSION}:": "",
    f"{REFUSED}{RefusalCode.NAME}:": "this node is the second of its name: restart the one that has the wrong peer.name",
}


class LinkLog:
    """See the module."""

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._clock = clock
        self._loop = loop
        self._paces: WeakKeyDictionary[PeerLink, TokenBucket] = WeakKeyDictionary()
        self._logged: WeakKeyDictionary[PeerLink, str] = WeakKeyDictionary()
        self._left_out: Counter[PeerLink] = Counter()  # links whose latest state is not logged
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<LinkLog of {len(self._logged)}>"

    def note_link(self, link: PeerLink) -> None:
        """A link has become ready, or an attempt or a connection has ended."""
        if _what_of(link) == self._logged.get(link):
            return
        pace = self._paces.get(link) or TokenBucket(1 / CATCH_UP_S, LINES_AT_ONCE, self._clock)
        self._paces[link] = pace
        if pace.take_tokens():
            self._log(link)
            return
        self._left_out[link] += 1
        self._timer = self._timer or self._loop.call_later(CATCH_UP_S, self._catch_up)

    def close(self) -> None:
        """Log nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _catch_up(self) -> None:
        """Log the latest state of the links that were left out."""
        self._timer = None
        for link in list(self._left_out):
            if _what_of(link) == self._logged.get(link):
                del self._left_out[link]
            else:
                self._log(link)

    def _log(self, link: PeerLink) -> None:
        what, left_out = _what_of(link), self._left_out.pop(link, 0)
        self._logged[link] = what
        level = logging.WARNING if _remedy_of(link) is not None else logging.INFO
        end = f" ({left_out} changes were left out)" if left_out else ""
        log.log(level, "peer %s: %s%s", name_of(link), what, end)

    @staticmethod
    def problems(links: Collection[PeerLink]) -> list[str]:
        """What operators have to mend, in a line for each link, with what to do. Any thread."""
        found = []
        for link in links:
            remedy = _remedy_of(link)
            if link.life is None and remedy is not None and link.same_faults >= ATTEMPTS:
                found.append(f"peers: {name_of(link)}: {link.fault}{f': {remedy}' if remedy else ''}")
        left_out = len(found) - _PROBLEMS_MAX
        return [*found[:_PROBLEMS_MAX], *([f"peers: {left_out} more nodes cannot be used"] if left_out > 0 else [])]


def stream_problems(records: Iterable[tuple[str, NodeRecord]]) -> list[str]:
    """Nodes whose chunks cannot be fetched, because nothing answers at their stream's address, a line for each. Any thread."""
    found = [
        f"peers: {node}: nothing answers at {record.unreachable}, its peer.stream: let this node pass its firewall there"
        for node, record in records
        if record.unreachable
    ]
    return found[:_PROBLEMS_MAX]


def name_of(link: PeerLink) -> str:
    """A member as operators know it: its name, where it is known, and its address."""
    life = link.last_life
    node = life.node if life is not None else link.member.node
    address = link.member.endpoint.removeprefix("tcp://")
    return f"{node} at {address}" if node else address


def _what_of(link: PeerLink) -> str:
    return "is connected" if link.life is not None else link.fault


def _remedy_of(link: PeerLink) -> str | None:
    """What an operator has to do about a link's fault; None where it is nothing of theirs."""
    return next((remedy for fault, remedy in _REMEDIES.items() if link.fault.startswith(fault)), None)
