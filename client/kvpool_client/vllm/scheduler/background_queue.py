"""Background queue: calls that a scheduler makes on a thread of its own, in order, so that a hanging daemon never blocks it.

    sent ──its turn──► run
      └──queue full, or stopped before──► dropped, and reported so

Invariant: for every entry exactly one of `run` and `dropped` is called. At most `waiting_max` wait. Any thread sends; `run` is
called on the queue's own thread, `dropped` on the sender's or on the one that stops.
"""

import threading
from collections import deque
from collections.abc import Callable

from kvpool_client.engines.failure_guard import FailureGuard

# A running call ends by the Pool's own deadlines; the thread holds nothing for which an engine's end should wait longer.
STOP_TIMEOUT_S = 2.0


class BackgroundQueue:
    """See the module. `purpose` names the queue's calls in the failure guard."""

    def __init__(self, name: str, purpose: str, waiting_max: int, guard: FailureGuard) -> None:
        self._purpose = purpose
        self._waiting_max = waiting_max
        self._guard = guard
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()  # guarded by _changed
        self._is_stopping = False  # guarded by _changed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<BackgroundQueue {self._purpose}: {len(self._waiting)} wait>"

    def send(self, run: Callable[[], None], *, dropped: Callable[[], None]) -> None:
        """Have `run` called after everything sent before, or `dropped` where that is impossible."""
        with self._changed:
            is_taken = not self._is_stopping and len(self._waiting) < self._waiting_max
            if is_taken:
                self._waiting.append((run, dropped))
                self._changed.notify()
        if not is_taken:
            dropped()

    def stop(self) -> None:
        """Drop the calls that have not begun and end the thread. Waits for at most STOP_TIMEOUT_S."""
        with self._changed:
            self._is_stopping = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for _, dropped in left:
            dropped()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or bool(self._waiting))
                if self._is_stopping:
                    return
                run, _ = self._waiting.popleft()
            self._guard.call(self._purpose, None, run)
