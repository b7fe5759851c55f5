"""Ending holds: holds of leases and tickets that have ended, and of groups that were given up or announced, released a bounded
number of chunks at once.

Control thread only; `now_ns` is an argument. Invariant: every hold here is known to the directory.
"""

import sys
from collections.abc import Callable, Sequence

import kvpool_native
from kvpool.ids import HoldId
from kvpool.index.leases import ENDED_AT_ONCE, ENDED_COST


class EndingHolds:
    """See the module. `on_backlog`: has `end` called again soon; None: everything is released at once."""

    def __init__(self, directory: kvpool_native.Directory, on_backlog: Callable[[], None] | None) -> None:
        at_once, cost = (ENDED_AT_ONCE, ENDED_COST) if on_backlog is not None else (sys.maxsize, 0)
        self.queue = kvpool_native.EndingHolds(directory, at_once, cost)
        self._on_backlog = on_backlog

    def __repr__(self) -> str:
        return f"<EndingHolds {len(self)}>"

    def __len__(self) -> int:
        return len(self.queue)

    def release_holds(self, holds: Sequence[HoldId], now_ns: int) -> None:
        """Release these after those that are already waiting, as many as fit one call."""
        if self.queue.release_holds(holds, now_ns):
            self.call_again()

    def call_again(self) -> None:
        """Holds are left: the rest is released soon."""
        if self._on_backlog is not None:
            self._on_backlog()
