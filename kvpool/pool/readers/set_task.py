"""Set task: holds on chunks of a group, each alone, part by part: what DRAM has first, then what other tiers and nodes have.

What is not stored, not allowed, or has no room is left out; no key waits for another one. What DRAM has of the whole set is
held before any of it is brought here, and what lower tiers have is kept there until the end: none of it makes room for what the
set names before it. Control thread only; `now_ns` is an argument.

Invariant: `_held` has the holds of each rank, which count for the holder; a place of the set is in one of them at most, and in
one exactly where `_has` of that rank says so.
"""

from collections import deque
from collections.abc import Callable, Sequence

import kvpool_native
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.parts import Step, part_chunks
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.tiering.promotions import Wanted
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.remote import Asker

# Chunks that DRAM has not which are looked for in one part of a request, on all ranks together: 0.2 ms where a disk has them,
# twice that on a busy machine (measured).
SOUGHT_AT_ONCE = 64
_NO_HOLD = HoldId(0)


class SetTask:
    """See the module. `session`: the group's; `keys`: of one rank after those of another."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        session: EngineSession,
        keys: KeyColumn,
        *,
        ending: EndingHolds,
    ) -> None:
        """`ending`: where what it releases goes."""
        self._directory = directory
        self._tiering = tiering
        self._session = session
        self._holder: ConnectionId = session.holder
        self._ending = ending
        self._ranks = list(session.namespaces.values())
        self._columns = keys.by_rank(len(self._ranks))
        self.count = len(self._columns[0])
        self._held: list[list[kvpool_native.HeldSet]] = [[] for _ in self._ranks]
        self._kept: list[Callable[[], None]] = []  # what ends that lower tiers keep some of it
        self._has = [bytearray(self.count) for _ in self._ranks]
        self._asker = Asker(session.connection) if tiering.remotes and not session.is_peer else None
        self._sought_at_once = max(1, SOUGHT_AT_ONCE // len(self._ranks))
        self._asked = 0  # leading keys that were asked DRAM for
        self._seen: set[bytes] = set()  # those of the first rank among them
        self._missing: deque[int] = deque()
        self._waiting: list[int] = []  # those that had to wait in this pass over what is missing
        self._beyond: list[int] = []  # those beyond what the holder may hold, wherever they are
        self._has_waited = False  # whether all that was missing has been looked for once

    def __repr__(self) -> str:
        return f"<SetTask {len(self.holds)} holds for {self.count} chunks>"

    @property
    def holds(self) -> list[HoldId]:
        """All holds that it has."""
        return [HoldId(held.id) for of_rank in self._held for held in of_rank]

    @property
    def left_out(self) -> list[int]:
        """The keys of which it is not known that they are stored nowhere: they are too many to hold, or have no room."""
        return self._beyond + self._waiting

    def advance(self, now_ns: int, *, may_wait: bool) -> Step:
        """Do the next part; what has to wait is passed over. WAIT where nothing but that is left: later a part of it is tried
        each time, and without `may_wait` all of it for the last time. DONE where nothing is left,
        which takes a call of its own."""
        if self._asked < self.count:
            self._hold_in_dram(part_chunks(len(self._ranks)), now_ns)
            return Step.MORE
        return self._seek_some(now_ns, may_wait=may_wait) if self._missing else Step.DONE

    def take_holds(self, now_ns: int) -> tuple[dict[int, list[HoldId]], list[int]]:
        """On each rank one hold on all that is held, which belongs to the caller from now on, and which of the keys its chunks
        are, in its order: of a full group the first key comes last. REQUIRES: only `release_holds` follows."""
        is_last_newest = not self._session.layout.is_chained
        held, self._held = self._held, []
        joined = self._directory.join_sets(held, self.count, is_last_newest, now_ns)
        ranks = self._session.layout.ranks if joined.holds else ()
        return {rank: [HoldId(hold)] for rank, hold in zip(ranks, joined.holds, strict=True)}, joined.places

    def release_holds(self, now_ns: int) -> None:
        """Release the remaining holds, a bounded number at once; lower tiers may lose what they have of it."""
        kept, self._kept = self._kept, []
        for let_go in kept:
            let_go()
        holds, self._held = self.holds, []
        self._ending.release_holds(holds, now_ns)

    def _hold_in_dram(self, most: int, now_ns: int) -> None:
        part = range(self._asked, min(self._asked + most, self.count))
        self._asked = part.stop
        names = self._columns[0][part.start : part.stop]
        places = []
        for place, name in zip(part, names, strict=True):
            if name not in self._seen:  # what is named twice counts where it is named first
                self._seen.add(name)
                places.append(place)
        missing = self._hold(range(len(self._ranks)), places, now_ns)
        self._missing.extend(missing)
        for rank, namespace in enumerate(self._ranks):
            lacking = [place for place in missing if not self._has[rank][place]]
            if lacking:
                self._kept += self._tiering.keep_each(namespace, self._columns[rank].chosen(lacking))

    def _hold(self, ranks: Sequence[int], places: Sequence[int], now_ns: int) -> list[int]:
        """Hold what is in DRAM of these places on these ranks and is not held. Returns those that are not on each of them."""
        lacking = [[place for place in places if not self._has[rank][place]] for rank in ranks]
        keys = [self._columns[rank].chosen(lacks).packed for rank, lacks in zip(ranks, lacking, strict=True)]
        owners = [self._ranks[rank].id for rank in ranks]
        for rank, held in zip(
            ranks, self._directory.hold_each(owners, keys, lacking, self._holder, now_ns), strict=True
        ):
            if held.id:
                self._held[rank].append(held)
                has = self._has[rank]
                for place in held.places:
                    has[place] = 1
        return [place for place in places if not all(self._has[rank][place] for rank in ranks)]

    def _seek_some(self, now_ns: int, *, may_wait: bool) -> Step:
        sought = [self._missing.popleft() for _ in range(min(self._sought_at_once, len(self._missing)))]
        waiting = self._seek(sought, now_ns)
        self._waiting += waiting
        are_settled = len(waiting) < len(sought)
        if self._missing and (are_settled or not may_wait or not self._has_waited):
            return Step.MORE
        if not self._waiting or not may_wait:
            return Step.MORE  # what still has to wait is left out
        self._missing.extend(self._waiting)
        self._waiting = []
        self._has_waited = True
        return Step.WAIT

    def _seek(self, places: Sequence[int], now_ns: int) -> list[int]:
        """Have what is elsewhere of these places brought, and hold it: on one rank after the other, what the ranks before
        have. Returns those that have to wait."""
        places = self._hold(range(len(self._ranks)), places, now_ns)  # what has come meanwhile
        if not places:
            return []
        free = [_NO_HOLD] * len(self._ranks)
        allowed = self._directory.affordable(self._holder, free, self._session.size_classes, len(places))
        self._beyond += places[allowed:]
        places = places[:allowed]
        waiting: list[int] = []
        for rank, namespace in enumerate(self._ranks):
            lacking = [place for place in places if not self._has[rank][place]]
            if lacking:
                session, keys = self._session, self._columns[rank].chosen(lacking)
                is_urgent = not session.is_peer
                wanted = Wanted(namespace, b"", keys, is_urgent=is_urgent, peer=session.peer, are_alone=True)
                found = self._tiering.bring_each(wanted, self._asker)
                left = set(self._hold([rank], lacking, now_ns))
                waiting += [lacking[number] for number in sorted(found) if lacking[number] in left]
                places = [place for place in places if place not in left]
        return waiting
