"""Share of the event loop's time: a bound on the work that other nodes cause, whatever each of their messages costs.

The loop is the control thread: while it decodes a peer's request, this node's own engines wait. A bound on messages alone does
not bound that, because one with thousands of keys costs a hundred times one without. So work is timed. After SLICE_NS of it
there is a pause, long enough that no more than the share of the time is used; time without work saves up one slice at most.

Loop thread only; never sleeps. Invariant: the credit is at most SLICE_NS.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.clock import NS_PER_S, Clock

# Work at a stretch; a connection's slice among the engines' is as long (`server/connections/turns.py`).
SLICE_NS = 250_000
# The most that one piece of work counts for: on a machine with more to do than cores the time between two looks at the clock is
# mostly others'.
PIECE_NS_MAX = 4_000_000


class LoopShare:
    """See the module. `share`: of the time, above 0 and at most 1."""

    __slots__ = ("_at_ns", "_clock", "_credit_ns", "_share")

    def __init__(self, share: float, clock: Clock) -> None:
        assert 0 < share <= 1
        self._share = share
        self._clock = clock
        self._credit_ns = float(SLICE_NS)
        self._at_ns = clock.now_ns()

    def __repr__(self) -> str:
        return f"<LoopShare {self._share:g}, {self._credit_ns / 1000:.0f} µs left>"

    @property
    def wait_s(self) -> float:
        """Seconds until work may go on, with a whole slice then; 0.0 where it may go on now."""
        now_ns = self._clock.now_ns()
        self._credit_ns = min(SLICE_NS, self._credit_ns + (now_ns - self._at_ns) * self._share)
        self._at_ns = now_ns
        return 0.0 if self._credit_ns > 0 else (SLICE_NS - self._credit_ns) / self._share / NS_PER_S

    @contextmanager
    def used(self) -> Iterator[None]:
        """The work in this block counts."""
        begun_ns = self._clock.now_ns()
        try:
            yield
        finally:
            self._credit_ns -= min(PIECE_NS_MAX, self._clock.now_ns() - begun_ns)
