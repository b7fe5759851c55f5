"""Ending holds: holds of leases and tickets that have ended, and of groups that were given up or announced, released a bounded
number of chunks at once.

Control thread only; `now_ns` is an argument. Invariant: every hold here is known to the directory.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence

import kvpool_native
from kvpool.ids import HoldId
from kvpool.index.leases import ENDED_AT_ONCE, ENDED_COST


class EndingHolds:
    """See the module. `on_backlog`: has `end` called again soon; None: everything is released at once."""

    def __init__(self, directory: kvpool_native.Directory, on_backlog: Callable[[], None] | None) -> None:
        self._directory = directory
        self._on_backlog = on_backlog
        self._holds: deque[HoldId] = deque()

    def __repr__(self) -> str:
        return f"<EndingHolds {len(self)}>"

    def __len__(self) -> int:
        return len(self._holds)

    def release_holds(self, holds: Sequence[HoldId], now_ns: int) -> None:
        """Release these after those that are already waiting, as many as fit one call."""
        self._holds.extend(holds)
        left = ENDED_AT_ONCE if self._on_backlog else sys.maxsize
        while self._holds and left > 0:
            hold = self._holds[0]
            ended = self._directory.release_part(hold, left, now_ns)
            if ended < left or not self._is_known(hold):
                self._holds.popleft()
            left -= ended + ENDED_COST
        if self._holds and self._on_backlog is not None:
            self._on_backlog()

    def _is_known(self, hold: HoldId) -> bool:
        """Whether a hold is left of which a part was released, or had just as many chunks."""
        try:
            return bool(self._directory.key_of(hold, 0))
        except KeyError:
            return False
