"""Result of a self-probe, and how long one may take. Pure; any thread."""

from dataclasses import dataclass

STEP_TIMEOUT_S = 2.0
# The most round trips of one probe: connect, staging, release, and reserve, copy, commit, acquire for each attempt.
STEPS_MAX = 15


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of one probe: `failure` is empty when it was good."""

    failure: str
    ended_ns: int
    latency_s: float
