"""Store search: longer hits by what the shared store has. Used by the lookups of one Pool; any thread.

Chunks of the shared store are in no table. A lookup that ends before its last key asks the daemon twice at most: which of the
chunks the store has that the full groups lack, in the order of their chains; and, before the end that all of them would then
reach, which chunks of the windows and states. A plain layout is one full group, and asks once. A hit has only what was found.
Both questions are bounded in keys, and in time together. What was sought without success is remembered, bounded: where the full
groups end, for every prompt that begins so; else this prompt's question.

    chunk      0    1    2    3    4    5    6    7
    full       here here here ■    ■    ■    ■    ?     1: which of 3 … 7? The store has 3 … 6, so the end is 7
    window                    here      ■    ■          2: which of the last ones before 7? 5 and 6
    state                               ?    ■

Lock: `_lock` guards `_fruitless`, never held across a request.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.clock import NS_PER_S, Clock, Deadline, MonotonicClock
from kvpool.errors import KVPoolError, ProtocolError
from kvpool.key_column import KeyColumn
from kvpool.protocol.records import seeking as sk
from kvpool.states import DRAM, PEER, STORE
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session

Levels = npt.NDArray[np.uint8]
# Keys of windows and states in one question: the ends that it is about are as many, over the groups and ranks.
END_KEYS_MAX = 2048
# Chunks of windows and states that a hit may have elsewhere: of 16 leases at once with so many on another node, all are served;
# with twice as many the last ones wait longer than a lease does (measured: two daemons on two cores, small chunks).
ELSEWHERE_MAX = 256
FRUITLESS_MAX = 4096
WAIT_FRACTION = 0.5
_ABSENT = 0xFF


class StoreSearch:
    """See the module. `runs`: by column, None for a full group, else how many chunks before a hit's end it needs. REQUIRES, of
    its calls: `can_search`."""

    def __init__(self, runs: Sequence[int | None], link: Link, *, timeout_s: float, clock: Clock | None = None) -> None:
        """`timeout_s`: of a round trip; both questions get WAIT_FRACTION of it."""
        self._full = [number for number, run in enumerate(runs) if run is None]
        self._others = [(number, run) for number, run in enumerate(runs) if run is not None]
        self._columns = len(runs)
        self._link = link
        self._timeout_s = timeout_s
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        # Until when, and how far the full groups reach; guarded by _lock.
        self._fruitless: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<StoreSearch, {len(self._fruitless)} fruitless questions>"

    def search(self, session: Session, columns: Sequence[KeyColumn], hit: Levels, full: int) -> tuple[Levels, int]:
        """The level of each chunk of the longest hit, and how far the full groups reach; of `hit` and `full`, which are what is
        known without the store, where the store has nothing more. `columns`: the keys that a hit may have, more than it has."""
        now_ns = self._clock.now_ns()
        whole = columns[0][-1] + struct.pack("<2Q", len(hit), full)
        for question in (columns[0][full], whole) if full == len(hit) else (whole,):
            with self._lock:
                until_ns, reach = self._fruitless.get(question, (0, 0))
            if until_ns > now_ns:
                return hit, max(full, reach)
        asking = _Asking(session, self._columns, Deadline(WAIT_FRACTION * self._timeout_s))
        try:
            found, reach, is_end = self._longer(asking, columns, len(hit))
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return hit, full
        until_ns = now_ns + int(asking.remember_s * NS_PER_S)
        if is_end:
            self._note_fruitless(columns[0][reach], until_ns, reach)
        if not len(found) and reach > len(hit):
            self._note_fruitless(whole, until_ns, reach)
        return (found if len(found) else hit), max(full, reach)

    def _longer(self, asking: "_Asking", columns: Sequence[KeyColumn], least: int) -> tuple[Levels, int, bool]:
        """The level of each chunk of the longest hit of more than `least` chunks, of none where there is none; how far the full
        groups reach; and whether the store lacks what follows."""
        runs, sought = self._full_runs(asking, columns)
        reach = min((len(run) for run in runs), default=len(columns[0]))
        is_end = reach < sought
        if reach <= least:
            return np.empty(0, np.uint8), reach, is_end
        levels = np.maximum.reduce([run[:reach] for run in runs]) if runs else np.full(reach, DRAM, np.uint8)
        if not self._others:
            return levels, reach, is_end
        first = max(0, reach - END_KEYS_MAX // len(self._others), least + 1 - max(run for _, run in self._others))
        rows = self._rows(asking, columns, first=first, end=reach, least=least)
        wanted = [run for _, run in self._others]
        for end in ends_of(rows, wanted, first):
            used = [row[max(0, end - run) - first : end - first] for row, run in zip(rows, wanted, strict=True)]
            if end <= least:
                break
            if sum(int((row >= PEER).sum()) for row in used) > ELSEWHERE_MAX:
                continue
            levels = levels[:end].copy()
            for row in used:
                np.maximum(levels[end - len(row) :], row, out=levels[end - len(row) :])
            return levels, reach, is_end
        return np.empty(0, np.uint8), reach, is_end

    def _full_runs(self, asking: "_Asking", columns: Sequence[KeyColumn]) -> tuple[list[Levels], int]:
        """The level of each chunk of each full column's leading run, of what is known and of what the store has behind it; and
        before which chunk the store was asked for all that is not known."""
        runs = {number: np.frombuffer(asking.index.lookup(columns[number].packed), np.uint8) for number in self._full}
        short = {number: len(run) for number, run in runs.items() if len(run) < len(columns[number])}
        share = max(1, sk.SEEK_KEYS_MAX // max(1, len(short)))
        there = asking.ask_store({number: columns[number][first : first + share] for number, first in short.items()})
        for number, found in there.items():
            runs[number] = np.concatenate([runs[number], np.full(_leading(found), STORE, np.uint8)])
        return list(runs.values()), min((first + len(there[number]) for number, first in short.items()), default=0)

    def _rows(
        self, asking: "_Asking", columns: Sequence[KeyColumn], *, first: int, end: int, least: int
    ) -> list[Levels]:
        """The level of each chunk from `first` up to `end` of each window and state, _ABSENT where nobody has it."""
        rows = {number: _known(asking, columns[number], first, end) for number, _ in self._others}
        found = list(rows.values())
        known = next(ends_of(found, [run for _, run in self._others], first), 0)
        if known == end:
            return found
        missing = {}
        for number, run in self._others:
            begin = max(0, max(known, least) + 1 - run - first)
            missing[number] = begin + np.flatnonzero(rows[number][begin:] == _ABSENT)
        there = asking.ask_store({number: columns[number].chosen(first + which) for number, which in missing.items()})
        for number, which in missing.items():
            rows[number][which[there[number]]] = STORE
        return found

    def _note_fruitless(self, question: bytes, until_ns: int, reach: int) -> None:
        with self._lock:
            self._fruitless[question] = until_ns, reach
            self._fruitless.move_to_end(question)
            if len(self._fruitless) > FRUITLESS_MAX:
                self._fruitless.popitem(last=False)


class _Asking:
    """The questions of one lookup. `remember_s`: how long they are not worth asking again, from the last answer."""

    def __init__(self, session: Session, columns: int, deadline: Deadline) -> None:
        self.index = session.index
        self.remember_s = 0.0
        self._session = session
        self._columns = columns
        self._deadline = deadline

    def ask_store(self, wanted: dict[int, KeyColumn]) -> dict[int, npt.NDArray[np.bool_]]:
        """Which of these keys, by column, the store has; none where there is no time left. Raises KVPoolError."""
        counts = [len(wanted.get(number, b"")) for number in range(self._columns)]
        left_s = self._deadline.remaining_s()
        there = np.zeros(sum(counts), np.bool_)
        if len(there) and left_s > 0:
            packed = b"".join(wanted[number].packed for number in range(self._columns) if number in wanted)
            request = sk.Seek(np.array(counts, "<u4").tobytes(), packed, left_s)
            answer = self._session.call(request, sk.Sought)
            if len(answer.there) != len(there):
                raise ProtocolError(f"there has {len(answer.there)} bytes, expected {len(there)}")
            there = np.frombuffer(answer.there, np.uint8) == 1
            self.remember_s = answer.remember_s
        ends = np.cumsum(counts)
        return {number: there[ends[number] - counts[number] : ends[number]] for number in wanted}


def can_search(session: Session) -> bool:
    """Whether there is a shared store."""
    return session.welcome.has_store


def ends_of(rows: Sequence[Levels], runs: Sequence[int], first: int) -> Iterator[int]:
    """The ends, the greatest first, before which each row has as many chunks as its run names, or all where there are fewer.

    `rows`: the levels of the chunks from `first` on; of those before it nothing is known.
    """
    ends = np.arange(1, len(rows[0]) + 1)
    are_whole = np.ones(len(ends), np.bool_)
    for row, run in zip(rows, runs, strict=True):
        counts = np.concatenate([[0], np.cumsum(row != _ABSENT)])
        wanted = np.minimum(run, first + ends)
        begins = ends - wanted
        are_whole &= (begins >= 0) & (counts[ends] - counts[np.maximum(begins, 0)] == wanted)
    yield from (first + ends[are_whole][::-1]).tolist()


def _known(asking: _Asking, column: KeyColumn, first: int, end: int) -> Levels:
    """The level of each chunk from `first` up to `end` as shared memory has it."""
    row = np.full(end - first, _ABSENT, np.uint8)
    while end > first:
        end, level = asking.index.last_run(column.packed, end, 1, False)
        if end > first:
            row[end - 1 - first] = level[0]
            end -= 1
    return row


def _leading(there: npt.NDArray[np.bool_]) -> int:
    """How many leading ones are so."""
    absent = np.flatnonzero(~there)
    return int(absent[0]) if len(absent) else len(there)
