"""Turns of streams of chunks that are on their way to the other node itself: one of each node receives such chunks at a time.

Such a stream has threads on both sides for as long as a save or a disk takes, which may be the whole time of its pull. One at a
time leaves threads to pulls of what is there. The others wait here, without a thread. Loop thread only. Invariant: `_waiting`
has exactly the nodes whose turn is taken, and who waits for it.
"""

import asyncio
from collections import deque


class ComingTurns:
    """See the module. Whoever waits has a place among the pulls under way, whose number is bounded."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<ComingTurns at {len(self._waiting)} nodes>"

    async def take_turn(self, node: str, timeout_s: float) -> bool:
        """Take the turn at a node. Whether it was free in time."""
        line = self._waiting.get(node)
        if line is None:
            self._waiting[node] = deque()
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await asyncio.wait([turn], timeout=timeout_s)
        except asyncio.CancelledError:
            if turn.done():
                self.end_turn(node)
            raise
        finally:
            if not turn.done():
                line.remove(turn)
        return turn.done()

    def end_turn(self, node: str) -> None:
        """The turn is over: the next one's, if anybody waits."""
        line = self._waiting[node]
        if line:
            line.popleft().set_result(None)
        else:
            del self._waiting[node]
