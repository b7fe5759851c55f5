"""Retelling: a whole snapshot for routers that lack what came before, because they are new or ask for what is not kept.

Telling is for all of them at once, so what one asks for is bounded: at most RETELLS_AT_ONCE in as many `interval_s`, and one
peer at replay brings about one of them in that time. After somebody has come others are waited for, SETTLE_S, since after a
restart all come within a moment; where nothing may be told yet they get a mark, whose number shows that they lack something.

One thread, the publisher's.
"""

from collections import OrderedDict, deque
from enum import Enum

from kvpool.clock import Clock, Deadline

REPUBLISHED_AT_ONCE = 3
PEERS_KNOWN_MAX = 1024
SETTLE_S = 0.1


class Republish(Enum):
    """What is to be told now."""

    NOTHING = 0
    MARK = 1
    EVERYTHING = 2


class RepublishSchedule:
    """What is wanted and what is allowed. `interval_s` 0: nothing is told anew because somebody wants it."""

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._span_s = REPUBLISHED_AT_ONCE * interval_s
        self._told: deque[Deadline] = deque(maxlen=REPUBLISHED_AT_ONCE)
        self._peers: OrderedDict[bytes, Deadline] = OrderedDict()
        self._settled: Deadline | None = None
        self._is_wanted = False

    def note_newcomer(self) -> None:
        """Somebody has come who missed what was told before, or a topic whose beginning some take to clear all topics."""
        if self._settled is None:
            self._settled = Deadline(SETTLE_S, self._clock)

    def note_lost(self, peer: bytes) -> None:
        """A peer has asked for messages that are not kept any more."""
        last = self._peers.get(peer)
        if not self._interval_s or (last is not None and not last.has_passed()):
            return
        self._peers[peer] = Deadline(self._span_s, self._clock)
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_KNOWN_MAX:
            self._peers.popitem(last=False)
        self._is_wanted = True

    def take(self) -> Republish:
        """What is due, which counts as done with this."""
        has_come = self._settled is not None and self._settled.has_passed()
        if has_come:
            self._settled = None
            self._is_wanted |= self._interval_s > 0
        if self._is_wanted and self._may_republish():
            self._is_wanted = False
            self._told.append(Deadline(self._span_s, self._clock))
            return Republish.EVERYTHING
        return Republish.MARK if has_come else Republish.NOTHING

    @property
    def wait_ms(self) -> int | None:
        """In how long something may be due; None: when somebody wants it."""
        waits = [self._settled.remaining_s()] if self._settled is not None else []
        if self._is_wanted:
            waits.append(0.0 if self._may_republish() else self._told[0].remaining_s())
        return int(min(waits) * 1000) + 1 if waits else None

    def _may_republish(self) -> bool:
        return len(self._told) < REPUBLISHED_AT_ONCE or self._told[0].has_passed()
