"""Acquire task: holds on the longest stored prefix of a chain, taken part by part; chunks that only a lower tier has are
promoted, and what other nodes seem to have after them is pulled.

Holds no lease: its creator makes one of its holds, or ends the task. Control thread only; `now_ns` is an argument.

Invariant: every hold in `holds` covers exactly the first `chunks` chunks; there is one for each rank, none while `chunks` is 0.
"""

import kvpool_native
from kvpool.index.parts import Step, part_chunks
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.tiering.promotions import Wanted
from kvpool.tiering.tiering import RunBelow, RunElsewhere, Tiering
from kvpool.tiers.remote import Asker
from kvpool.types import ConnectionId, HoldId


class AcquireTask:
    """See the module. `keys`: of one rank after those of another. No more than the `holder` may hold, where one is named."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        session: EngineSession,
        keys: KeyColumn,
        *,
        is_urgent: bool = True,
        holder: ConnectionId | None = None,
        owner: str = "",
    ) -> None:
        """`owner`: a node that is asked for what no tier here has and no other node is known to have."""
        self._directory = directory
        self._tiering = tiering
        self._ranks = list(session.namespaces.values())
        self._classes = session.size_classes
        self._columns = keys.by_rank(len(self._ranks))
        self._length = len(self._columns[0])
        self._is_urgent = is_urgent and not session.is_peer
        self._peer = session.peer
        self._may_pull = bool(tiering.remotes) and not session.is_peer
        self._holder = holder
        self._asker = Asker(session.connection, owner)
        self.holds: list[HoldId] = []
        self.chunks = 0

    def __repr__(self) -> str:
        return f"<AcquireTask {self.chunks} of {self._length} chunks>"

    def advance(self, now_ns: int) -> Step:
        """Hold the next part. WAIT where DRAM has no room for all of it now; DONE where no more is stored, or allowed."""
        self._give_up_dropped(now_ns)
        first = self.chunks
        wanted = min(part_chunks(len(self._ranks)), self._length - first)
        columns = [column[first : first + wanted] for column in self._columns]
        found = self._extend(columns, now_ns)
        if 0 < min(found) == wanted == self._affordable(wanted):
            self.chunks += wanted
            return Step.MORE if self.chunks < self._length else Step.DONE
        lower = [self._find_in_lower_tier(rank, column, found[rank]) for rank, column in enumerate(columns)]
        stored = [max(here, run.chunks if run else 0) for here, run in zip(found, lower, strict=True)]
        elsewhere = [self._find_elsewhere(rank, column, stored[rank]) for rank, column in enumerate(columns)]
        reach = min(there.run.end if there else here for here, there in zip(stored, elsewhere, strict=True))
        chunks = reach = self._affordable(reach)
        for rank, column in enumerate(columns):
            placed = self._promote(rank, column, lower[rank], found=found[rank], reach=min(reach, stored[rank]))
            chunks = min(chunks, self._pull(rank, column, elsewhere[rank], found=placed, reach=reach))
        self._align(columns, found, chunks, now_ns)
        if chunks < reach:
            return Step.WAIT
        return Step.MORE if chunks == wanted and self.chunks < self._length else Step.DONE

    def take(self) -> list[HoldId]:
        """The holds, which belong to the caller from now on."""
        holds, self.holds = self.holds, []
        return holds

    def end(self, now_ns: int) -> None:
        """Release the remaining holds."""
        for hold in self.take():
            if hold:
                self._directory.release(hold, now_ns)

    def _give_up_dropped(self, now_ns: int) -> None:
        """Hold the remaining prefix where chunks were dropped since the last part: later chunks do not follow it any longer."""
        left = min(self._directory.count_whole(self.holds), default=self.chunks)
        if left == self.chunks:
            return
        self.chunks = left
        if not left:
            self.end(now_ns)
        for hold in self.holds:
            self._directory.shorten(hold, left, now_ns)

    def _affordable(self, chunks: int) -> int:
        """So many chunks more, or as many as the holder may still hold."""
        if self._holder is None:
            return chunks
        holds = self.holds or [HoldId(0)] * len(self._ranks)
        allowed = self._directory.affordable(self._holder, holds, self._classes, self.chunks + chunks)
        return max(0, allowed - self.chunks)

    def _extend(self, columns: list[KeyColumn], now_ns: int) -> list[int]:
        """Hold the next keys that DRAM has. Returns how many chunks on each rank."""
        if self.holds:
            return [
                self._directory.extend(hold, column.packed, now_ns)
                for hold, column in zip(self.holds, columns, strict=True)
            ]
        found = [
            self._directory.acquire(namespace.id, column.packed, now_ns)
            for namespace, column in zip(self._ranks, columns, strict=True)
        ]
        self.holds = [HoldId(held.id) for held in found]
        return [held.chunks for held in found]

    def _find_in_lower_tier(self, rank: int, column: KeyColumn, found: int) -> RunBelow | None:
        if found == len(column):
            return None
        parent = self._columns[rank].before(self.chunks)
        return self._tiering.find(self._ranks[rank], column, found, parent=parent)

    def _promote(self, rank: int, column: KeyColumn, lower: RunBelow | None, *, found: int, reach: int) -> int:
        """Promote chunks up to `reach`. Returns how many are in DRAM or being promoted."""
        if lower is None:
            return found
        parent = self._columns[rank].before(self.chunks + found)
        wanted = Wanted(
            self._ranks[rank],
            parent,
            column[found:reach],
            first=found,
            is_urgent=self._is_urgent,
            peer=self._peer,
        )
        return found + self._tiering.promote(lower, wanted)

    def _find_elsewhere(self, rank: int, column: KeyColumn, stored: int) -> RunElsewhere | None:
        if stored == len(column) or not self._may_pull:
            return None
        return self._tiering.find_elsewhere(self._ranks[rank], column, stored, self._asker)

    def _pull(self, rank: int, column: KeyColumn, elsewhere: RunElsewhere | None, *, found: int, reach: int) -> int:
        """Pull chunks up to `reach`, after `found` ones here. Returns how many are in DRAM or on their way."""
        if elsewhere is None or found >= reach:
            return found
        before = self._columns[rank][: self.chunks + found]
        parent = before[-1] if before else b""
        wanted = Wanted(
            self._ranks[rank],
            parent,
            column[found:reach],
            first=found,
            is_urgent=self._is_urgent,
            asker=self._asker,
        )
        return found + self._tiering.pull(elsewhere, before, wanted)

    def _align(self, columns: list[KeyColumn], found: list[int], chunks: int, now_ns: int) -> None:
        """Have each hold cover `chunks` chunks of this part: some were found, others have been promoted since."""
        total = self.chunks + chunks
        for rank, column in enumerate(columns):
            hold, here = self.holds[rank], found[rank]
            if hold and not total:
                self._directory.release(hold, now_ns)
            elif here > chunks:
                self._directory.shorten(hold, total, now_ns)
            elif here < chunks:
                more = column[here:chunks].packed
                if hold:
                    taken = self._directory.extend(hold, more, now_ns)
                else:
                    held = self._directory.acquire(self._ranks[rank].id, more, now_ns)
                    taken, self.holds[rank] = held.chunks, HoldId(held.id)
                assert taken == chunks - here
        if not total:
            self.holds = []
        self.chunks = total
