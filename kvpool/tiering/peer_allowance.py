"""Allowance of other nodes on this node's disks: the bytes that are promoted for them at once.

Reads of engines here come first: those for other nodes wait behind them in the tier's queue, and never fill it. One node has
at most PEER_PART of what the others leave. Control thread only. Invariant: `taken` is the sum of the promotions under way for
other nodes, and of what each of them has.
"""

from collections import Counter

from kvpool.ids import ConnectionId

UNBOUNDED = 1 << 62
PEER_PART = 0.75


class PeerAllowance:
    """See the module. `taken`: bytes, now."""

    def __init__(self, bytes_max: int = UNBOUNDED) -> None:
        assert bytes_max > 0
        self._bytes_max = bytes_max
        self._taken_by: Counter[ConnectionId] = Counter()
        self.taken = 0

    def __repr__(self) -> str:
        return f"<PeerAllowance {self.taken}/{self._bytes_max} bytes>"

    def chunks(self, peer: ConnectionId, chunk_bytes: int) -> int:
        """How many more chunks may be promoted for a node now. One always may where none is: a large chunk is no reason for
        none."""
        own = self._taken_by[peer]
        left = int(PEER_PART * (self._bytes_max - self.taken + own)) - own
        return max(left // chunk_bytes, 0 if self.taken else 1)

    def take_bytes(self, peer: ConnectionId, size: int) -> None:
        """So many bytes are being promoted for a node."""
        self.taken += size
        self._taken_by[peer] += size

    def give_back(self, peer: ConnectionId, size: int) -> None:
        """So many bytes are no longer."""
        assert size <= self._taken_by[peer]
        self.taken -= size
        self._taken_by[peer] -= size
        if not self._taken_by[peer]:
            del self._taken_by[peer]
