"""Supervision: reports of the daemon's health to the service manager, the log and operators.

Joins health, the self-probe and the service manager, which are independent. The manager gets WATCHDOG=1 only right after a good
probe of a daemon without problems: a daemon that hangs, answers wrongly or has lost a thread is restarted by it. A change
between healthy, degraded and unhealthy is logged once.

Threads: the control thread, but for `_on_probe`, on the probe's thread, which owns `_was` (unhealthy, degraded or empty).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool.clock import Clock
from kvpool.server.health.health import Health
from kvpool.server.health.probe_result import ProbeResult
from kvpool.server.health.systemd import ServiceManager

if TYPE_CHECKING:
    from kvpool.server.health.probe import SelfProbe

log = logging.getLogger(__name__)

# A service manager without a message for this time may kill a daemon that stops.
EXTENDED_S = 30.0
DRAINED_STATUS = "draining by an operator's order: loads are served, new saves are declined"


class Supervision:
    """Supervision of one daemon process."""

    def __init__(self, manager: ServiceManager, health: Health, clock: Clock) -> None:
        self._manager = manager
        self._health = health
        self._clock = clock
        self._probe: SelfProbe | None = None
        self._status = self._serving_status = ""
        self._is_draining = False
        self._was = ""

    def begin_serving(self, path: str, *, status: str, discard: Callable[[bytes], None]) -> None:
        """The socket at `path` is there. `discard` drops the chunk of a key and belongs on the control thread."""
        loop = asyncio.get_running_loop()

        def discard_later(key: bytes) -> None:
            loop.call_soon_threadsafe(discard, key)

        self._status = self._serving_status = status
        self._health.begin_serving()
        self._manager.ready(status)
        if self._health.probe_interval_s is not None:
            from kvpool.server.health.probe import (  # a client, which a daemon without probes has no use for
                Probe,
                SelfProbe,
            )

            self._probe = SelfProbe(
                Probe(path, discard_later),
                interval_s=self._health.probe_interval_s,
                clock=self._clock,
                on_result=self._on_probe,
            )

    def note_reloading(self, *, is_running: bool) -> None:
        """Report that the configuration is being read again, or that this has ended. A daemon that stops does not report it."""
        if self._is_draining:
            return
        if is_running:
            self._manager.reloading(self._clock.now_ns())
        else:
            self._manager.reloaded()

    def begin_draining(self) -> None:
        """Report that the daemon is stopping."""
        self._status = "draining: saves under way may still be committed, DRAM is being written to disk"
        self._is_draining = True
        self._health.begin_draining()
        self._manager.stopping(self._status)

    def note_drained(self, *, is_on: bool) -> None:
        """Report that an operator has ordered to decline new saves, or has ended that."""
        self._health.note_drained(is_on=is_on)
        if not self._is_draining:
            self._status = DRAINED_STATUS if is_on else self._serving_status
            self._manager.status(self._status)

    def go_on_draining(self) -> None:
        """Report that the daemon is still demoting."""
        self._manager.extend(EXTENDED_S)

    async def end_probe(self) -> None:
        """End the probe, while its connection is still served."""
        if self._probe is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._probe.stop)

    def describe_probing(self) -> str:
        """Part of the daemon's ready line."""
        interval_s = self._health.probe_interval_s
        return "self-probe off" if interval_s is None else f"self-probe every {interval_s:g} s"

    def info(self) -> dict[str, Any]:
        """Fields for operators."""
        report = self._health.report()
        return {
            "health": self._health.state(),
            "problems": list(report.problems),
            "probe_age_s": report.probe_age_s,
            "probe_latency_s": report.probe_latency_s,
            "early_ends": report.early_ends,
        }

    def _on_probe(self, result: ProbeResult) -> None:
        self._health.note_probe(result)
        report = self._health.report()
        if report.is_healthy:
            self._manager.alive()
        word = "unhealthy" if not report.is_healthy else "degraded" if report.problems else ""
        if word != self._was:
            self._was = word
            self._log_change(word, "; ".join(report.problems))

    def _log_change(self, word: str, problems: str) -> None:
        if word:
            log.error("%s: %s", word, problems)
            self._manager.status(f"{word}: {problems}")
        else:
            log.info("healthy again")
            self._manager.status(self._status)
