"""Set loads: chunks of a set brought into an engine's memory part by part, each under a lease, the next one leased meanwhile.

What a lease leaves out, or the end of its connection takes from it, is leased again, a few at a time and ASKED_MAX times at
most. The next part is leased on a thread of its own: whoever loads one can watch it, however long a disk takes for the next.
What other nodes have is leased PULLS_AT_ONCE at most, and nothing ahead of it.

Invariant: when a load has returned, it has no lease. Any thread.
"""

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Event
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.states import PEER
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.job_line import JobLine
from kvpool_client.engines.lease_size import ASKED_MAX, LeaseSize
from kvpool_client.named_keys import Names
from kvpool_client.pool import Pool
from kvpool_client.verbs.lease import Lease

# Of chunks that other nodes have, in one lease: each is pulled alone, and a daemon asks a node for so many without waiting.
PULLS_AT_ONCE = 12
# Leases ahead that wait for their turn: more than an adapter has threads, each of which has one.
AHEAD_MAX = 64
# Threads that ask for them: as many as an adapter has for its loads.
AHEAD_THREADS = 4
# States of chunks that a lease left out, or that its connection's end took from it.
_LEFT_OUT = ("absent", "gone", "disconnected")

Places = npt.NDArray[np.intp]


class SetLoads:
    """See the module."""

    def __init__(self, pool: Pool, guard: FailureGuard, *, timeout_s: float) -> None:
        """`timeout_s`: the Pool's."""
        self._pool = pool
        self._size = LeaseSize(pool, timeout_s=timeout_s)
        self._line = JobLine("kvpool-ahead", guard, jobs_max=AHEAD_MAX, threads=AHEAD_THREADS)

    def load(
        self,
        names: Names,
        load_part: Callable[[Lease, Places], list[str] | None],
        *,
        deadline: Deadline,
        stop: Event,
    ) -> list[str]:
        """The state of each chunk: "absent" where it is not there, "late" where its turn did not come before the deadline or
        `stop`, else what `load_part` answers, which loads leased ones: those at these places. Where it answers None, the load
        ends."""
        found = np.full(len(names), "absent", object)
        levels = self._pool.probe(names, asks_store=True).copy()
        asked = np.zeros(len(names), np.int64)
        left = np.flatnonzero(levels > 0)
        chosen, lease = left[:0], None
        while len(left):
            if stop.is_set() or deadline.has_passed():
                found[left] = "late"
                if lease is not None:
                    lease.release()
                break
            if lease is None:
                chosen = self._choose(levels, left)
                lease = self._size.acquire_set(names[chosen])
            left = left[len(chosen) :]
            ahead = self._choose(levels, left) if (levels[chosen] < PEER).all() else left[:0]
            with lease, _LeaseAhead(self._line, self._size, names[ahead]) as following:
                states = load_part(lease, chosen)
                if states is None:
                    break
                found[chosen] = states
                lease.release()  # its room is for what it left out
                asked[chosen] += 1
                again = chosen[np.isin(found[chosen], _LEFT_OUT) & (asked[chosen] < ASKED_MAX)]
                if len(again) and not (stop.is_set() or deadline.has_passed()):
                    levels[again] = self._size.levels_again(names[again], deadline, stop)
                    again = again[levels[again] > 0]
                left = np.concatenate([left[: len(ahead)], again, left[len(ahead) :]])
                chosen, lease = ahead, following.take()
        answer: list[str] = found.tolist()
        return answer

    def close(self) -> None:
        """Lease nothing ahead any more. Idempotent."""
        self._line.close()

    def _choose(self, levels: npt.NDArray[np.uint8], left: Places) -> Places:
        """The first of what is left, as many as may be leased at once."""
        chosen = left[: self._size.count]
        return chosen[np.cumsum(levels[chosen] >= PEER) <= PULLS_AT_ONCE]


class _LeaseAhead:
    """A lease on these that a line's thread asks for; leaving it ends one that was not taken. Waits for the daemon's answer."""

    def __init__(self, line: JobLine, size: LeaseSize, names: Names) -> None:
        self._leased: SimpleQueue[Lease | None] = SimpleQueue()
        self._is_open = len(names) > 0
        if self._is_open:
            line.submit("lease", partial(size.acquire_set, names), self._leased.put)

    def __enter__(self) -> "_LeaseAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self.take()
        if lease is not None:
            lease.release()

    def take(self) -> Lease | None:
        """The lease; None for none, where the line took no job, and the second time."""
        is_open, self._is_open = self._is_open, False
        return self._leased.get() if is_open else None
