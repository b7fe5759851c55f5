"""Settings of the peer tier: bounds of its pulls."""

from dataclasses import dataclass, field

from kvpool.peers.circuit_breaker import BreakerSettings
from kvpool.tiers.peer.pace import PaceSettings


@dataclass(frozen=True, slots=True)
class PeerTierSettings:
    """Bounds of pulls. `answer_s`: for a node's offer. `stall_s`: without a byte. A pull may take `pull_s`, and as long beside
    as its bytes take at `least_bytes_per_s`. `threads`: that receive. `pulls_max`: under way at once. `is_encrypted`: plain
    streams are refused; one that the node encrypts is taken in any case."""

    answer_s: float = 2.0
    stall_s: float = 2.0
    pull_s: float = 5.0
    least_bytes_per_s: int = 50 << 20
    threads: int = 4
    pulls_max: int = 4096
    is_encrypted: bool = False
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    pace: PaceSettings = field(default_factory=PaceSettings)

    def timeout_s(self, size: int) -> float:
        """The longest time for a pull of so many bytes."""
        return self.pull_s + size / self.least_bytes_per_s
