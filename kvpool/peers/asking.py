"""Asking: requests to one node take turns, so that many at once are neither refused by it nor counted as its failure.

A node answers 16 pulls and Stages of a peer at a time, and reads 1000 messages of it in a second (docs/peer-protocol.md).
Pulls have AT_ONCE of those places, and each turn lasts so long that 200 pulls begin in a second, with a Release each; Stages
have what `STAGES` says, and a ping has the last place. An engine that stores pages without a chain (SGLang) asks for each page
alone.

Engines' connections take turns with one another, and one has at most SHARE of what the others leave of the pulls' turns: a
connection that asks without end delays nobody else. Of the requests of a connection that name a node, which may have nothing,
NAMED_WAITING_MAX wait for their turn there; a further one is a miss at once. Loop thread only. Invariant: `running` of a node
sums up to `at_once` at most.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpool.clock import Clock, Deadline
from kvpool.errors import PeerUnreachable
from kvpool.ids import ConnectionId
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink

AT_ONCE = 12
PER_S = 200
SHARE = 0.75
NAMED_WAITING_MAX = 3


def share_of(own: int, others: int, most: int, *, share: float = SHARE) -> bool:
    """Whether a connection that has `own` of `most` may have one more: a share of what the others leave, one in any case."""
    return own < max(1, int(share * (most - others))) and own + others < most


class Asker(Protocol):
    """A request of an engine's connection."""

    @property
    def connection(self) -> ConnectionId:
        """The engine's connection."""
        ...


@dataclass(frozen=True, slots=True)
class Turns:
    """Bounds of one kind of requests to a node: without an answer, and begun in a second. `share`: of one connection, of what
    the others leave."""

    at_once: int
    per_s: int
    share: float = 1.0


PULLS = Turns(AT_ONCE, PER_S, SHARE)
STAGES = Turns(3, 400)


class NodeTurns:
    """Turns at nodes: a bounded number at once of each, granted to connections in turn."""

    def __init__(self, bounds: Turns) -> None:
        self._bounds = bounds
        self._turns: dict[str, _NodeTurns] = {}

    def __repr__(self) -> str:
        return f"<NodeTurns {len(self)} nodes>"

    def __len__(self) -> int:
        return len(self._turns)

    async def begin_turn(self, node: str, connection: ConnectionId) -> None:
        """Wait for a turn; `end_turn` is to follow, unless this is cancelled."""
        turns = self._turns.setdefault(node, _NodeTurns(self._bounds))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns.waiting.setdefault(connection, deque()).append(turn)
        turns.grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end_turn(node, connection)
            raise

    def end_turn(self, node: str, connection: ConnectionId) -> None:
        """A turn is over."""
        turns = self._turns[node]
        turns.running[connection] -= 1
        if not turns.running[connection]:
            del turns.running[connection]
        turns.grant()
        if not turns.running and not turns.waiting:
            del self._turns[node]  # a node may show another name with each connection


@dataclass(slots=True)
class _NodeTurns:
    """One node's. `running`, and `waiting` for their turn: by connection."""

    bounds: Turns
    running: Counter[ConnectionId] = field(default_factory=Counter)
    waiting: OrderedDict[ConnectionId, deque["asyncio.Future[None]"]] = field(default_factory=OrderedDict)

    def may_run(self, connection: ConnectionId) -> bool:
        """Whether the connection may have one more turn now."""
        own = self.running[connection]
        return share_of(own, self.running.total() - own, self.bounds.at_once, share=self.bounds.share)

    def grant(self) -> None:
        """Give free turns to the connections in the order in which they wait."""
        while (chosen := next((one for one in self.waiting if self.may_run(one)), None)) is not None:
            line = self.waiting.pop(chosen)
            turn = line.popleft()
            if line:
                self.waiting[chosen] = line  # behind the others
            if not turn.done():
                self.running[chosen] += 1
                turn.set_result(None)


class Asking:
    """See the module. Every call ends within twice its time: whoever gets a turn too late does not ask."""

    def __init__(self, clock: Clock, turns: Turns = PULLS) -> None:
        self._clock = clock
        self._turn_s = turns.at_once / turns.per_s
        self._turns = NodeTurns(turns)
        # Requests that name a node and wait for their turn there: so many pulls of each.
        self._named: dict[tuple[str, ConnectionId], Counter[Asker]] = {}

    def __repr__(self) -> str:
        return f"<Asking {len(self._turns)} nodes>"

    def is_crowded(self, node: str, asker: Asker) -> bool:
        """Whether the request's connection has too many others that name this node, and wait."""
        waiting = self._named.get((node, asker.connection))
        return waiting is not None and asker not in waiting and len(waiting) >= NAMED_WAITING_MAX

    def enter(self, node: str, asker: Asker) -> None:
        """A pull of a request that names this node will be asked for."""
        self._named.setdefault((node, asker.connection), Counter())[asker] += 1

    def leave(self, node: str, asker: Asker) -> None:
        """It waits no longer."""
        place = node, asker.connection
        waiting = self._named[place]
        waiting[asker] -= 1
        if not waiting[asker]:
            del waiting[asker]
        if not waiting:
            del self._named[place]

    async def ask_node(
        self,
        link: PeerLink,
        node: str,
        request: Callable[[], r.Pull | r.AnyStage | r.AskNear],
        answer_s: float,
        *,
        asker: Asker | None = None,
        is_named: bool = False,
    ) -> Any:
        """The node's answer. `request` makes the request when its turn has come: turns are not in the order of the calls, and
        a node refuses a pull whose number is not above those before it. `is_named`: the pull has entered. Raises Refused, and
        PeerUnreachable where no answer comes in time, the wait for a turn included."""
        deadline = Deadline(answer_s, self._clock)
        connection = ConnectionId(0) if asker is None else asker.connection
        try:
            await self._turns.begin_turn(node, connection)
        finally:
            if asker is not None and is_named:
                self.leave(node, asker)
        begun = Deadline(self._turn_s, self._clock)
        try:
            if deadline.has_passed():
                raise PeerUnreachable(f"{link.member.endpoint} did not answer earlier requests in time")
            return await link.request(request(), deadline.remaining_s())
        finally:
            asyncio.get_running_loop().call_later(begun.remaining_s(), self._turns.end_turn, node, connection)
