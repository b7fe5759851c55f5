"""Turns: fair scheduling of connections on the control thread. Which one is served next, and for how long.

Not a scheduler of tasks: it calls connections that asked for a turn, and those that need longer ask again. A connection is
served at once while the thread is idle. Under load, waiting connections are served in slices, first the one that has used the
least time while others waited, and after TURN_NS the event loop reads what has arrived meanwhile: a connection with rare
requests comes before those that flood, and waits for one turn at most. A long request is served in parts (`index.parts`), with
others between them. An idle connection saves up one slice at most. An error while serving one connection ends only that one.

Control thread only. Invariant: a pass over the waiting connections is scheduled exactly while there are any, and each is listed
once.
"""

import asyncio
import heapq
from collections.abc import Callable
from typing import Protocol

from kvpool.clock import Clock

# Longest time served at a stretch: the loop's sockets and timers wait this long, and for the part under way.
TURN_NS = 1_000_000
# One connection's slice of a turn while others wait: a few requests, so that switching costs little (a guess).
SLICE_NS = 250_000


class RequestSource(Protocol):
    """A source of requests, long ones in parts. `used_ns`: time served while others waited; both fields belong to `Turns`."""

    used_ns: int
    is_waiting: bool

    def serve(self, until_ns: int) -> bool:
        """Serve requests or parts of them until then, at least one. Whether there may be more."""
        ...

    def fail(self, error: Exception) -> None:
        """End this source: `serve` has raised. Logs and counts it, and never raises."""
        ...


class Turns:
    """All turns of one daemon."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[tuple[int, int, RequestSource]] = []
        self._pass: asyncio.Handle | None = None
        self._asked = 0
        self._least_used_ns = 0
        self._left_ns = TURN_NS  # what may be served at once; it grows while the thread is idle
        self._idle_since_ns = clock.now_ns()

    def __repr__(self) -> str:
        return f"<Turns {len(self._waiting)} waiting>"

    def ask_turn(self, served: RequestSource) -> None:
        """Request a turn, now or later."""
        if served.is_waiting:
            return
        started_ns = self._clock.now_ns()
        left_ns = self._left_ns + started_ns - self._idle_since_ns
        self._left_ns = left_ns if left_ns < TURN_NS else TURN_NS
        self._idle_since_ns = started_ns
        if self._waiting or self._left_ns <= 0 or self._serve(served, started_ns + self._left_ns):
            # Before those that wait again and again.
            served.used_ns = max(served.used_ns, self._least_used_ns - SLICE_NS)
            self._wait(served)

    def serve_at_once(self, serve: Callable[[int], bool]) -> bool:
        """Call `serve` with the nanoseconds that are left now, unless others wait. Whether it has served something."""
        started_ns = self._clock.now_ns()
        left_ns = self._left_ns + started_ns - self._idle_since_ns
        self._left_ns = left_ns if left_ns < TURN_NS else TURN_NS
        self._idle_since_ns = started_ns
        if self._waiting or self._left_ns <= 0:
            return False
        try:
            return serve(self._left_ns)
        finally:
            ended_ns = self._clock.now_ns()
            self._left_ns -= ended_ns - started_ns
            self._idle_since_ns = ended_ns

    def _wait(self, served: RequestSource) -> None:
        self._asked += 1
        served.is_waiting = True
        heapq.heappush(self._waiting, (served.used_ns, self._asked, served))
        if self._pass is None:
            self._pass = asyncio.get_running_loop().call_soon(self._serve_waiting)

    def _serve(self, served: RequestSource, until_ns: int) -> bool:
        try:
            has_more = served.serve(until_ns)
        except Exception as error:  # the other connections are served on
            has_more = False
            served.fail(error)
        ended_ns = self._clock.now_ns()
        self._left_ns -= ended_ns - self._idle_since_ns
        self._idle_since_ns = ended_ns
        return has_more

    def _serve_waiting(self) -> None:
        self._pass = None
        end_ns = self._clock.now_ns() + TURN_NS
        while self._waiting and (now_ns := self._clock.now_ns()) < end_ns:
            self._least_used_ns, _, served = heapq.heappop(self._waiting)
            served.is_waiting = False
            self._idle_since_ns = now_ns
            has_more = self._serve(served, min(end_ns, now_ns + SLICE_NS))
            served.used_ns += self._idle_since_ns - now_ns
            if has_more:
                self._wait(served)
        if self._waiting and self._pass is None:
            self._pass = asyncio.get_running_loop().call_soon(self._serve_waiting)
