"""Chains task: holds on whole chains, taken one after the other, as far as they are whole.

A chunk of a window or a state has no parent: it is a chain of its own, with a hold of its own. What is missing here of a run of
them is pulled with one request for each rank. Control thread only; `now_ns` is an argument.

Invariant: `held` has the holds of the first chains, by rank; each covers all of its chain, unless chunks were dropped since.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import kvpool_native
from kvpool.index.parts import PART_CHUNKS, Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.acquire_task import AcquireTask
from kvpool.protocol.records import messages as m
from kvpool.tiering.promotions import Wanted
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.remote import Asker
from kvpool.types import HoldId

# Chunks without a parent that are held in one part of a request: about half a millisecond.
CHAINS_AT_ONCE = 16
_ROOT = KeyColumn(b"")


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of the session's namespaces. `keys`: of one rank after those of another."""

    session: EngineSession
    keys: KeyColumn

    @property
    def ranks(self) -> int:
        """How many ranks have it."""
        return len(self.session.namespaces)

    @property
    def chunks(self) -> int:
        """How many chunks it has on each."""
        return len(self.keys) // self.ranks


class ChainsTask:
    """See the module. `chains`: at least one. What is held counts for the session's holder, unless it is announced: then it is
    no reader's, nothing is urgent, and other nodes are not asked."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        session: EngineSession,
        chains: Sequence[Chain],
        *,
        is_announced: bool = False,
    ) -> None:
        assert chains
        self._directory = directory
        self._tiering = tiering
        self._session = session
        self._holder = None if is_announced else session.holder
        self.chains = chains
        self.held: list[list[HoldId]] = []
        self._task: AcquireTask | None = None  # of the next chain, where DRAM has not all of it

    def __repr__(self) -> str:
        return f"<ChainsTask {len(self.held)} of {len(self.chains)} chains>"

    @property
    def holds(self) -> list[HoldId]:
        """All holds that it has."""
        taking = self._task.holds if self._task is not None else []
        return [hold for holds in self.held for hold in holds] + taking

    def advance(self, now_ns: int) -> Step:
        """Hold the next part. DONE where all is held, or a chain is not stored, or not allowed, any longer."""
        for _ in range(CHAINS_AT_ONCE):
            chain = self.chains[len(self.held)]
            holds = self._take_from_dram(chain, now_ns) if self._task is None else []
            if not holds:
                step = self._advance_chain(chain, now_ns)
                if self._task is None or step is not Step.DONE:
                    return step
                if self._task.chunks < chain.chunks:
                    return Step.DONE
                holds, self._task = self._task.take(), None
            if self._holder is not None:  # its chunks count for the holder before the next ones are asked for
                self._directory.charge(holds, self._holder)
            self.held.append(holds)
            if len(self.held) == len(self.chains):
                return Step.DONE
        return Step.MORE

    def count_whole(self) -> int:
        """How many leading chains are held, and nothing of them was dropped since."""
        pairs = zip(self.chains, self.held, strict=False)
        whole = takewhile(
            lambda pair: all(self._directory.count_whole(hold) == pair[0].chunks for hold in pair[1]), pairs
        )
        return sum(1 for _ in whole)

    def take(self, chains: int) -> list[list[HoldId]]:
        """The holds of so many leading chains, which belong to the caller from now on."""
        taken, self.held = self.held[:chains], self.held[chains:]
        self.chains = self.chains[chains:]
        return taken

    def release(self, now_ns: int) -> None:
        """Release the remaining holds. It may begin anew."""
        if self._task is not None:
            self._task.end(now_ns)
            self._task = None
        for hold in (hold for holds in self.held for hold in holds):
            self._directory.release(hold, now_ns)
        self.held = []

    def _take_from_dram(self, chain: Chain, now_ns: int) -> list[HoldId]:
        """Holds on a chain by its last keys; none where DRAM has not all of it, or not all is allowed."""
        session, size = chain.session, chain.chunks
        if size * chain.ranks > m.LEAF_CHUNKS_MAX:
            return []
        leaves = KeyColumn.of(column[-1] for column in chain.keys.by_rank(chain.ranks))
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

    def _advance_chain(self, chain: Chain, now_ns: int) -> Step:
        """Hold the next part of a chain, of which other tiers or nodes may have some."""
        if self._task is None:
            if not chain.session.layout.is_chained:
                self._pull_run(chain.session)
            self._task = AcquireTask(
                self._directory,
                self._tiering,
                chain.session,
                chain.keys,
                is_urgent=self._holder is not None,
                holder=self._holder,
            )
        step = self._task.advance(now_ns)
        if step is Step.WAIT and not chain.session.layout.is_chained:
            # Begun anew after the wait, so that the run behind it is pulled with it.
            self._task.end(now_ns)
            self._task = None
        return step

    def _pull_run(self, session: EngineSession) -> None:
        """Begin to pull what is missing here of the next chunks without a parent, as far as one node has it."""
        if session.is_peer or self._holder is None or not self._tiering.remotes:
            return
        left = self.chains[len(self.held) : len(self.held) + max(1, PART_CHUNKS // len(session.namespaces))]
        run = [chain.keys for chain in takewhile(lambda chain: chain.session is session, left)]
        free = [HoldId(0)] * len(session.namespaces)
        allowed = self._directory.affordable(self._holder, free, session.size_classes, len(run))
        for rank, namespace in enumerate(session.namespaces.values()):
            missing = self._tiering.missing(KeyColumn.of([keys[rank] for keys in run[:allowed]]))
            elsewhere = self._tiering.find_elsewhere(namespace, missing, 0) if missing else None
            if elsewhere is not None:
                asker = Asker(session.connection)
                wanted = Wanted(namespace, b"", missing[: elsewhere.run.end], asker=asker, is_run=True)
                self._tiering.pull(elsewhere, _ROOT, wanted)
