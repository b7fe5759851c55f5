"""Remote chunks against dicts of sets: random events, lives and turns of four nodes, and a reader of the table."""

import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import kvpool_native
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.key_column import KeyColumn
from tests.rigs.nodes.longest_run import NO_RUN, longest_run

EPOCH = bytes(16)
NODES = [NodeName(f"node-{number}") for number in range(kvpool_native.OWNERS_PER_CHUNK)]
KEYS = [kvpool_native.blake3(number.to_bytes(4, "little")) for number in range(300)]


class Model:
    """What each node has, and what waits in its queue, by the rules."""

    def __init__(self) -> None:
        self.chunks: dict[NodeName, set[bytes]] = {}
        self.pending: dict[NodeName, list[tuple[bool, bytes]]] = {}

    def begin(self, node: NodeName) -> None:
        self.chunks[node], self.pending[node] = set(), []

    def end(self, node: NodeName) -> None:
        del self.chunks[node], self.pending[node]

    def queue(self, node: NodeName, is_stored: bool, keys: list[bytes]) -> None:
        self.pending[node] += [(is_stored, key) for key in keys]

    def catch_up(self, left: dict[NodeName, int]) -> None:
        """Apply what the queues no longer have."""
        for node, changes in self.pending.items():
            done = len(changes) - left[node]
            for is_stored, key in changes[:done]:
                (self.chunks[node].add if is_stored else self.chunks[node].discard)(key)
            del changes[:done]

    def run(self, node: NodeName, keys: list[bytes], first: int) -> int:
        missing = (index for index in range(first, len(keys)) if keys[index] not in self.chunks[node])
        return next(missing, len(keys)) - first


def _step(remote: RemoteChunks, model: Model, chance: random.Random) -> None:
    node = chance.choice(NODES)
    choice = chance.random()
    if node not in model.chunks:
        remote.join(node)
        model.begin(node)
    elif choice < 0.03:
        remote.leave(node)
        model.end(node)
    elif choice < 0.06:
        remote.clear(node)
        model.begin(node)
    elif choice < 0.8:
        first = chance.randrange(len(KEYS))
        keys = KEYS[first : first + chance.randrange(60)]
        is_stored = chance.random() < 0.7
        assert (remote.note_stored if is_stored else remote.note_removed)(node, KeyColumn.of(keys))
        model.queue(node, is_stored, keys)
    else:
        has_more = remote.advance()
        left = {name: remote.pending_of(name) for name in model.chunks}
        assert has_more or not any(left.values())
        model.catch_up(left)


def _assert_equal(remote: RemoteChunks, view: kvpool_native.RemoteView, model: Model, chance: random.Random) -> None:
    assert len(remote) == sum(len(chunks) for chunks in model.chunks.values())
    for node, chunks in model.chunks.items():
        assert remote.count_of(node) == len(chunks)
    for key in chance.sample(KEYS, 30):
        assert view.has(key) == any(key in chunks for chunks in model.chunks.values())
    begin = chance.randrange(len(KEYS))
    keys, avoid = KEYS[begin : begin + 100], chance.sample(NODES, chance.randrange(3))
    first = chance.randrange(len(keys) + 1)
    found = longest_run(remote, KeyColumn.of(keys), first, avoid)
    runs = {node: model.run(node, keys, first) for node in model.chunks if node not in avoid}
    assert found.chunks == max(runs.values(), default=0)
    assert found == NO_RUN if not found.chunks else runs[found.node] == found.chunks


def _compare(chance: random.Random) -> None:
    model = Model()
    remote = RemoteChunks(20_000, EPOCH)
    view = kvpool_native.RemoteView(kvpool_native.Mapping.attach(remote.mapping.fd, remote.mapping.size, False))
    for _ in range(chance.randrange(20, 150)):
        _step(remote, model, chance)
        _assert_equal(remote, view, model, chance)
    assert remote.verify() == []
    while remote.advance():
        pass
    model.catch_up(dict.fromkeys(model.chunks, 0))
    _assert_equal(remote, view, model, chance)
    assert remote.stats()["evicted_chunks"] == remote.stats()["pending_keys"] == 0
    assert remote.verify() == []


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 100))
def test_random_events_agree_with_sets(seed: int, keys_a_turn: int) -> None:
    note(f"seed {seed}")
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("kvpool.index.remote_chunks.KEYS_A_TURN", keys_a_turn)
        _compare(random.Random(seed))
