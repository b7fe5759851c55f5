"""Followers: one for each peer whose link is ready, and what all of them have counted.

Peers do not disturb each other: each has its own follower, its own back-off and its own share of the table. All requests of all
followers together are bounded by a rate, of which each has an equal part. Loop thread only. Bounds: `FollowSettings`; as many
followers as the control client has links. Invariant: a peer without a ready link has a follower only while its hints are kept,
or until another link changes. Of several links to one node the first is followed, and the next when that has ended.
"""

import asyncio
from collections import Counter

from kvpool.clock import Clock
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.peers.back_off import Uniform
from kvpool.peers.control.link import PeerLink
from kvpool.peers.following.follower import FollowCounts, Follower, FollowSettings
from kvpool.peers.following.remote_feed import RemoteFeed

_TOTALS = ("snapshots", "gaps", "failures")


class Followers:
    """See the module. A peer's name in the table is the one in its Hello."""

    def __init__(
        self,
        remote: RemoteChunks,
        *,
        settings: FollowSettings,
        clock: Clock,
        random: Uniform,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._feed = RemoteFeed(remote, clock=clock, loop=loop)
        self._remote = remote
        self._settings = settings
        self._clock = clock
        self._random = random
        self._loop = loop
        self._followers: dict[NodeName, Follower] = {}
        self._links: dict[NodeName, list[PeerLink]] = {}  # that are ready; a node with several addresses has several
        self._totals: Counter[str] = Counter()  # of followers that have ended

    def __repr__(self) -> str:
        return f"<Followers of {len(self._followers)} nodes>"

    def note_link(self, link: PeerLink) -> None:
        """A link has become ready, or no longer is: the control client's `on_change`."""
        if link.life is not None:
            node = NodeName(link.life.node)
            self._links.setdefault(node, []).append(link)
            if node not in self._followers:
                self._followers[node] = self._make(node)
            if self._followers[node].link is None:
                self._followers[node].begin_following(link)
        else:
            for node in [node for node, links in self._links.items() if link in links]:
                self._note_lost(node, link)
        for gone in [one for one in self._followers.values() if one.link is None]:
            has_new_name = link.life is not None and gone.member == link.member.identity
            if has_new_name or not gone.is_joined:
                self._remove(gone.node)

    def forget(self, node: NodeName) -> None:
        """A node is no member any more: forget what it has at once, and follow no link to it that is ready now."""
        self._links.pop(node, None)
        if node in self._followers:
            self._remove(node)

    def close(self) -> None:
        """Follow nobody any more."""
        for node in list(self._followers):
            self.forget(node)
        self._feed.close()

    def counts(self) -> dict[NodeName, FollowCounts]:
        """Counters of each peer that is followed, or whose hints are kept."""
        return {node: follower.counts for node, follower in self._followers.items()}

    def known_of(self, node: NodeName) -> int:
        """Keys of a peer that the table has."""
        follower = self._followers.get(node)
        return self._remote.count_of(node) if follower is not None and follower.is_joined else 0

    def is_current(self, node: NodeName) -> bool:
        """Whether a peer is followed, and its snapshot is whole."""
        follower = self._followers.get(node)
        return follower is not None and follower.link is not None and follower.is_current

    def fault_of(self, node: NodeName) -> str:
        """Why the last attempt to follow a peer has ended; empty where nothing is wrong."""
        follower = self._followers.get(node)
        return "" if follower is None else follower.fault

    def stats(self) -> dict[str, int]:
        """Counters by name, of all peers that were ever followed; `lag`: the largest now."""
        counted = [follower.counts for follower in self._followers.values()]
        return {
            "followed": sum(follower.link is not None for follower in self._followers.values()),
            "disconnected": sum(follower.link is None for follower in self._followers.values()),
            **{name: self._totals[name] + sum(getattr(one, name) for one in counted) for name in _TOTALS},
            "lag": max((one.lag for one in counted), default=0),
        }

    def _make(self, node: NodeName) -> Follower:
        return Follower(
            node,
            self._feed,
            self._interval_s,
            settings=self._settings,
            clock=self._clock,
            random=self._random,
            loop=self._loop,
        )

    def _note_lost(self, node: NodeName, link: PeerLink) -> None:
        links = self._links[node]
        links.remove(link)
        follower = self._followers.get(node)
        if follower is not None and follower.link is link:
            if links:
                follower.begin_following(links[0])
            else:
                follower.pause()
        if not links:
            del self._links[node]

    def _interval_s(self) -> float:
        """Seconds between two requests of one follower."""
        return max(1 / self._settings.peer_asked_per_s, len(self._followers) / self._settings.asked_per_s)

    def _remove(self, node: NodeName) -> None:
        follower = self._followers.pop(node)
        follower.end_following()
        for name in _TOTALS:
            self._totals[name] += getattr(follower.counts, name)
