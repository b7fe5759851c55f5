"""Rates and latencies: how long bytes take from a disk or over the network, where others are under way too.

Each node has a link that sends, one that receives and a disk; each of the three serves one transfer after the other. A transfer
between two nodes takes the links of both. The store is never a bottleneck: a read from it takes the reader's link alone, and a
write, which nobody waits for, no time. Seconds of the trace. One thread.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of each node's network link and disk, and seconds before the first byte."""

    network_bytes_per_s: float
    network_latency_s: float
    disk_bytes_per_s: float
    disk_latency_s: float


class Links:
    """Links and disks of all nodes."""

    def __init__(self, nodes: int, rates: Rates) -> None:
        self._rates = rates
        self._sending_until_s = [0.0] * nodes
        self._receiving_until_s = [0.0] * nodes
        self._disk_until_s = [0.0] * nodes
        self.receiving_s = [0.0] * nodes  # in use so far
        self.sending_s = [0.0] * nodes

    def __repr__(self) -> str:
        return f"<Links of {len(self.sending_s)} nodes, {sum(self.sending_s):.1f} s sent>"

    def sending_until_s(self, node: int) -> float:
        """When the node's sending link is free."""
        return self._sending_until_s[node]

    def estimate_s(self, size: int, *, to: int, source: int | None, now_s: float) -> float:
        """How long a transfer takes that starts now, waiting included. `source` None: the store."""
        return self._start_s(to, source, now_s) + self._moving_s(size) - now_s

    def read_disk(self, size: int, *, node: int, now_s: float) -> float:
        """Read from a node's disk. Returns how long it takes, waiting included."""
        start_s = max(now_s, self._disk_until_s[node])
        end_s = start_s + size / self._rates.disk_bytes_per_s
        self._disk_until_s[node] = end_s
        return end_s + self._rates.disk_latency_s - now_s

    def move(self, size: int, *, to: int, source: int | None, now_s: float) -> float:
        """Move bytes to a node from another one, or from the store (None). Returns how long it takes, waiting included."""
        start_s = self._start_s(to, source, now_s)
        busy_s = size / self._rates.network_bytes_per_s
        self._receiving_until_s[to] = start_s + busy_s
        self.receiving_s[to] += busy_s
        if source is not None:
            self._sending_until_s[source] = start_s + busy_s
            self.sending_s[source] += busy_s
        return start_s + self._moving_s(size) - now_s

    def _start_s(self, to: int, source: int | None, now_s: float) -> float:
        free_s = self._receiving_until_s[to]
        return max(now_s, free_s if source is None else max(free_s, self._sending_until_s[source]))

    def _moving_s(self, size: int) -> float:
        return size / self._rates.network_bytes_per_s + self._rates.network_latency_s
