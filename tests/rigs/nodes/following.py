"""Rig of following: an honest node's keys and events, written by the test, and a node that follows others."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.key_column import KeyColumn
from kvpool.peers.back_off import BackOffSettings
from kvpool.peers.control import records as r
from kvpool.peers.control.link import LinkSettings
from kvpool.peers.control.server import ControlServer
from kvpool.peers.following.follower import FollowSettings
from kvpool.peers.following.followers import Followers
from tests.rigs.nodes.peers import LINK, Fleet, KeyOwner, Owner, Watcher, identity_of, until

QUICK = FollowSettings(
    wait_s=5.0,
    answer_s=5.0,
    settled_s=0.0,
    peer_asked_per_s=2000.0,
    asked_per_s=20_000.0,
    back_off=BackOffSettings(first_s=0.01, most_s=0.05),
)
SLOW_RETRY = BackOffSettings(first_s=1000.0, most_s=1000.0)


def column(first: int, end: int) -> KeyColumn:
    return KeyColumn.of(kvpool_native.blake3(number.to_bytes(4, "little")) for number in range(first, end))


@dataclass
class Book(KeyOwner):
    """An honest node's keys and events, which the test writes: pages of `page_keys` slots."""

    chunks: set[bytes] = field(default_factory=set)
    slots: list[bytes] = field(default_factory=list)
    events: list[tuple[KeyColumn, bool]] = field(default_factory=list)
    oldest: int = 0
    page_keys: int = 100

    def __post_init__(self) -> None:
        self.reply = self._reply

    def write(self, keys: KeyColumn, *, is_stored: bool = True) -> None:
        """An event; whoever waits for one is answered."""
        self.events.append((keys, is_stored))
        if is_stored:
            self.slots += keys
            self.chunks |= set(keys)
        else:
            self.chunks -= set(keys)
        self.answer_all()

    def lose_events(self) -> None:
        """As a small buffer does."""
        self.oldest = len(self.events)

    def answer_all(self) -> None:
        waiting, self.waiting = self.waiting, []
        for _, ask, answer in waiting:
            found = self._reply(ask)
            assert found is not None
            answer(found)

    @property
    def newest(self) -> int:
        return len(self.events) - 1

    def _reply(self, ask: r.AskFollow) -> r.FollowAnswer | None:
        if isinstance(ask, r.AskKeys):
            following = ask.cursor + self.page_keys
            page = KeyColumn.of(key for key in self.slots[ask.cursor : following] if key in self.chunks)
            return r.Keys(page.packed, self.newest, following if following < len(self.slots) else r.NO_MORE_KEYS)
        if ask.last < self.oldest - 1:
            return r.Changes(self.newest, self.newest, True, b"", b"", 0)
        if ask.last == self.newest:
            return None if ask.wait_ms else r.Changes(ask.last, self.newest, False, b"", b"", 0)
        keys, is_stored = self.events[ask.last + 1]
        columns = (keys.packed, b"") if is_stored else (b"", keys.packed)
        return r.Changes(ask.last + 1, self.newest, False, *columns, 0)


@dataclass
class Reader:
    """A node that follows others."""

    nodes: Fleet
    settings: FollowSettings = QUICK
    pairs: int = 100_000
    link: LinkSettings = LINK

    def __post_init__(self) -> None:
        self.remote = RemoteChunks(self.pairs, bytes(16))
        self.followers = Followers(
            self.remote,
            settings=self.settings,
            clock=MonotonicClock(),
            random=random.Random(7),
            loop=asyncio.get_running_loop(),
        )
        self.watcher: Watcher = self.nodes.watch(on_change=self.followers.note_link, link=self.link)
        self.nodes.ends.append(self.followers.close)

    async def follow(self, server: ControlServer) -> NodeName:
        link = await self.watcher.ready(server)
        assert link.life is not None
        return NodeName(link.life.node)

    async def knows(self, node: NodeName, keys: KeyColumn, what: str = "") -> None:
        """Until exactly these keys of a node are known."""

        def is_known() -> bool:
            return (
                self.followers.known_of(node) == len(keys)
                and not self.remote.pending_of(node)
                and (not keys or self.remote.count_of(node) == len(keys))
            )

        await until(is_known, f"{len(keys)} keys are known {what}: {self.followers._followers.get(node)!r}")
        assert self.remote.verify() == []

    async def forgets(self, node: NodeName) -> None:
        await until(lambda: not self.followers._followers[node].is_joined, "its hints are forgotten")
        assert self.followers.known_of(node) == 0


def serve(nodes: Fleet, keys: KeyOwner, name: str = "owner", life: int = 1, **options: Any) -> ControlServer:
    return nodes.serve(Owner(), follows=keys, node=identity_of(name, life), **options)
