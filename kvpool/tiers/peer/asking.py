"""Asking: pulls of one node take turns, so that many at once are neither refused by it nor counted as its failure.

A node answers 16 pulls of a peer at a time, and reads 500 messages of it in a second (docs/peer-protocol.md). At most AT_ONCE
wait here for their answers, and each turn lasts TURN_S at least: 200 pulls a second, with a Release each. An engine that stores
pages without a chain (SGLang) asks for each page alone. Loop thread only.
"""

import asyncio

from kvpool.clock import Clock, Deadline
from kvpool.errors import PeerUnreachable
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink

AT_ONCE = 12
TURN_S = AT_ONCE / 200


class Asking:
    """See the module. Every call ends within twice its time: whoever gets a turn too late does not ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turns: dict[str, asyncio.Semaphore] = {}

    def __repr__(self) -> str:
        return f"<Asking {len(self._turns)} nodes>"

    async def ask(self, link: PeerLink, node: str, request: r.Pull, answer_s: float) -> r.Offer:
        """The node's offer. Raises Refused, and PeerUnreachable where none comes in time, the wait for a turn included."""
        deadline = Deadline(answer_s, self._clock)
        turn = self._turns.setdefault(node, asyncio.Semaphore(AT_ONCE))
        await turn.acquire()
        begun = Deadline(TURN_S, self._clock)
        try:
            if deadline.has_passed():
                raise PeerUnreachable(f"{link.member.endpoint} did not answer earlier requests in time")
            offer: r.Offer = await link.request(request, deadline.remaining_s())
            return offer
        finally:
            asyncio.get_running_loop().call_later(begun.remaining_s(), turn.release)
