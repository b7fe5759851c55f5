"""Offloads: saves of tree nodes' pages, on a thread of their own, reported in the order in which they were asked.

SGLang locks a node until its offload is reported, and counts reports alone: the oldest report is the oldest offload's. So an
offload that fails, is refused because too many are under way, or is withdrawn is reported all the same, as one that stored
nothing, once those before it are. Scheduler thread, but for the line's own.
"""

from collections import deque
from collections.abc import Callable

from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.job_line import JobLine

# Nodes whose pages may not be overwritten at one time (a guess).
OFFLOADS_MAX = 256


class _Offload:
    """One that was asked for. `success`: None while it is under way."""

    def __init__(self) -> None:
        self.success: bool | None = None

    def end(self, result: bool | None) -> None:
        """It has ended."""
        self.success = bool(result)


class Offloads:
    """See the module."""

    def __init__(self, guard: FailureGuard) -> None:
        self._line = JobLine("kvpool-offload", guard, jobs_max=OFFLOADS_MAX)
        self._asked: deque[_Offload] = deque()

    def add(self, run: Callable[[], bool]) -> bool:
        """Have `run` store a node's pages. False: too many are under way, and nothing of it will be stored."""
        offload = _Offload()
        self._asked.append(offload)
        return self._line.submit("offload", run, offload.end)

    def add_ended(self, success: bool) -> None:
        """One that needs no work."""
        offload = _Offload()
        offload.end(success)
        self._asked.append(offload)

    def count_ended(self) -> int:
        """How many can be taken: the oldest ones, up to one that is under way."""
        return next((number for number, each in enumerate(self._asked) if each.success is None), len(self._asked))

    def take_ended(self) -> bool:
        """Whether the oldest one has stored everything. REQUIRES: it has ended."""
        return bool(self._asked.popleft().success)

    def end_all(self) -> None:
        """Withdraw those that have not begun, wait for the one that runs, and forget their reports."""
        self._line.drain(0.0)
        self._asked.clear()

    def close(self) -> None:
        """The same, and none begins afterwards. Idempotent."""
        self._line.close()
        self._asked.clear()
