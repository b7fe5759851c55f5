"""Set task: holds on chunks of a group, each alone, part by part: what DRAM has first, then what other tiers and nodes have.

What is not stored, not allowed, or has no room is left out; no key waits for another one. Control thread only; `now_ns` is
an argument.

Invariant: `_held` has on each rank a hold for each key that is held, by its place, and 0 for the others. They count for the
holder.
"""

from collections import deque
from itertools import chain, compress
from operator import not_
from typing import cast

import kvpool_native
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.parts import Step, part_chunks
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.chain_holds import ChainHolds
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.tiering.tiering import Tiering

# Chunks that DRAM has not which are looked for in one part of a request: about half a millisecond.
SOUGHT_AT_ONCE = 16
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
        self._columns = keys.by_rank(len(session.namespace_ids))
        self.count = len(self._columns[0])
        self._held = [[_NO_HOLD] * self.count for _ in self._columns]
        self._asked = 0  # leading keys that were asked DRAM for
        self._seen: set[bytes] = set()  # those of the first rank among them
        self._missing: deque[int] = deque()
        self._begun: ChainHolds | None = None  # of the first one that is missing
        self._waiting: list[int] = []  # those that had to wait in this pass over what is missing
        self._has_waited = False  # whether all that was missing has been looked for once

    def __repr__(self) -> str:
        return f"<SetTask {len(self.holds)} holds for {self.count} chunks>"

    @property
    def holds(self) -> list[HoldId]:
        """All holds that it has."""
        begun = self._begun.holds if self._begun is not None else []
        return [*filter(None, chain.from_iterable(self._held)), *begun]

    def advance(self, now_ns: int, *, may_wait: bool) -> Step:
        """Do the next part; what has to wait is passed over. WAIT where nothing but that is left: later a part of it is tried
        each time, and without `may_wait` all of it for the last time. DONE where nothing is left,
        which takes a call of its own."""
        if self._asked < self.count:
            self._hold_in_dram(part_chunks(len(self._columns)), now_ns)
            return Step.MORE
        return self._seek_some(now_ns, may_wait=may_wait) if self._missing else Step.DONE

    def take_holds(self) -> tuple[dict[int, list[HoldId]], list[int]]:
        """On each rank one hold on all that is held, which belongs to the caller from now on, and which of the keys its chunks
        are, in its order: of a full group the first key comes last. REQUIRES: only `release_holds` follows."""
        # A turn's work for thousands of keys: each rank's by one call for each step.
        counts = [self._directory.count_whole(of_rank) for of_rank in self._held]  # 0 or 1 for each key
        is_whole = counts[0] if len(counts) == 1 else [*map(min, *counts)]
        places = [*compress(range(self.count), is_whole)]
        taken = [[*compress(of_rank, is_whole)] for of_rank in self._held]
        self._held = [[*compress(of_rank, map(not_, is_whole))] for of_rank in self._held]
        if not places:
            return {}, []
        if self._session.layout.is_chained:
            places.reverse()
            for of_rank in taken:
                of_rank.reverse()
        joined = [HoldId(self._directory.join_holds(of_rank)) if len(of_rank) > 1 else of_rank[0] for of_rank in taken]
        return {rank: [hold] for rank, hold in zip(self._session.layout.ranks, joined, strict=True)}, places

    def release_holds(self, now_ns: int) -> None:
        """Release the remaining holds, a bounded number at once."""
        if self._begun is not None:
            self._begun.release_holds(now_ns)
            self._begun = None
        self._ending.release_holds(self.holds, now_ns)
        self._held = []

    def _hold_in_dram(self, most: int, now_ns: int) -> None:
        owners = self._session.namespace_ids
        part = range(self._asked, min(self._asked + most, self.count))
        self._asked = part.stop
        for place in part:
            name = self._columns[0][place]
            if name in self._seen:
                continue  # what is named twice counts where it is named first
            self._seen.add(name)
            holds = cast("list[HoldId]", self._directory.hold_chain(owners, self._key(place), 1, self._holder, now_ns))
            if holds:
                self._keep(place, holds)
            else:
                self._missing.append(place)

    def _seek_some(self, now_ns: int, *, may_wait: bool) -> Step:
        settled = 0
        for _ in range(min(SOUGHT_AT_ONCE, len(self._missing))):
            settled += self._seek(now_ns)
        if self._missing and (settled or not may_wait or not self._has_waited):
            return Step.MORE
        if not self._waiting or not may_wait:
            return Step.MORE  # what still has to wait is left out
        self._missing.extend(self._waiting)
        self._waiting = []
        self._has_waited = True
        return Step.WAIT

    def _seek(self, now_ns: int) -> bool:
        """Look for the first one that is missing. Whether that is known now; else it has to wait."""
        place = self._missing[0]
        if self._begun is None:
            keys = KeyColumn(self._key(place))
            self._begun = ChainHolds(self._directory, self._tiering, self._session, keys, holder=self._holder)
        begun, step = self._begun, self._begun.advance(now_ns)
        if step is Step.MORE:
            return True
        self._missing.popleft()
        self._begun = None
        if step is Step.WAIT:
            self._waiting.append(place)
        elif begun.chunks and self._directory.affordable(self._holder, begun.holds, self._session.size_classes, 1):
            holds = begun.take_holds()
            self._keep(place, holds)
            self._directory.charge(holds, self._holder)
        begun.release_holds(now_ns)  # nothing, where they were taken
        return step is Step.DONE

    def _keep(self, place: int, holds: list[HoldId]) -> None:
        for of_rank, hold in zip(self._held, holds, strict=True):
            of_rank[place] = hold

    def _key(self, place: int) -> bytes:
        """The key of a chunk on each rank, packed."""
        return b"".join([column[place] for column in self._columns])
