"""Chunks between two nodes through the bindings: what arrives, what is refused, and what ends."""

import pytest

from kvpool_native import ExtentServer, OfferOutcome, PullOutcome, PullQueue
from tests.rigs.native_directory import EXTENTS
from tests.rigs.transfer.stream_node import DONE, EXTENT_BYTES, LONG_S, Node, collected, payload


def ends(queue: PullQueue, count: int) -> list[PullOutcome]:
    return sorted(collected(queue, queue.take_outcomes, count), key=lambda outcome: outcome.chunk)


def offers(server: ExtentServer, count: int) -> list[OfferOutcome]:
    return collected(server, server.take_outcomes, count)


@pytest.mark.parametrize("connections", [1, 2])
def test_chunks_arrive_with_their_bytes(connections: int) -> None:
    owner, puller = Node(5, is_owner=True), Node(5, is_owner=False)
    server, queue = owner.serve(), puller.queue()
    number, refusal = owner.offer(server, bytes(32), connections=connections)
    job = puller.pull(queue, server.port, bytes(32), connections=connections)
    assert (number > 0, refusal, job > 0) == (True, 0, True)
    for name, outcome in enumerate(ends(queue, 5)):
        assert (outcome.job, outcome.chunk, outcome.status, outcome.fault) == (job, name, DONE, "")
        assert outcome.received_bytes == EXTENTS * EXTENT_BYTES
        assert 0 < outcome.first_extent_us <= outcome.elapsed_us
        assert puller.chunk(name) == payload(name)
    (ended,) = offers(server, 1)
    assert (ended.offer, ended.end, ended.sent_bytes) == (number, 0, 5 * EXTENTS * EXTENT_BYTES)
    assert server.stats()["connections"] == connections
    assert queue.stats()["pulled_chunks"] == 5
    assert server.stop(LONG_S)
    assert queue.stop(LONG_S)


def test_what_cannot_be_is_refused() -> None:
    node = Node(2, is_owner=True)
    server, queue = node.serve(), node.queue()
    with pytest.raises(ValueError, match="32 bytes"):
        node.offer(server, bytes(31))
    with pytest.raises(ValueError, match="at most one for each chunk"):
        node.offer(server, bytes(32), connections=3)
    with pytest.raises(ValueError, match="timeout_s"):
        node.offer(server, bytes(32), timeout_s=0)
    with pytest.raises(ValueError, match="positive"):
        node.pull(queue, server.port, bytes(32), extents=0)
    with pytest.raises(ValueError, match="outside the arena"):
        node.pull(queue, server.port, bytes(32), extents=1 << 31)
    with pytest.raises(ValueError, match="threads"):
        node.serve(threads=0)
    with pytest.raises(OSError, match="numeric"):
        node.serve(address="localhost")
