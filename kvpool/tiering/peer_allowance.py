"""Allowance of other nodes on this node's disks: the bytes that are promoted for them at once.

Reads of engines here come first: those for other nodes wait behind them in the tier's queue, and never fill it. Control thread
only. Invariant: `taken` is the sum of the promotions under way for other nodes.
"""

UNBOUNDED = 1 << 62


class PeerAllowance:
    """See the module. `taken`: bytes, now."""

    def __init__(self, bytes_max: int = UNBOUNDED) -> None:
        assert bytes_max > 0
        self._bytes_max = bytes_max
        self.taken = 0

    def __repr__(self) -> str:
        return f"<PeerAllowance {self.taken}/{self._bytes_max} bytes>"

    def chunks(self, chunk_bytes: int) -> int:
        """How many more chunks may be promoted now. One always may where none is: a large chunk is no reason for none."""
        left = (self._bytes_max - self.taken) // chunk_bytes
        return max(left, 0 if self.taken else 1)

    def take(self, size: int) -> None:
        """So many bytes are being promoted."""
        self.taken += size

    def give_back(self, size: int) -> None:
        """So many bytes are no longer."""
        assert size <= self.taken
        self.taken -= size
