"""Hold task: holds on what a hit needs of each group, taken part by part: one chain after the other, as far as each is whole.

Of a layout without groups it holds the leading chunks that are stored; of one with groups everything, or it ends with nothing.
Tasks of all or nothing that wait for room at once would keep from each other what each of them has: only the first one that
waits keeps its holds, the others release theirs and begin anew. What is missing here of chunks without a parent is pulled with
one request for each rank. Control thread only; `now_ns` is an argument.

Invariant: `_held` has the holds of the first chains, of each on all ranks; each covers all of its chain, unless chunks were
dropped since. They count for the holder.
"""

from collections.abc import Sequence
from itertools import chain, compress, count, repeat
from operator import lt
from typing import cast

import kvpool_native
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.parts import Step, part_chunks
from kvpool.index.sessions import EngineSession
from kvpool.pool.readers.chain_holds import ChainHolds
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.pool.readers.runs import Run
from kvpool.protocol.records import messages as m
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.remote import Asker

# Chunks without a parent that are held in one part of a request: about half a millisecond.
CHAINS_AT_ONCE = 16
# The tasks that wait for room, the one that waits longest first.
WaitingTasks = dict["HoldTask", None]


class HoldTask:
    """See the module. `runs`: of the session's groups, at least one."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        session: EngineSession,
        runs: Sequence[Run],
        *,
        holder: ConnectionId | None,
        ending: EndingHolds,
        chunks: int = 0,
        owner: str = "",
        waiting: WaitingTasks | None = None,
    ) -> None:
        """`holder`: whose share the holds count for; None: they are announced, of no reader, and nothing is urgent. `ending`:
        where what it releases goes. `chunks`: of the hit, where the layout has groups. `owner`: a node that is asked for what
        no tier here has and no other node is known to have. `waiting`: all that wait; None: it keeps its holds while it waits.
        """
        self._directory = directory
        self._tiering = tiering
        self._session = session
        self._runs = runs
        self._hit_chunks = chunks
        self._holder = holder
        self._ending = ending
        self._owner = owner
        self._waiting = waiting if session.groups else None
        self._ranks = runs[0].ranks
        self._count = sum(map(len, runs))
        self._held: list[HoldId] = []
        self._chain: ChainHolds | None = None  # the next one, where DRAM has not all of it

    def __repr__(self) -> str:
        return f"<HoldTask {self._held_chains} of {self._count} chains>"

    @property
    def holds(self) -> list[HoldId]:
        """All holds that it has."""
        return self._held + (self._chain.holds if self._chain is not None else [])

    @property
    def _held_chains(self) -> int:
        return len(self._held) // self._ranks

    @property
    def chunks(self) -> int:
        """How many leading chunks of the hit are held; of a layout with groups all or none."""
        whole = self._count_whole()
        if self._session.groups:
            return self._hit_chunks if whole == self._count else 0
        if self._chain is not None and not self._held:
            return self._chain.chunks
        return whole * self._size(self._runs[0])

    def _count_whole(self) -> int:
        """How many leading chains are held, of which nothing was dropped since."""
        chunks = chain.from_iterable(repeat(self._size(run), len(run) * self._ranks) for run in self._runs)
        are_short = map(lt, self._directory.count_whole(self._held), chunks)
        return next(compress(count(), are_short), len(self._held)) // self._ranks

    @staticmethod
    def _size(run: Run) -> int:
        """Chunks of each chain of a run that are held."""
        return run.chunks - run.first

    def advance(self, now_ns: int) -> Step:
        """Hold the next part. WAIT where DRAM has no room for it now; DONE where all is held, or a chain is not stored, or not
        allowed, any further."""
        step = self._advance(now_ns)
        if step is Step.WAIT and self._waiting is not None:
            self._waiting.setdefault(self)
            if next(iter(self._waiting)) is not self:
                self._release(now_ns)
        return step

    def take_holds(self) -> dict[int, list[HoldId]]:
        """On each rank a hold of each group, in the order of a lease's rows, on its `chunks`, which belong to the caller from
        now on; none where the holder may not hold them. REQUIRES: only `end` follows."""
        if self._chain is not None and not self._held:
            if not self._may_keep(self._runs[0], self._chain):
                return {}
            holds = self._chain.take_holds()
            self._charge(holds)
        else:
            end = self._count_whole() * self._ranks
            holds, self._held = self._held[:end], self._held[end:]
        return {
            rank: self._by_group(holds[place :: self._ranks]) for place, rank in enumerate(self._session.layout.ranks)
        }

    def _by_group(self, holds: list[HoldId]) -> list[HoldId]:
        """One hold in place of those of each chain of a group, on one rank."""
        found, first = [], 0
        for run in self._runs:
            of_run = holds[first : first + len(run)]
            first += len(run)
            found.append(HoldId(self._directory.join_holds(of_run)) if len(of_run) > 1 else of_run[0])
        return found

    def release_holds(self, now_ns: int) -> None:
        """Release the remaining holds, a bounded number at once."""
        if self._waiting is not None:
            self._waiting.pop(self, None)
        self._release(now_ns)

    def _release(self, now_ns: int) -> None:
        if self._chain is not None:
            self._chain.release_holds(now_ns)
            self._chain = None
        self._ending.release_holds(self._held, now_ns)
        self._held = []

    def _advance(self, now_ns: int) -> Step:
        for _ in range(CHAINS_AT_ONCE):
            run, index = self._next()
            holds = []
            if self._chain is None and self._count > 1:
                holds = self._hold_in_dram(run, index, now_ns)
            if not holds:
                step = self._advance_chain(run, index, now_ns)
                if self._chain is None or step is not Step.DONE:
                    return step
                if self._chain.chunks < self._size(run) or not self._may_keep(run, self._chain):
                    return Step.DONE
                holds, self._chain = self._chain.take_holds(), None
                self._charge(holds)
            self._held += holds
            if self._held_chains == self._count:
                return Step.DONE
        return Step.MORE

    def _hold_in_dram(self, run: Run, index: int, now_ns: int) -> list[HoldId]:
        """Holds on a chain by its last key on each rank; none where DRAM has not all of it, or not all is allowed."""
        if run.first or run.chunks * run.ranks > m.LEAF_CHUNKS_MAX:
            return []
        owners, leaves = run.session.namespace_ids, run.leaves(index).packed
        return cast("list[HoldId]", self._directory.hold_chain(owners, leaves, run.chunks, self._holder, now_ns))

    def _next(self) -> tuple[Run, int]:
        """The chain to be held next: its index in a run."""
        index = self._held_chains
        for run in self._runs:
            if index < len(run):
                return run, index
            index -= len(run)
        raise AssertionError(f"all of {self!r} are held")

    def _may_hold(self, run: Run, holds: list[HoldId], chunks: int) -> bool:
        """Whether the holder may hold a chain of so many chunks."""
        classes = run.session.size_classes
        return self._holder is None or self._directory.affordable(self._holder, holds, classes, chunks) >= chunks

    def _may_keep(self, run: Run, begun: ChainHolds) -> bool:
        """Whether the holder may still hold what it was allowed part by part. That of all tickets has many tasks under way."""
        return self._holder == self._session.holder or self._may_hold(run, begun.holds, begun.chunks)

    def _charge(self, holds: list[HoldId]) -> None:
        """Have a chain's chunks count for the holder before the next ones are asked for."""
        if self._holder is not None:
            self._directory.charge(holds, self._holder)

    def _advance_chain(self, run: Run, index: int, now_ns: int) -> Step:
        """Hold the next part of a chain, of which other tiers or nodes may have some."""
        if run.is_leaf:
            return Step.DONE
        is_chained = run.is_chain
        if self._chain is None:
            if not is_chained:
                self._pull_run(run, index)
            self._chain = ChainHolds(
                self._directory,
                self._tiering,
                run.session,
                run.keys(index),
                is_urgent=self._holder is not None,
                holder=self._holder,
                owner=self._owner,
                first=run.first,
            )
        step = self._chain.advance(now_ns)
        if step is Step.WAIT and not is_chained:
            # Begun anew after the wait, so that the run behind it is pulled with it.
            self._chain.release_holds(now_ns)
            self._chain = None
        return step

    def _pull_run(self, run: Run, first: int) -> None:
        """Begin to pull what is missing here of the next chunks without a parent, from one node after the other."""
        session = run.session
        if session.is_peer or self._holder is None or not self._tiering.remotes:
            return
        chunks = min(part_chunks(self._ranks), len(run) - first)
        free = [HoldId(0)] * self._ranks
        allowed = self._directory.affordable(self._holder, free, session.size_classes, chunks)
        for namespace, column in zip(session.namespaces.values(), run.columns, strict=True):
            missing = self._tiering.missing(column[first : first + allowed])
            asker, at = Asker(session.connection), 0
            while at < len(missing):
                elsewhere = self._tiering.find_elsewhere(namespace, missing, at, asker=asker, is_chained=False)
                if elsewhere is None:
                    break
                end = elsewhere.run.run.end
                placed = self._tiering.place(elsewhere, at, end)
                if not self._tiering.start_pull(elsewhere) or at + placed < end:
                    break
                at = end
