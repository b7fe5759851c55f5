"""Republish schedule: when to publish a whole snapshot for routers that are new or request messages that have left the buffer.

A snapshot goes to all routers at once, so the requests of one are bounded: at most REPUBLISHED_AT_ONCE in as many `interval_s`,
and one peer at replay causes at most one of them in that time: a further request of it waits for the next snapshot, its own or
that of another. After a new router the publisher waits for others, SETTLE_S,
because after a restart all reconnect within a moment. Where no snapshot is allowed yet they get a mark, whose number shows that
they lack messages.

One thread, the publisher's.
"""

from collections import OrderedDict, deque
from enum import Enum

from kvpool.clock import Clock, Deadline

REPUBLISHED_AT_ONCE = 3
PEERS_KNOWN_MAX = 1024
SETTLE_S = 0.1


class Republish(Enum):
    """Kind of message to publish now."""

    NOTHING = 0
    MARK = 1
    EVERYTHING = 2


class RepublishSchedule:
    """Requests for a snapshot, and their limit. `interval_s` 0: routers cannot cause one."""

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._span_s = REPUBLISHED_AT_ONCE * interval_s
        self._published: deque[Deadline] = deque(maxlen=REPUBLISHED_AT_ONCE)
        self._peers: OrderedDict[bytes, Deadline] = OrderedDict()
        self._settled: Deadline | None = None
        self._deferred: set[bytes] = set()  # peers that have asked too soon; all of them are in `_peers`
        self._is_wanted = False

    def note_newcomer(self) -> None:
        """Note a new router, which missed earlier messages, or a new topic, at whose beginning some routers clear all
        topics."""
        if self._settled is None:
            self._settled = Deadline(SETTLE_S, self._clock)

    def note_lost(self, peer: bytes) -> None:
        """Note that a peer has requested messages that have left the buffer."""
        if not self._interval_s:
            return
        last = self._peers.get(peer)
        if last is not None and not last.has_passed():
            self._deferred.add(peer)
            return
        self._peers[peer] = Deadline(self._span_s, self._clock)
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_KNOWN_MAX:
            self._deferred.discard(self._peers.popitem(last=False)[0])
        self._is_wanted = True

    def take_due(self) -> Republish:
        """Take what is due; it counts as done."""
        has_come = self._settled is not None and self._settled.has_passed()
        if has_come:
            self._settled = None
            self._is_wanted |= self._interval_s > 0
        for peer in [peer for peer in self._deferred if self._peers[peer].has_passed()]:
            self._deferred.discard(peer)
            self.note_lost(peer)
        if self._is_wanted and self._may_republish():
            self._is_wanted = False
            self._deferred.clear()
            self._published.append(Deadline(self._span_s, self._clock))
            return Republish.EVERYTHING
        return Republish.MARK if has_come else Republish.NOTHING

    @property
    def wait_ms(self) -> int | None:
        """Milliseconds until something may be due; None: not before a request."""
        waits = [self._peers[peer].remaining_s() for peer in self._deferred]
        if self._settled is not None:
            waits.append(self._settled.remaining_s())
        if self._is_wanted:
            waits.append(0.0 if self._may_republish() else self._published[0].remaining_s())
        return int(min(waits) * 1000) + 1 if waits else None

    def _may_republish(self) -> bool:
        return len(self._published) < REPUBLISHED_AT_ONCE or self._published[0].has_passed()
