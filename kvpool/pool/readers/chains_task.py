"""Chains task: holds on whole chains, taken one after the other, as far as they are whole.

A chunk of a window or a state has no parent: it is a chain of its own, with a hold of its own. What is missing here of a run of
them is pulled with one request for each rank. Control thread only; `now_ns` is an argument.

Invariant: `_held` has the holds of the first chains, of each on all ranks; each covers all of its chain, unless chunks were
dropped since.
"""

from collections.abc import Sequence
from itertools import chain, compress, count, repeat
from operator import lt

import kvpool_native
from kvpool.index.parts import Step, part_chunks
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.acquire_task import AcquireTask
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.protocol.records import messages as m
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.remote import Asker
from kvpool.types import ConnectionId, HoldId

# Chunks without a parent that are held in one part of a request: about half a millisecond.
CHAINS_AT_ONCE = 16


class Chains:
    """Chains of the session's namespaces: one, or each chunk by itself where chunks have no parent.

    `columns`: the keys of each rank. `chunks`: of each chain.
    """

    def __init__(self, session: EngineSession, keys: KeyColumn) -> None:
        """`keys`: of one rank after those of another."""
        self.session = session
        self.columns = keys.by_rank(len(session.namespaces))
        self.chunks = len(self.columns[0]) if session.layout.is_chained else 1

    def __len__(self) -> int:
        return len(self.columns[0]) // self.chunks

    def leaves(self, index: int) -> KeyColumn:
        """The last key of a chain on each rank."""
        return KeyColumn.of(column[(index + 1) * self.chunks - 1] for column in self.columns)

    def keys(self, index: int) -> KeyColumn:
        """All keys of a chain, of one rank after those of another."""
        part = slice(index * self.chunks, (index + 1) * self.chunks)
        return KeyColumn(b"".join(column[part].packed for column in self.columns))


class ChainsTask:
    """See the module. `chains`: at least one. What is held counts for the `holder`. Without one it is announced: then it is no
    reader's, nothing is urgent, and other nodes are not asked."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        session: EngineSession,
        chains: Sequence[Chains],
        *,
        holder: ConnectionId | None,
        ending: EndingHolds,
    ) -> None:
        """`ending`: what it releases goes there."""
        self._directory = directory
        self._tiering = tiering
        self._session = session
        self._chains = chains
        self._ending = ending
        self._holder = holder
        self._ranks = len(chains[0].columns)
        self._count = sum(map(len, chains))
        self._held: list[HoldId] = []
        self._task: AcquireTask | None = None  # of the next chain, where DRAM has not all of it

    def __repr__(self) -> str:
        return f"<ChainsTask {self._held_chains} of {self._count} chains>"

    def __len__(self) -> int:
        return self._count

    @property
    def holds(self) -> list[HoldId]:
        """All holds that it has."""
        return self._held + (self._task.holds if self._task is not None else [])

    @property
    def _held_chains(self) -> int:
        return len(self._held) // self._ranks

    def advance(self, now_ns: int) -> Step:
        """Hold the next part. DONE where all is held, or a chain is not stored, or not allowed, any longer."""
        for _ in range(CHAINS_AT_ONCE):
            chains, index = self._next()
            holds = self._take_from_dram(chains, index, now_ns) if self._task is None else []
            if not holds:
                step = self._advance_chain(chains, index, now_ns)
                if self._task is None or step is not Step.DONE:
                    return step
                if self._task.chunks < chains.chunks:
                    return Step.DONE
                holds, self._task = self._task.take(), None
            if self._holder is not None:  # its chunks count for the holder before the next ones are asked for
                self._directory.charge(holds, self._holder)
            self._held += holds
            if self._held_chains == self._count:
                return Step.DONE
        return Step.MORE

    def count_whole(self) -> int:
        """How many leading chains are held, and nothing of them was dropped since."""
        chunks = chain.from_iterable(repeat(chains.chunks, len(chains) * self._ranks) for chains in self._chains)
        are_short = map(lt, self._directory.count_whole(self._held), chunks)
        return next(compress(count(), are_short), len(self._held)) // self._ranks

    def take(self, chains: int) -> list[list[HoldId]]:
        """The holds of so many leading chains on each rank, which belong to the caller from now on. REQUIRES: only `release`
        follows."""
        taken, self._held = self._held[: chains * self._ranks], self._held[chains * self._ranks :]
        return [taken[rank :: self._ranks] for rank in range(self._ranks)]

    def release(self, now_ns: int) -> None:
        """Release the remaining holds, a bounded number at once. It may begin anew, unless some were taken."""
        if self._task is not None:
            self._task.end(now_ns)
            self._task = None
        self._ending.end(self._held, now_ns)
        self._held = []

    def _next(self) -> tuple[Chains, int]:
        """The chain to be held next: its index among chains."""
        index = self._held_chains
        for chains in self._chains:
            if index < len(chains):
                return chains, index
            index -= len(chains)
        raise AssertionError(f"all of {self!r} are held")

    def _take_from_dram(self, chains: Chains, index: int, now_ns: int) -> list[HoldId]:
        """Holds on a chain by its last keys; none where DRAM has not all of it, or not all is allowed."""
        session, size = chains.session, chains.chunks
        if size * self._ranks > m.LEAF_CHUNKS_MAX:
            return []
        leaves = chains.leaves(index)
        held = self._directory.acquire_leaves(session.namespace_ids, leaves.packed, size, now_ns)
        holds = [HoldId(hold) for hold in held.ids]
        is_allowed = (
            self._holder is None or self._directory.affordable(self._holder, holds, session.size_classes, size) >= size
        )
        if held.chunks == size and is_allowed:
            return holds
        for hold in holds:
            self._directory.release(hold, now_ns)
        return []

    def _advance_chain(self, chains: Chains, index: int, now_ns: int) -> Step:
        """Hold the next part of a chain, of which other tiers or nodes may have some."""
        if self._task is None:
            if not chains.session.layout.is_chained:
                self._pull_run(chains, index)
            self._task = AcquireTask(
                self._directory,
                self._tiering,
                chains.session,
                chains.keys(index),
                is_urgent=self._holder is not None,
                holder=self._holder,
            )
        step = self._task.advance(now_ns)
        if step is Step.WAIT and not chains.session.layout.is_chained:
            # Begun anew after the wait, so that the run behind it is pulled with it.
            self._task.end(now_ns)
            self._task = None
        return step

    def _pull_run(self, chains: Chains, first: int) -> None:
        """Begin to pull what is missing here of the next chunks without a parent, from one node after the other."""
        session = chains.session
        if session.is_peer or self._holder is None or not self._tiering.remotes:
            return
        run = min(part_chunks(self._ranks), len(chains) - first)
        free = [HoldId(0)] * self._ranks
        allowed = self._directory.affordable(self._holder, free, session.size_classes, run)
        for namespace, column in zip(session.namespaces.values(), chains.columns, strict=True):
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
