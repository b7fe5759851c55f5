"""A follower against its owner's directories: random stores, moves and evictions, gaps, lives and lost links, over sockets.

At rest the table of remote chunks has exactly the keys that some tier of the owner has.
"""

import asyncio
import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvpool.clock import MonotonicClock
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.key_column import KeyColumn
from kvpool.peers.back_off import BackOffSettings
from kvpool.peers.control.server import ControlServer
from kvpool.peers.following.follower import FollowSettings
from kvpool.peers.following.followers import Followers
from kvpool.server.peers.key_reporter import KeyReporter
from tests.rigs.events.journal_rig import Rig
from tests.rigs.nodes.peers import Fleet, Owner, Watcher, fleet, identity_of, until

SETTINGS = FollowSettings(
    wait_s=1.0,
    settled_s=0.0,
    peer_asked_per_s=10_000.0,
    asked_per_s=10_000.0,
    back_off=BackOffSettings(first_s=0.001, most_s=0.005),
)


class Node:
    """An owner of chunks, and its lives."""

    def __init__(self, nodes: Fleet, log_bytes: int) -> None:
        self._nodes = nodes
        self._log_bytes = log_bytes
        self.rig = Rig(buffer="64KiB")
        self.life = 0
        self._begin()

    def _begin(self, address: str = "tcp://127.0.0.1:0") -> None:
        self.life += 1
        self.rig.journal._log._bytes_max = self._log_bytes
        loop = asyncio.get_running_loop()
        self.rig.journal.watch(loop)
        self.reporter = KeyReporter(self.rig.journal, loop)
        self.server: ControlServer = self._nodes.serve(
            Owner(), follows=self.reporter, node=identity_of("owner", self.life), address=address
        )

    def end(self) -> None:
        self.server.close()
        self.reporter.close()
        self.rig.journal.close()

    def restart(self) -> None:
        """Another life at the same address, over a warm disk."""
        self.end()
        self.rig.restart()
        self._begin(self.server.endpoints[0])

    def cut(self) -> None:
        """The same life, with every connection lost."""
        self.server.close()
        self.server = self._nodes.serve(
            Owner(), follows=self.reporter, node=identity_of("owner", self.life), address=self.server.endpoints[0]
        )


async def _at_rest(owner: Node, remote: RemoteChunks, followers: Followers, node: NodeName) -> None:
    def is_current() -> bool:
        known = followers.counts().get(node)
        return (
            known is not None
            and owner.rig.journal._feed.waiting == 0
            and known.last == known.newest == owner.rig.journal.newest
            and followers.known_of(node) == len(owner.rig.truth())
            and not remote.pending_of(node)
        )

    await until(is_current, f"it is up to date: {followers.stats()}, {followers.fault_of(node)}")
    for key in owner.rig.truth():
        assert remote.find(KeyColumn.of([key]), 0).chunks == 1
    assert remote.verify() == []


async def _compare(chance: random.Random) -> int:
    """Returns how many gaps there were."""
    with fleet() as nodes:
        owner = Node(nodes, chance.choice((1500, 65_536)))
        remote = RemoteChunks(20_000, bytes(16))
        loop = asyncio.get_running_loop()
        clock = MonotonicClock()
        followers = Followers(remote, settings=SETTINGS, clock=clock, random=chance, loop=loop)
        watcher: Watcher = nodes.watch(on_change=followers.note_link)
        node = NodeName("owner")
        await watcher.ready(owner.server)
        for _ in range(6):
            for _ in range(chance.randrange(1, 25)):
                owner.rig.random_step(chance)
                if chance.random() < 0.5:
                    await asyncio.sleep(0)
            dice = chance.random()
            if dice < 0.15:
                owner.restart()
            elif dice < 0.3:
                owner.cut()
            if chance.random() < 0.7:
                await _at_rest(owner, remote, followers, node)
        await _at_rest(owner, remote, followers, node)
        gaps = followers.stats()["gaps"]
        followers.close()
        assert len(remote) == 0
        owner.end()
        return gaps


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_at_rest_a_follower_knows_exactly_what_its_peer_has(seed: int) -> None:
    note(f"seed {seed}")
    chance = random.Random(seed)
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("kvpool.server.peers.key_reporter.PAGE_KEYS", chance.randrange(1, 9))
        patch.setattr("kvpool.journal.journal.FEED_CHANGES_MAX", chance.choice((8, 65_536)))
        patch.setattr("kvpool.index.remote_chunks.KEYS_A_TURN", chance.choice((2, 4096)))
        asyncio.run(_compare(chance))


def test_small_buffers_force_gaps() -> None:
    """What the model is for happens in it."""
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("kvpool.journal.journal.FEED_CHANGES_MAX", 8)
        assert sum(asyncio.run(_compare(random.Random(seed))) for seed in range(5)) > 0
