"""Remote chunks: lives of nodes, bounded turns and queues, a full table, wrong hints."""

import mmap

import numpy as np
import pytest

import kvpool_native
from kvpool.ids import NamespaceId
from kvpool.index.remote_chunks import (
    DECLINED_MAX,
    DECLINED_NS,
    KEYS_A_TURN,
    PENDING_KEYS_MAX,
    NodeName,
    RemoteChunks,
    RemoteRun,
)
from tests.rigs.nodes.following import column
from tests.rigs.nodes.longest_run import NO_RUN, longest_run
from tests.rigs.parts import served

EPOCH = bytes(range(16))
ONE, OTHER = NodeName("one"), NodeName("other")
SEED = bytes(range(1, 17))
PACES_BYTES = 4096 * 8
ENGINES, OTHERS = NamespaceId(1), NamespaceId(2)


def remote_of(*nodes: NodeName, pairs: int = 10_000) -> RemoteChunks:
    remote = RemoteChunks(pairs, EPOCH, SEED)
    for node in nodes:
        remote.join(node)
    return remote


def settle(remote: RemoteChunks) -> int:
    """Advance until nothing is left. How many turns it took."""
    turns = 1
    while remote.advance():
        turns += 1
    assert remote.verify() == []
    return turns


def test_chunks_are_stored_renewed_and_removed() -> None:
    remote, keys = remote_of(ONE), column(0, 3)
    assert remote.note_stored(ONE, keys)
    assert remote.note_stored(ONE, keys[:1])
    assert remote.note_removed(ONE, keys[2:])
    settle(remote)
    assert longest_run(remote, keys, 0) == RemoteRun(ONE, 2)


def test_a_new_life_of_a_node_ends_its_chunks_at_once_and_drops_its_queue() -> None:
    remote, keys = remote_of(ONE, OTHER), column(0, 9000)
    remote.note_stored(ONE, keys)
    remote.note_stored(OTHER, keys[:10])
    settle(remote)
    remote.note_stored(ONE, column(9000, 9100))
    remote.clear(ONE)
    assert (remote.count_of(ONE), remote.pending_of(ONE)) == (0, 0)
    assert longest_run(remote, keys, 0) == RemoteRun(OTHER, 10)
    assert remote.verify() == []
    remote.note_stored(ONE, keys[:20])
    settle(remote)
    assert longest_run(remote, keys, 0) == RemoteRun(ONE, 20)
    assert len(remote) == 30


def test_a_turn_is_bounded_and_a_node_with_much_to_apply_does_not_keep_the_others_waiting() -> None:
    remote = remote_of(ONE, OTHER, pairs=100_000)
    assert remote.note_stored(ONE, column(0, 3 * KEYS_A_TURN))
    assert remote.note_stored(OTHER, column(0, 10))
    assert remote.advance()
    assert len(remote) == KEYS_A_TURN
    assert remote.advance()
    assert remote.count_of(OTHER) == 10
    assert settle(remote) == 2
    assert len(remote) == 3 * KEYS_A_TURN + 10


def test_a_full_queue_takes_nothing() -> None:
    remote = remote_of(ONE, OTHER, pairs=200_000)
    assert remote.note_stored(ONE, column(0, PENDING_KEYS_MAX))
    assert not remote.note_stored(ONE, column(0, 1))
    assert not remote.note_removed(ONE, column(0, 1))
    assert remote.note_stored(OTHER, column(0, 1))
    assert remote.pending_of(ONE) == PENDING_KEYS_MAX
    settle(remote)
    assert remote.note_removed(ONE, column(0, 1))
    settle(remote)
    assert remote.count_of(ONE) == PENDING_KEYS_MAX - 1


def test_a_full_table_evicts_the_oldest_and_stays_in_its_bound() -> None:
    remote = remote_of(ONE, pairs=2000)
    size = remote.mapping.size
    for first in range(0, 20_000, 1000):
        assert remote.note_stored(ONE, column(first, first + 1000))
        settle(remote)
    stats = remote.stats()
    assert stats["chunks"] + stats["evicted_chunks"] == 20_000
    assert stats["chunks"] <= stats["chunks_max"]
    assert remote.mapping.size == size <= 2000 * 16 + PACES_BYTES
    assert longest_run(remote, column(19_500, 20_000), 0).chunks == 500
    assert longest_run(remote, column(0, 10), 0) == NO_RUN


def test_a_node_among_others_has_a_share_and_gets_room_again_when_its_chunks_go() -> None:
    remote = remote_of(ONE, OTHER, pairs=2000)
    assert remote.note_stored(OTHER, column(50_000, 50_900))
    for first in range(0, 20_000, 1000):
        assert remote.note_stored(ONE, column(first, first + 1000))
        settle(remote)
    assert (remote.count_of(ONE), remote.count_of(OTHER)) == (1000, 900)
    assert longest_run(remote, column(50_000, 50_900), 0) == RemoteRun(OTHER, 900)
    assert remote.stats()["left_out_chunks"] == 19_000
    remote.note_removed(ONE, column(0, 100))
    remote.note_stored(ONE, column(30_000, 30_200))
    settle(remote)
    assert remote.count_of(ONE) == 1000
    assert longest_run(remote, column(30_000, 30_200), 0) == RemoteRun(ONE, 100)
    remote.join(NodeName("third"))
    remote.note_stored(ONE, column(30_100, 30_200))  # beyond a share that has become smaller
    settle(remote)
    assert remote.count_of(ONE) == 1000, "what it has stays"
    remote.leave(OTHER)
    remote.leave(NodeName("third"))
    remote.note_stored(ONE, column(30_100, 30_200))
    settle(remote)
    assert remote.count_of(ONE) > 1000


def test_a_life_beyond_the_numbers_waits_until_one_is_free() -> None:
    nodes = [NodeName(f"node-{number}") for number in range(4096)]
    remote = remote_of(*nodes, pairs=50_000)  # the last one without a number
    assert remote.note_stored(nodes[0], column(0, 10))
    assert remote.note_stored(nodes[-1], column(0, 5))
    assert not remote.advance()  # another turn changes nothing
    assert (remote.count_of(nodes[0]), remote.count_of(nodes[-1]), remote.pending_of(nodes[-1])) == (10, 0, 5)
    assert remote.verify() == []
    remote.leave(nodes[0])
    settle(remote)
    assert longest_run(remote, column(0, 10), 0) == RemoteRun(nodes[-1], 5)
    remote.clear(nodes[-1])
    assert remote.verify() == []


def test_the_table_is_checked_in_parts() -> None:
    remote = remote_of(ONE, pairs=100_000)
    assert served(remote.compare_shared()) == []
    assert remote.note_stored(ONE, column(0, 5000))
    settle(remote)
    assert served(remote.compare_shared()) == []
    entries = remote.mapping.view()[4096:].view(np.uint64)
    entries[entries == 0] = 1 << 16 | 1 << 40  # twice in each bucket
    assert len(served(remote.compare_shared())) > 1000
    assert remote.verify()


def test_nobody_else_can_write_the_table() -> None:
    remote = remote_of(ONE)
    with pytest.raises(PermissionError):
        mmap.mmap(remote.mapping.fd, remote.mapping.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="map"):
        kvpool_native.Mapping.attach(remote.mapping.fd, remote.mapping.size, writable=True)


def test_a_new_life_keeps_the_pace_and_a_node_that_comes_back_has_none() -> None:
    remote = remote_of(ONE)
    view = kvpool_native.RemoteView(remote.mapping)
    remote.set_pace(ONE, (7, 8))
    remote.clear(ONE)
    remote.note_stored(ONE, column(0, 1))
    settle(remote)
    assert view.pace_of(column(0, 1)[0]) == (7, 8)
    remote.leave(ONE)
    remote.set_pace(ONE, (9, 9))
    remote.join(ONE)
    remote.note_stored(ONE, column(0, 1))
    settle(remote)
    assert view.pace_of(column(0, 1)[0]) == (0, 0)


def test_what_a_node_declines_is_passed_over_for_a_while_by_engines_of_that_namespace_alone() -> None:
    remote = remote_of(ONE, OTHER)
    keys = column(0, 20)
    remote.note_stored(ONE, keys)
    remote.note_stored(OTHER, column(0, 8))
    settle(remote)
    remote.decline(ONE, ENGINES, keys[12], 1000)
    assert longest_run(remote, keys, 0, namespace=ENGINES, now_ns=1000) == RemoteRun(ONE, 12)
    assert longest_run(remote, keys, 5, namespace=ENGINES, now_ns=1000) == RemoteRun(ONE, 7)
    assert longest_run(remote, keys, 13, namespace=ENGINES, now_ns=1000) == RemoteRun(ONE, 7)
    remote.decline(ONE, ENGINES, keys[4], 2000)
    assert longest_run(remote, keys, 0, namespace=ENGINES, now_ns=2000) == RemoteRun(OTHER, 8)
    assert longest_run(remote, keys, 4, [OTHER], namespace=ENGINES, now_ns=2000) == NO_RUN
    assert longest_run(remote, keys, 0, namespace=OTHERS, now_ns=2000) == RemoteRun(ONE, 20)
    assert longest_run(remote, keys, 0, namespace=ENGINES, now_ns=1000 + DECLINED_NS) == RemoteRun(OTHER, 8)
    assert longest_run(remote, keys, 0, namespace=ENGINES, now_ns=2000 + DECLINED_NS) == RemoteRun(ONE, 20)
    assert remote.count_of(ONE) == 20
    remote.decline(NodeName("gone"), ENGINES, keys[0], 2000)


def test_an_announcement_or_a_new_life_ends_what_a_node_declined() -> None:
    remote = remote_of(ONE)
    keys = column(0, 20)
    for number in (3, 7):
        remote.note_stored(ONE, keys)
        remote.decline(ONE, ENGINES, keys[number], 0)
    settle(remote)
    assert longest_run(remote, keys, 0, namespace=ENGINES, now_ns=1).chunks == 7
    remote.note_stored(ONE, column(7, 8))
    assert longest_run(remote, keys, 0, namespace=ENGINES, now_ns=1).chunks == 20
    remote.decline(ONE, ENGINES, keys[0], 1)
    remote.clear(ONE)
    remote.note_stored(ONE, keys)
    settle(remote)
    assert longest_run(remote, keys, 0, namespace=ENGINES, now_ns=1).chunks == 20


def test_what_is_remembered_of_declines_is_bounded() -> None:
    remote = remote_of(ONE)
    keys = column(0, DECLINED_MAX + 5)
    remote.note_stored(ONE, keys)
    settle(remote)
    for number, key in enumerate(keys):
        remote.decline(ONE, ENGINES, key, number)
    assert longest_run(remote, keys, 0, namespace=ENGINES, now_ns=DECLINED_MAX).chunks == 5
    remote.decline(ONE, ENGINES, keys[0], DECLINED_NS + DECLINED_MAX + 5)
    assert len(remote._nodes[ONE].declined) == 1
