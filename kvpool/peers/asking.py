"""Asking: requests to one node take turns, so that many at once are neither refused by it nor counted as its failure.

A node answers 16 pulls and Stages of a peer at a time, and reads 1000 messages of it in a second (docs/peer-protocol.md).
Pulls have AT_ONCE of those places, and each turn lasts so long that 200 pulls begin in a second, with a Release each; Stages
have what `STAGES` says, and a ping has the last place. An engine that stores pages without a chain (SGLang) asks for each page
alone. Loop thread only.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from kvpool.clock import Clock, Deadline
from kvpool.errors import PeerUnreachable
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink

AT_ONCE = 12
PER_S = 200


@dataclass(frozen=True, slots=True)
class Turns:
    """Bounds of one kind of requests to a node: without an answer, and begun in a second."""

    at_once: int
    per_s: int


PULLS = Turns(AT_ONCE, PER_S)
STAGES = Turns(3, 400)


class Asking:
    """See the module. Every call ends within twice its time: whoever gets a turn too late does not ask."""

    def __init__(self, clock: Clock, turns: Turns = PULLS) -> None:
        self._clock = clock
        self._at_once = turns.at_once
        self._turn_s = turns.at_once / turns.per_s
        self._turns: dict[str, asyncio.Semaphore] = {}

    def __repr__(self) -> str:
        return f"<Asking {len(self._turns)} nodes>"

    async def ask(self, link: PeerLink, node: str, request: r.Pull | r.Stage, answer_s: float) -> Any:
        """The node's answer. Raises Refused, and PeerUnreachable where none comes in time, the wait for a turn included."""
        deadline = Deadline(answer_s, self._clock)
        turn = self._turns.setdefault(node, asyncio.Semaphore(self._at_once))
        await turn.acquire()
        begun = Deadline(self._turn_s, self._clock)
        try:
            if deadline.has_passed():
                raise PeerUnreachable(f"{link.member.endpoint} did not answer earlier requests in time")
            return await link.request(request, deadline.remaining_s())
        finally:
            asyncio.get_running_loop().call_later(begun.remaining_s(), turn.release)
