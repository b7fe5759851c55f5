"""Remote feed: puts what peers have into the table of remote chunks, and has the loop work it off in turns.

One for all followers. A turn follows the other while there is work, each a callback of its own, so that other work of the loop
comes between. Where a node's queue is full, `queue_change` waits for turns: back-pressure to the peer, which is asked no
further.

Loop thread only. Invariant: a turn is scheduled while the table may have work.
"""

import asyncio

from kvpool.clock import Clock, Deadline
from kvpool.errors import PeerUnreachable
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.key_column import KeyColumn


class RemoteFeed:
    """See the module."""

    def __init__(self, remote: RemoteChunks, *, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.remote = remote
        self._clock = clock
        self._loop = loop
        self._turn: asyncio.Handle | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        return f"<RemoteFeed of {self.remote!r}, {len(self._waiting)} wait>"

    async def queue_change(self, node: NodeName, keys: KeyColumn, *, is_stored: bool, timeout_s: float) -> None:
        """Queue a change of a node. Raises PeerUnreachable where its queue had no room in all that time."""
        deadline = Deadline(timeout_s, self._clock)
        note = self.remote.note_stored if is_stored else self.remote.note_removed
        while not note(node, keys):
            if deadline.has_passed():
                raise PeerUnreachable(
                    f"the queue of {node} had no room for {timeout_s:g} s: too many nodes are followed"
                )
            await self._wait_for_turn(deadline.remaining_s())
        self.schedule_turn()

    def schedule_turn(self) -> None:
        """The table has work: have it done in turns."""
        if self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def close(self) -> None:
        """End the turns."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    async def _wait_for_turn(self, timeout_s: float) -> None:
        end: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(end)
        try:
            await asyncio.wait([end], timeout=timeout_s)
        finally:
            self._waiting.discard(end)

    def _take_turn(self) -> None:
        self._turn = None
        if self.remote.advance():
            self.schedule_turn()
        waiting, self._waiting = self._waiting, set()
        for end in waiting:
            if not end.done():
                end.set_result(None)
