"""Whether the daemon can do its work: ready for requests, and free of problems.

Holds no state: what is asked of it is asked of others then. Control thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthReport:
    """One look. `is_ready`: requests are served. `is_healthy`: no problems. The probe's numbers are None without one."""

    is_ready: bool
    is_healthy: bool
    problems: tuple[str, ...]
    probe_age_s: float | None
    probe_latency_s: float | None


class Health:
    """The health of one daemon."""

    def __init__(self, is_ready: Callable[[], bool], problems: Callable[[], list[str]]) -> None:
        self._is_ready = is_ready
        self._problems = problems

    def report(self) -> HealthReport:
        """How it is now."""
        problems = tuple(self._problems())
        return HealthReport(
            is_ready=self._is_ready() and not problems,
            is_healthy=not problems,
            problems=problems,
            probe_age_s=None,
            probe_latency_s=None,
        )
