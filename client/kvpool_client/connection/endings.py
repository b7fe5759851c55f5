"""Endings: what the Pool ends itself, because its owner has not.

    a save or lease that nobody has any more ──add_forgotten──► WAITING ──end_waiting──► ended, on a thread of its own
    a save whose reservation has run out ──add_end──► WAITING, of another Endings ──end_waiting──► …

Forgotten ones would keep what they hold until their time is over, and a save that is late its slots until its connection ends.
The thread lives while something waits: an end may wait for a device, which must not keep the link from renewing leases, nor a
late save from being given up in time: these have a thread apart.

`add_forgotten` is for finalizers, which run on any thread, wherever it is and whatever lock it holds: it takes no lock, waits
for nothing and sends nothing. What was forgotten lives until it has ended. `end_waiting` is called by the link's thread.
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable

End = Callable[[], object]


class Endings:
    """See the module. Invariant: each end is called once, in the order in which they came."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake`: has `end_waiting` called soon, without waiting for that or for a lock."""
        self._wake = wake
        self._waiting: deque[End] = deque()  # any thread appends, one at a time removes
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Endings {len(self._waiting)} waiting>"

    def add_end(self, end: End) -> None:
        """Have `end` called at the next `end_waiting`; never where the Pool was closed, which has ended everything."""
        if not self._is_closed:
            self._waiting.append(end)

    def add_forgotten(self, fault: str, owner: object, end: End) -> None:
        """Have what a finalizer found ended, with a ResourceWarning: `fault` is what was forgotten of `owner`, and what becomes
        of it."""
        forgotten = f"{owner!r}: {fault}"  # as it is now, before another thread ends it
        self.add_end(end)
        self._wake()
        warnings.warn(forgotten, ResourceWarning, stacklevel=3, source=owner)

    def end_waiting(self) -> None:
        """End what waits, in the background; where no thread can be started, the next call tries again."""
        if not self._waiting or (self._thread is not None and self._thread.is_alive()):
            return
        thread = threading.Thread(target=self._run, name="kvpool-endings", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = thread

    def close(self) -> None:
        """End all that waits, here and now, after what is being ended elsewhere, and take nothing more."""
        self._is_closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._run()

    def _run(self) -> None:
        while self._waiting:
            self._waiting.popleft()()
