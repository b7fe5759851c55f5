"""Health of the daemon: whether it can do its work, by observation and not by its mere existence.

    STARTING ──begin_serving, first probe good──► READY ──begin_draining──► DRAINING
                                                   │ ▲
                         problem: probe, thread    ▼ │ the problem has gone
                                                UNHEALTHY        (from any state)

DRAINING is also the state of a daemon that an operator has ordered to take no more saves: it serves loads and is probed, and
another order ends it.

READY is DEGRADED while something configured is missing that a restart would not bring back (an SSD tier that cannot be opened):
the rest serves, no restart follows, and reports name the problem.

Gathers three things: whether the daemon serves, whether its background threads live, and how the last self-probe ended
and when. A probe that has not ended for a long time is a problem too. This module tests nothing and reports to nobody.

Any thread may call it. Lock: `_lock`, never held across a call.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.clock import NS_PER_S, Clock
from kvpool.server.health.probe_result import STEP_TIMEOUT_S, STEPS_MAX, ProbeResult

PROBE_INTERVAL_S = 10.0
# Three probes fit in a watchdog's interval, so that one that fails on a stalled machine does not end the daemon.
PROBES_PER_WATCHDOG = 3


@dataclass(frozen=True, slots=True)
class HealthReport:
    """One look. `is_healthy`: no problems but shortcomings. `is_ready`: serves, is healthy, its last probe, if any, was good.

    `probe_age_s` and `probe_latency_s` are of the last probe that ended; None where none has. `early_ends`: lives of the daemon
    before this one, in a row, that were killed, crashed or could not serve.
    """

    is_ready: bool
    is_healthy: bool
    problems: tuple[str, ...]
    probe_age_s: float | None
    probe_latency_s: float | None
    early_ends: int = 0


class Health:
    """The health of one daemon.

    `problems_of_pool` may be called from any thread, and so may `shortcomings_of_pool`: problems that a restart would not
    solve. A self-probe runs (`probe_interval_s`) when a service manager watches, or every `probe_every_s` when health can be
    asked from outside; without either nothing wakes an idle daemon.
    """

    def __init__(
        self,
        problems_of_pool: Callable[[], list[str]],
        clock: Clock,
        *,
        shortcomings_of_pool: Callable[[], list[str]] = list,
        watchdog_interval_s: float | None = None,
        probe_every_s: float | None = None,
        early_ends: int = 0,
    ) -> None:
        self._early_ends = early_ends
        self._problems_of_pool = problems_of_pool
        self._shortcomings_of_pool = shortcomings_of_pool
        self._clock = clock
        self.probe_interval_s = _probe_interval_s(watchdog_interval_s=watchdog_interval_s, probe_every_s=probe_every_s)
        self._lock = threading.Lock()
        self._is_serving = False  # guarded by _lock
        self._is_draining = False  # guarded by _lock
        self._is_drained = False  # guarded by _lock
        self._serving_since_ns = clock.now_ns()  # guarded by _lock
        self._probe: ProbeResult | None = None  # guarded by _lock

    def __repr__(self) -> str:
        return f"<Health {self.state()}>"

    def begin_serving(self) -> None:
        """The socket is there."""
        with self._lock:
            self._is_serving = True
            self._serving_since_ns = self._clock.now_ns()

    def begin_draining(self) -> None:
        """New connections are refused from now on."""
        with self._lock:
            self._is_draining = True

    def note_drained(self, *, is_on: bool) -> None:
        """New saves are declined from now on, by an operator's order, or (False) taken again. Loads are served, and probed."""
        with self._lock:
            self._is_drained = is_on

    def note_probe(self, result: ProbeResult) -> None:
        """A probe has ended."""
        with self._lock:
            self._probe = result

    def report(self) -> HealthReport:
        """The report of this moment."""
        now_ns = self._clock.now_ns()
        with self._lock:
            is_served = self._is_serving and not self._is_draining
            probe, is_open = self._probe, is_served and not self._is_drained
            last_ns = self._serving_since_ns if probe is None else probe.ended_ns
            is_probed = is_served and self.probe_interval_s is not None
        problems = list(self._problems_of_pool())
        if probe is not None and probe.failure:
            problems.append(f"self-probe: {probe.failure}")
        if is_probed and (now_ns - last_ns) / NS_PER_S > self._probe_age_max_s():
            problems.append(f"self-probe: none has ended for {(now_ns - last_ns) / NS_PER_S:.0f} s")
        return HealthReport(
            is_ready=is_open and not problems and not (is_probed and probe is None),
            is_healthy=not problems,
            problems=(*problems, *self._shortcomings_of_pool()),
            probe_age_s=None if probe is None else max(0, now_ns - probe.ended_ns) / NS_PER_S,
            probe_latency_s=None if probe is None else probe.latency_s,
            early_ends=self._early_ends,
        )

    def state(self) -> str:
        """One word: starting, ready, degraded, draining or unhealthy."""
        report = self.report()
        if not report.is_healthy:
            return "unhealthy"
        with self._lock:
            if self._is_draining or self._is_drained:
                return "draining"
        if not report.is_ready:
            return "starting"
        return "degraded" if report.problems else "ready"

    def _probe_age_max_s(self) -> float:
        """Two intervals and a probe whose every step takes its full time: a greater age means that the thread has ended or
        hangs."""
        assert self.probe_interval_s is not None
        return 2 * self.probe_interval_s + STEPS_MAX * STEP_TIMEOUT_S


def _probe_interval_s(*, watchdog_interval_s: float | None, probe_every_s: float | None) -> float | None:
    if watchdog_interval_s is not None:
        return min(watchdog_interval_s / PROBES_PER_WATCHDOG, probe_every_s or PROBE_INTERVAL_S)
    return probe_every_s
