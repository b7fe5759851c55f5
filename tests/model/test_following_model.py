"""A follower against its owner's directories: random stores, moves and evictions, saves that are followed, late answers to
pulls, gaps, lives and lost links, over sockets.

At rest the table of remote chunks has exactly the keys that some tier of the owner has, and those of saves under way.
"""

import asyncio
import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvpool.clock import MonotonicClock
from kvpool.ids import NamespaceId
from kvpool.index.remote_chunks import DECLINED_NS, NodeName, RemoteChunks
from kvpool.key_column import KeyColumn
from kvpool.peers.back_off import BackOffSettings
from kvpool.peers.control.server import ControlServer
from kvpool.peers.following.follower import FollowSettings
from kvpool.peers.following.followers import Followers
from kvpool.server.peers.key_reporter import KeyReporter
from kvpool.states import SaveState
from tests.rigs.events.journal_rig import Rig, key, sums, words_of
from tests.rigs.nodes.longest_run import longest_run
from tests.rigs.nodes.peers import Fleet, Owner, Watcher, fleet, identity_of, until

SETTINGS = FollowSettings(
    wait_s=1.0,
    settled_s=0.0,
    peer_asked_per_s=10_000.0,
    asked_per_s=10_000.0,
    back_off=BackOffSettings(first_s=0.001, most_s=0.005),
)
ENGINES = NamespaceId(1)
LATE_NS = 10**9


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
        self.saves: list[tuple[int, list[list[int]]]] = []  # reservations, with the prompt of each chunk
        self.rig.journal._log._bytes_max = self._log_bytes
        loop = asyncio.get_running_loop()
        self.rig.journal.watch(loop)
        self.reporter = KeyReporter(self.rig.journal, loop)
        self.server: ControlServer = self._nodes.serve(
            Owner(), follows=self.reporter, node=identity_of("owner", self.life), address=address
        )

    def begin_save(self, names: list[int]) -> None:
        """An engine saves a prompt; its first layer has landed."""
        column = KeyColumn.of(key(names[: end + 1]) for end in range(len(names)))
        rig = self.rig
        made = rig.memory.reserve(rig.namespace.id, rig.namespace.size_class, b"", column.packed, rig.tick())
        prompts = [names[: at + 1] for at, state in enumerate(made.states) if state == SaveState.RESERVED]
        if prompts:
            self.saves.append((made.id, prompts))
            self.reporter.note_save(KeyColumn.of(map(key, prompts)))

    def end_save(self, chance: random.Random) -> None:
        """A save is committed, given up, or one after the other."""
        if not self.saves:
            return
        made, prompts = self.saves.pop(chance.randrange(len(self.saves)))
        count = chance.randrange(len(prompts) + 1)
        states = b""
        if count:
            words = b"".join(map(words_of, prompts[:count]))
            self.rig.headers.words.update((key(prompt), words_of(prompt)) for prompt in prompts[:count])
            states = self.rig.memory.commit(made, 0, sums(count), self.rig.tick(), words)
        self.rig.memory.end_reservation(made, self.rig.tick())
        stored = bytes([SaveState.STORED])
        self.reporter.end_save(KeyColumn.of(map(key, prompts)), len(states) - len(states.lstrip(stored)))

    def expected(self) -> set[bytes]:
        """What whoever follows it knows at rest. A flush may have taken what a save was to follow."""
        writing = {key(prompt) for made, prompts in self.saves for prompt in prompts}
        return set(self.rig.truth()) | writing

    def random_step(self, chance: random.Random) -> None:
        """One random operation of a daemon, or of an engine that saves."""
        drawn = chance.random()
        if drawn < 0.2:
            self.begin_save([chance.randrange(3), *(chance.randrange(2) for _ in range(chance.randrange(5)))])
        elif drawn < 0.4:
            self.end_save(chance)
        else:
            self.rig.random_step(chance)

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
        known, follower = followers.counts().get(node), followers._followers.get(node)
        return (
            known is not None
            and follower is not None
            and owner.rig.journal._feed.waiting == 0
            and known.last == known.newest == owner.rig.journal.newest
            and follower._saves == owner.reporter._saves._last
            and followers.is_current(node)
            and followers.known_of(node) == len(owner.expected())
            and not remote.pending_of(node)
        )

    await until(is_current, f"it is up to date: {followers.stats()}, {followers.fault_of(node)}")
    expected = owner.expected()
    later_ns = LATE_NS + DECLINED_NS
    for one in expected:
        assert longest_run(remote, KeyColumn.of([one]), 0, namespace=ENGINES, now_ns=later_ns).chunks == 1
    assert remote.verify() == []


def _answer_late(owner: Node, remote: RemoteChunks, chance: random.Random, node: NodeName) -> None:
    """The owner declines a chunk, as of some moment: whatever happened since."""
    known = sorted(owner.expected())
    if known:
        remote.decline(node, ENGINES, chance.choice(known), LATE_NS)


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
                owner.random_step(chance)
                if chance.random() < 0.2:
                    _answer_late(owner, remote, chance, node)
                if chance.random() < 0.05:
                    owner.cut()
                if chance.random() < 0.5:
                    await asyncio.sleep(0)
            dice = chance.random()
            if dice < 0.15:
                owner.restart()
            elif dice < 0.3:
                owner.cut()
            if chance.random() < 0.7:
                await _at_rest(owner, remote, followers, node)
        while owner.saves:
            owner.end_save(chance)
        await _at_rest(owner, remote, followers, node)
        gaps = followers.stats()["gaps"]
        followers.close()
        assert len(remote) == 0
        owner.end()
        return gaps


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_at_rest_a_follower_knows_exactly_what_its_peer_has(seed: int) -> None:
    note(f"seed {seed}")
    chance = random.Random(seed)
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("kvpool.server.peers.key_reporter.PAGE_KEYS", chance.randrange(1, 9))
        patch.setattr("kvpool.server.peers.save_notes.NOTES_ONCE", chance.choice((1, 4, 1024)))
        patch.setattr("kvpool.server.peers.key_reporter.EVENTS_BYTES_MAX", chance.choice((300, 128 << 10)))
        patch.setattr("kvpool.journal.journal.FEED_CHANGES_MAX", chance.choice((8, 65_536)))
        patch.setattr("kvpool.index.remote_chunks.KEYS_A_TURN", chance.choice((2, 4096)))
        asyncio.run(_compare(chance))


def test_small_buffers_force_gaps() -> None:
    """What the model is for happens in it."""
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("kvpool.journal.journal.FEED_CHANGES_MAX", 8)
        assert sum(asyncio.run(_compare(random.Random(seed))) for seed in range(5)) > 0
