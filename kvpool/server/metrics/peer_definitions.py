"""Metric definitions of other nodes: what this one takes from them and gives to them. Absent where it has no peers.

Label sets are bounded: a node is labelled by its address as the source of members has it, never by a name of its own, and at
most `NODES_MAX` of them are, those with the first addresses; totals and the states count all. Pure functions; any thread.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvpool.peers.control.records import REFUSAL_CODES
from kvpool.server.metrics.measurements import Scrape
from kvpool.server.metrics.metric import Metric, Values, counter, gauge

# Nodes with metrics of their own in a scrape.
NODES_MAX = 64
PULL_FAILURES = ("refused", "busy", "unanswered", "empty", "queue_full", "unencrypted", "foreign", "other_transport")
STATES = ("following", "snapshot", "waiting", "suspended", "deferred", "refused", "connecting", "away")


def _peer(key: str) -> Callable[[Scrape], float | None]:
    """Absent too until the node serves others."""

    def read(now: Scrape) -> float | None:
        counted = now.pool.tiers.get("peer", {}).get(f"peer.{key}")
        return None if counted is None else float(counted)

    return read


def _peer_by(**keys: str) -> Callable[[Scrape], Values]:
    read = {value: _peer(key) for value, key in keys.items()}
    return lambda now: {(value,): found for value, one in read.items() if (found := one(now)) is not None}


def _states(now: Scrape) -> Values:
    counted = Counter(row["state"] for row in now.peers)
    return {(state,): float(counted[state]) for state in STATES} if "peer" in now.pool.tiers else {}


def _by_node(read: Callable[[dict[str, Any]], float | None]) -> Callable[[Scrape], Values]:
    def values(now: Scrape) -> Values:
        found = {(row["address"].removeprefix("tcp://"),): read(row) for row in now.peers[:NODES_MAX]}
        return {labels: value for labels, value in found.items() if value is not None}

    return values


PEER_METRICS: tuple[Metric, ...] = (
    gauge("kvpool_peers", "Known members of the fleet, by state.", _states, "", "state"),
    gauge("kvpool_peer_refused_members", "Nodes that the source of members names and peer.allow does not: they are no members.",
          _peer("members.refused")),
    counter("kvpool_peer_pulled_chunks", "Chunks taken from other nodes.", _peer("pulled_chunks"), "chunks"),
    counter("kvpool_peer_failed_chunks", "Chunks asked for that did not come: they were misses.",
            _peer("failed_chunks"), "chunks"),
    counter("kvpool_peer_read_bytes", "Bytes taken from other nodes.", _peer("read_bytes"), "bytes"),
    counter("kvpool_peer_sent_bytes", "Bytes sent to other nodes; those that nodes of this host copy themselves are not known.",
            _peer("offers.sent_bytes"), "bytes"),
    counter("kvpool_peer_failed_pulls", "Times that a node was asked and brought nothing: refused, without room at that moment "
            "(busy), unanswered, of chunks that the node no longer had (empty), more than the queue takes, offered in clear "
            "(unencrypted) or from another host than the node's (foreign), or begun by TransferEngine or NIXL that the node "
            "had no longer (other_transport).",
            _peer_by(**{reason: f"failed_pulls_{reason}" for reason in PULL_FAILURES}), "", "reason"),
    counter("kvpool_peer_begun_pulls", "Pulls that were begun, by the way of their bytes: shared memory of one host "
            "(shm), the stream (tcp), or rdma.",
            _peer_by(shm="shm.pulls", tcp="tcp.pulls", rdma="rdma.pulls"), "", "transport"),
    gauge("kvpool_peer_rdma_serving", "1 while TransferEngine or NIXL serves; absent where peer.transport chooses the stream.",
          _peer("rdma.serving")),
    counter("kvpool_peer_rdma_refusals", "Times that a node had not the same library and protocol: the stream was used.",
            _peer("rdma.refused")),
    counter("kvpool_peer_rdma_failed_reads", "Moves by TransferEngine or NIXL that failed, and those that did not end in time.",
            _peer_by(failed="rdma.failed_reads", late="rdma.late_reads"), "", "reason"),
    gauge("kvpool_peer_rdma_quarantined_bytes", "Bytes of the buffer that moves which were given up may still write.",
          _peer("rdma.quarantined_bytes"), "bytes"),
    counter("kvpool_peer_rdma_process_starts", "Times that the process of TransferEngine or NIXL began to serve.",
            _peer("rdma.process_starts")),
    counter("kvpool_peer_pull_requests", "Pulls that other nodes asked for, by what they were offered.",
            _peer_by(served="offers.pulls_served", empty="offers.pulls_empty", refused="offers.pulls_refused"), "", "outcome"),
    gauge("kvpool_peer_pulls_under_way", "Pulls that have not ended.", _peer("pulls_under_way")),
    gauge("kvpool_peer_known_chunks", "Pairs of chunk and node that are known.", _peer("known_chunks"), "chunks"),
    counter("kvpool_peer_forgotten_chunks", "Pairs that were known and made room for newer ones (evicted), and those beyond "
            "the share of their node (left_out).",
            _peer_by(evicted="known_evicted_chunks", left_out="known_left_out_chunks"), "chunks", "reason"),
    counter("kvpool_peer_snapshots", "Snapshots of other nodes' chunks that were begun.", _peer("followed.snapshots")),
    counter("kvpool_peer_event_gaps", "Gaps in what other nodes report.", _peer("followed.gaps")),
    counter("kvpool_peer_failed_refreshes", "Times that DNS or etcd gave no members, or not in time.",
            _peer("members.failed_refreshes")),
    counter("kvpool_peer_failed_handshakes", "Connections to other nodes that failed because the keys are not each other's.",
            _peer("links.failed_handshakes")),
    counter("kvpool_peer_refused_handshakes", "Connections of other nodes whose keys are not allowed.",
            _peer("asked.refused_handshakes")),
    counter("kvpool_peer_ended_connections", "Connections of other nodes that were shut down without a Hello: none came in "
            "time (silent), or there were too many (crowded).",
            _peer_by(silent="asked.silent_connections", crowded="asked.crowded_connections"), "connections", "reason"),
    counter("kvpool_peer_refused_messages", "Messages of other nodes that were refused, by code.",
            _peer_by(**{code: f"asked.refused.{code}" for code in REFUSAL_CODES}), "messages", "code"),
    gauge("kvpool_peer_node_known_chunks", "Chunks that a node is known to have.",
          _by_node(lambda row: row["known_chunks"]), "chunks", "peer"),
    counter("kvpool_peer_node_read_bytes", "Bytes taken from a node.",
            _by_node(lambda row: row["read_bytes"]), "bytes", "peer"),
    counter("kvpool_peer_node_pulls", "Pulls from a node.", _by_node(lambda row: row["pulls"]), "", "peer"),
    counter("kvpool_peer_node_failed_pulls", "Pulls from a node that failed there, if only for a moment.",
            _by_node(lambda row: row["failures"]), "", "peer"),
    gauge("kvpool_peer_node_bytes_per_second", "Measured bytes in a second by which a load from a node is estimated.",
          _by_node(lambda row: row["bytes_per_s"]), "", "peer"),
    gauge("kvpool_peer_node_latency_seconds", "Measured time until the first byte of a pull from a node.",
          _by_node(lambda row: None if row["latency_us"] is None else row["latency_us"] / 1e6), "seconds", "peer"),
)  # fmt: skip
