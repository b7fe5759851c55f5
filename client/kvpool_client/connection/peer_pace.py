"""Pace of another node: how long chunks of it take until they are here, as the daemon has measured. Values; any thread."""

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerPace:
    """`wait_s`: before the first byte; then chunks come at `bytes_per_s`."""

    bytes_per_s: float
    wait_s: float

    def cost_s(self, size: int) -> float:
        """How long so many bytes take; nothing for none."""
        return self.wait_s + size / self.bytes_per_s if size else 0.0


# Of a node that was not measured yet (guess).
FIRST_PEER_PACE = PeerPace(1e9, 1e-3)


def pace_in(ns_per_mib: int, latency_us: int) -> PeerPace | None:
    """The pace that the table of other nodes' chunks has; None where it has none."""
    return PeerPace(_MIB * 1e9 / ns_per_mib, latency_us / 1e6) if ns_per_mib else None
