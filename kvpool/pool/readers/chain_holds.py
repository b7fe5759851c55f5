"""Chain holds: holds on the longest stored prefix of a chain, taken part by part; chunks that only a lower tier has are
promoted, and what other nodes seem to have after them is pulled: by each rank with one request to each node, after the last
part.

Holds no lease: its creator makes one of its holds, or ends the task. Control thread only; `now_ns` is an argument.

Invariant: every hold in `holds` covers exactly the first `chunks` chunks; there is one for each rank, none while `chunks` is 0.
"""

import kvpool_native
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.parts import Step, part_chunks
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.tiering.promotions import Wanted
from kvpool.tiering.tiering import RunBelow, RunElsewhere, Tiering
from kvpool.tiers.remote import Asker


class ChainHolds:
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
        first: int = 0,
    ) -> None:
        """`owner`: a node that is asked for what no tier here has and no other node is known to have. `first`: what is before
        this chunk is not held; DRAM has to have the one before it."""
        self._directory = directory
        self._tiering = tiering
        self._ranks = list(session.namespaces.values())
        self._classes = session.size_classes
        columns = keys.by_rank(len(self._ranks))
        self._parents = [column.before(first) for column in columns]
        self._columns = [column[first:] for column in columns] if first else columns
        self._length = len(self._columns[0])
        self._is_urgent = is_urgent and not session.is_peer
        self._peer = session.peer
        self._may_pull = bool(tiering.remotes) and not session.is_peer and not first
        self._holder = holder
        self._asker = Asker(session.connection, owner)
        self._elsewhere: list[RunElsewhere | None] = [None] * len(self._ranks)
        self.holds: list[HoldId] = []
        self.chunks = 0

    def __repr__(self) -> str:
        return f"<ChainHolds {self.chunks} of {self._length} chunks>"

    def advance(self, now_ns: int) -> Step:
        """Hold the next part. WAIT where DRAM has no room for all of it now; DONE where no more is stored, or allowed."""
        self._give_up_dropped(now_ns)
        step = self._hold_part(now_ns)
        if step is Step.MORE or self._start_pulls():
            return step
        self._give_up_dropped(now_ns)
        return Step.WAIT

    def _hold_part(self, now_ns: int) -> Step:
        first = self.chunks
        wanted = min(part_chunks(len(self._ranks)), self._length - first)
        columns = [column[first : first + wanted] for column in self._columns]
        found = self._extend(columns, now_ns)
        if 0 < min(found) == wanted == self._affordable(wanted):
            self.chunks += wanted
            return Step.MORE if self.chunks < self._length else Step.DONE
        lower = [self._find_in_lower_tier(rank, column, found[rank]) for rank, column in enumerate(columns)]
        stored = [max(here, run.chunks if run else 0) for here, run in zip(found, lower, strict=True)]
        ends = [self._find_elsewhere(rank, here, wanted) for rank, here in enumerate(stored)]
        chunks = reach = self._affordable(min(ends))
        for rank, column in enumerate(columns):
            placed = self._promote(rank, column, lower[rank], found=found[rank], reach=min(reach, stored[rank]))
            chunks = min(chunks, self._place(rank, placed, reach))
        self._align(columns, found, chunks, now_ns)
        if chunks < reach:
            return Step.WAIT
        # What one node has may go on at another one.
        return Step.MORE if chunks and self.chunks < self._length else Step.DONE

    def take_holds(self) -> list[HoldId]:
        """The holds, which belong to the caller from now on."""
        holds, self.holds = self.holds, []
        return holds

    def release_holds(self, now_ns: int) -> None:
        """Release the remaining holds. What was placed for other requests, too, is pulled in any case."""
        self._start_pulls()
        for hold in self.take_holds():
            if hold:
                self._directory.release(hold, now_ns)

    def _give_up_dropped(self, now_ns: int) -> None:
        """Hold the remaining prefix where chunks were dropped since the last part: later chunks do not follow it any longer."""
        left = min(self._directory.count_whole(self.holds), default=self.chunks)
        if left == self.chunks:
            return
        self.chunks = left
        self._start_pulls()
        self._elsewhere = [None] * len(self._ranks)  # whoever brought nothing may not be the best any longer
        if not left:
            self.release_holds(now_ns)
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
        found = [self._acquire(rank, column, now_ns) for rank, column in enumerate(columns)]
        self.holds = [HoldId(held.id) for held in found]
        return [held.chunks for held in found]

    def _acquire(self, rank: int, keys: KeyColumn, now_ns: int) -> kvpool_native.Held:
        return self._directory.acquire(self._ranks[rank].id, keys.packed, now_ns, self._parents[rank])

    def _find_in_lower_tier(self, rank: int, column: KeyColumn, found: int) -> RunBelow | None:
        if found == len(column):
            return None
        parent = self._columns[rank].before(self.chunks, self._parents[rank])
        return self._tiering.find(self._ranks[rank], column, found, parent=parent)

    def _promote(self, rank: int, column: KeyColumn, lower: RunBelow | None, *, found: int, reach: int) -> int:
        """Promote chunks up to `reach`. Returns how many are in DRAM or being promoted."""
        if lower is None:
            return found
        parent = self._columns[rank].before(self.chunks + found, self._parents[rank])
        wanted = Wanted(
            self._ranks[rank],
            parent,
            column[found:reach],
            first=found,
            is_urgent=self._is_urgent,
            peer=self._peer,
        )
        return found + self._tiering.promote(lower, wanted)

    def _find_elsewhere(self, rank: int, stored: int, wanted: int) -> int:
        """How many chunks of this part are here or elsewhere, where `stored` are here."""
        at = self.chunks + stored
        if stored == wanted or not self._may_pull:
            return stored
        elsewhere = self._elsewhere[rank]
        if elsewhere is None or at >= elsewhere.run.run.end:
            if elsewhere is not None:
                self._tiering.start_pull(elsewhere)
            elsewhere = self._elsewhere[rank] = self._tiering.find_elsewhere(
                self._ranks[rank], self._columns[rank], at, asker=self._asker, is_urgent=self._is_urgent
            )
        return stored if elsewhere is None else min(elsewhere.run.run.end - self.chunks, wanted)

    def _place(self, rank: int, found: int, reach: int) -> int:
        """Give the chunks up to `reach` that are to be pulled slots, after `found` ones here. Returns how many are in DRAM or
        on their way."""
        elsewhere = self._elsewhere[rank]
        if elsewhere is None or found >= reach:
            return found
        return found + self._tiering.place(elsewhere, self.chunks + found, self.chunks + reach)

    def _start_pulls(self) -> bool:
        """Have what was placed pulled. Where some of it cannot be now it is given up, false is returned, and the run that
        seemed to be elsewhere is looked for anew."""
        are_started = True
        for rank, elsewhere in enumerate(self._elsewhere):
            if elsewhere is not None and not self._tiering.start_pull(elsewhere):
                are_started, self._elsewhere[rank] = False, None
        return are_started

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
                    held = self._acquire(rank, KeyColumn(more), now_ns)
                    taken, self.holds[rank] = held.chunks, HoldId(held.id)
                assert taken == chunks - here
        if not total:
            self.holds = []
        self.chunks = total
