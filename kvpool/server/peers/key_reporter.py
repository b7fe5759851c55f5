"""Key reporter: reports to other nodes which chunks this one has, from the journal.

The owner's side of following (`FollowService`). A request is answered in a turn of its own, one request a turn with a pause
between turns that is PAUSE_RATIO times as long, so that many followers that ask in one moment leave the loop to others. A
request for changes where there are none waits for the journal's next event, or for the end of its wait.

Chunks that an engine is just saving are reported too, from their first extent on: another node may follow the save. They are no
events, and have numbers of their own (`save_notes`): those of saves that were given up are reported as removed.

Keys alone are reported, and those of the node's tiers alone: what engines have in their own memory cannot be pulled.

Loop thread only. Invariant: every request is in `_requests` from its call until its answer or
`forget`; its connection's number is in `_idle` while it waits, and else in `_due`. `_turn` is the turn or pause under way;
there is one where `_due` is not empty.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvpool.events import Event, EventKind
from kvpool.journal.event_log import EVENT_PAYLOAD_BYTES_MAX, EventSlice
from kvpool.journal.journal import Journal
from kvpool.journal.snapshot_page import SNAPSHOT_END
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.peers.control import records as r
from kvpool.peers.control.pullers import Puller
from kvpool.server.peers.save_notes import NotesSlice, SaveNotes
from kvpool.states import NODE_TIERS

# Keys of a page, and the size of the events that an answer adds up, with their token ids: a turn of less than a millisecond
# (measured: 40 ns for a key of a page, 0.7 µs for one of an event of four).
PAGE_KEYS = 2048
EVENTS_BYTES_MAX = 128 << 10
# Between the answers of two requests that wait: at least PAUSE_S, at most PAUSE_S_MAX (as on a machine that is busy itself).
PAUSE_S = 0.001
PAUSE_RATIO = 5
PAUSE_S_MAX = 0.02

assert PAGE_KEYS <= r.FOLLOW_KEYS_MAX
assert SNAPSHOT_END == r.NO_MORE_KEYS
assert packed_bytes(r.FOLLOW_KEYS_MAX) >= EVENT_PAYLOAD_BYTES_MAX, "any event has to fit an answer"


@dataclass(slots=True)
class _Request:
    ask: r.AskFollow
    answer: Callable[[Any], bool]
    has_waited: bool = False


class KeyReporter:
    """See the module."""

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
        self._journal = journal
        self._loop = loop
        self._requests: dict[int, _Request] = {}  # by the number of the connection
        self._idle: dict[int, asyncio.TimerHandle] = {}  # the ends of their waits
        self._due: deque[int] = deque()
        self._turn: asyncio.Handle | None = None
        self._saves = SaveNotes(journal.has)
        self.answers = 0
        self.gaps = 0
        self.pages = 0
        journal.listen(self._note_events, dict, list)

    def __repr__(self) -> str:
        return f"<KeyReporter {len(self._requests)} requests, {len(self._idle)} wait>"

    def changes(self, puller: Puller, ask: r.AskChanges, answer: Callable[[r.Changes | r.Refused], bool]) -> None:
        """See FollowService."""
        self._take(puller, _Request(ask, answer))

    def keys(self, puller: Puller, ask: r.AskKeys, answer: Callable[[r.Keys | r.Refused], bool]) -> None:
        """See FollowService."""
        self._take(puller, _Request(ask, answer))

    def note_save(self, keys: KeyColumn) -> None:
        """Chunks of a save can be followed from now on."""
        self._saves.begin_save(keys)
        self._note_events()

    def end_save(self, keys: KeyColumn, stored: int) -> None:
        """So many chunks of a save are stored, as events say; the others are lost."""
        if self._saves.end_save(keys, stored):
            self._note_events()

    def forget(self, puller: Puller) -> None:
        """See FollowService."""
        self._end(puller.number)

    def close(self) -> None:
        """Answer nobody any more."""
        if self._turn is not None:
            self._turn.cancel()
        for number in list(self._requests):
            self._end(number)

    def stats(self) -> dict[str, int]:
        """Counters, by name: answers, those of them that report a gap, pages, and requests that wait."""
        return {"answers": self.answers, "gaps": self.gaps, "pages": self.pages, "waiting": len(self._requests)}

    def _take(self, puller: Puller, request: _Request) -> None:
        self._end(puller.number)  # one that the server has given up
        self._requests[puller.number] = request
        self._make_due(puller.number)

    def _make_due(self, number: int) -> None:
        self._due.append(number)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def _note_events(self) -> None:
        """New events: whoever waits for one is due."""
        idle, self._idle = self._idle, {}
        for number, timer in idle.items():
            timer.cancel()
            self._make_due(number)

    def _take_turn(self) -> None:
        number = self._due.popleft()
        request = self._requests.get(number)
        begun_s = self._loop.time()
        try:
            if request is not None and number not in self._idle:
                self._serve(number, request)
        finally:
            pause_s = PAUSE_RATIO * (self._loop.time() - begun_s)
            self._turn = self._loop.call_later(min(max(PAUSE_S, pause_s), PAUSE_S_MAX), self._go_on)

    def _go_on(self) -> None:
        """The pause is over. `_turn` stays set while the next request is served: what that makes due waits for its turn too."""
        if self._due:
            self._take_turn()
        else:
            self._turn = None

    def _serve(self, number: int, request: _Request) -> None:
        ask = request.ask
        if isinstance(ask, r.AskKeys):
            page = self._journal.keys(ask.cursor, PAGE_KEYS)
            self.pages += 1
            self._answer(number, request, r.Keys(page.keys.packed, page.as_of, page.cursor))
            return
        found = self._journal.since(b"", ask.last, EVENTS_BYTES_MAX)
        saves = self._saves.since(ask.saves)
        is_gap, is_news = found.is_gap or saves.is_gap, any(map(_concerns_tiers, found.events))
        if is_gap or is_news or saves.last != ask.saves or request.has_waited or not ask.wait_ms:
            self.gaps += is_gap
            newest = self._journal.newest
            gap = r.Changes(newest, newest, True, b"", b"", saves.last)
            self._answer(number, request, gap if is_gap else self._net_changes(found, newest, saves))
        elif found.events:
            request.ask = replace(ask, last=found.last)
            self._make_due(number)  # there may be more
        else:
            self._idle[number] = self._loop.call_later(ask.wait_ms / 1e3, self._end_wait, number)

    def _net_changes(self, found: EventSlice, newest: int, saves: NotesSlice) -> r.Changes:
        """What a slice of events comes to, as far as the keys fit an answer: the last event of a key counts, and more than a
        save that was given up; a save under way is newer than any event."""
        has = dict.fromkeys(saves.lost, False)
        last = found.last - len(found.events)
        named = len(saves.lost) + len(saves.under_way)
        for event in found.events:
            if not _concerns_tiers(event):
                last = event.id
                continue
            named += len(event.column)
            if named > r.FOLLOW_KEYS_MAX:
                break
            is_stored = bool(event.tiers & NODE_TIERS)
            has.update((key, is_stored or self._saves.is_under_way(key)) for key in event.column)
            last = event.id
        has.update(dict.fromkeys(saves.under_way, True))
        stored = b"".join(key for key, is_stored in has.items() if is_stored)
        removed = b"".join(key for key, is_stored in has.items() if not is_stored)
        return r.Changes(last, max(newest, last), False, stored, removed, saves.last)

    def _end_wait(self, number: int) -> None:
        del self._idle[number]
        self._requests[number].has_waited = True
        self._make_due(number)

    def _answer(self, number: int, request: _Request, answer: r.FollowAnswer) -> None:
        self._end(number)
        self.answers += 1
        request.answer(answer)

    def _end(self, number: int) -> None:
        self._requests.pop(number, None)
        timer = self._idle.pop(number, None)
        if timer is not None:
            timer.cancel()


def _concerns_tiers(event: Event) -> bool:
    """Whether it is about the node's own tiers. What an engine or a device has at level 0 nobody else can have from there."""
    return event.kind == EventKind.CREATED or event.is_of_node
