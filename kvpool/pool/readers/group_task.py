"""Group task: holds on what a hit needs of every group of a layout, taken one after the other: all of it, or none.

A full group is one chain. Each chunk of a window or a state has no parent: a chain of its own, and a hold of its own. Control
thread only; `now_ns` is an argument. Invariant: `holds` numbers the holds by group, rank and chunk, so that those of a rank are
the ones whose number has it as the rest by `world`, in the order of the lease's rows.
"""

import kvpool_native
from kvpool.index.parts import Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.acquire_task import AcquireTask
from kvpool.protocol.records import messages as m
from kvpool.tiering.tiering import Tiering
from kvpool.types import HoldId

# Holds of one lease: beyond, granting it would take longer than a turn.
HOLDS_MAX = 1024
# Chunks without a parent that are held in one part of a request: about half a millisecond.
CHAINS_AT_ONCE = 16


class GroupTask:
    """See the module. `keys`: of each group those that a hit of `chunks` chunks needs, of one rank after those of another."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        session: EngineSession,
        keys: list[KeyColumn],
        *,
        chunks: int,
    ) -> None:
        self._directory = directory
        self._tiering = tiering
        self._session = session
        self.chunks = chunks
        self._chains = [
            (group, chain)
            for group, column in zip(session.groups, keys, strict=True)
            for chain in _chains(column, group)
        ]
        self._held: list[list[HoldId]] = []  # of the first chains, which are whole
        self._task: AcquireTask | None = None  # of the next one, where DRAM has not all of it

    def __repr__(self) -> str:
        return f"<GroupTask {len(self._held)} of {len(self._chains)} chains>"

    @property
    def holds(self) -> list[HoldId]:
        """All holds that it has."""
        taking = self._task.holds if self._task is not None else []
        return [hold for holds in self._held for hold in holds] + taking

    def advance(self, now_ns: int) -> Step:
        """Hold the next part. DONE where all is held, or something is not stored, or not allowed, any longer."""
        for _ in range(CHAINS_AT_ONCE):
            group, chain = self._chains[len(self._held)]
            size = len(chain) // len(group.namespaces)
            holds = self._take_from_dram(group, chain, size, now_ns=now_ns) if self._task is None else []
            if not holds:
                if self._task is None:
                    self._task = AcquireTask(self._directory, self._tiering, group, chain, holder=self._session.holder)
                step = self._task.advance(now_ns)
                if step is not Step.DONE:
                    return step
                if self._task.chunks < size:
                    return Step.DONE
                holds, self._task = self._task.take(), None
            # Its chunks count for the holder before the next ones are asked for.
            self._directory.charge(holds, self._session.holder)
            self._held.append(holds)
            if len(self._held) == len(self._chains):
                return Step.DONE
        return Step.MORE

    def is_whole(self) -> bool:
        """Whether all of it is held, and nothing of it was dropped since."""
        return len(self._held) == len(self._chains) and all(
            self._directory.count_whole(hold) == self._size(position)
            for position, holds in enumerate(self._held)
            for hold in holds
        )

    def take(self) -> tuple[dict[int, HoldId], dict[int, int]]:
        """The holds by number, which belong to the caller from now on, and the chunks of those of windows and states."""
        layout = self._session.layout
        holds: dict[int, HoldId] = {}
        sizes: dict[int, int] = {}
        taken, self._held = self._held, []
        for position, of_ranks in enumerate(taken):
            size = self._size(position)
            for rank, hold in zip(layout.ranks, of_ranks, strict=True):
                number = position * layout.world + rank
                holds[number] = hold
                if size != self.chunks:
                    sizes[number] = size
        return holds, sizes

    def end(self, now_ns: int) -> None:
        """Release the remaining holds."""
        if self._task is not None:
            self._task.end(now_ns)
        for hold in (hold for holds in self._held for hold in holds):
            self._directory.release(hold, now_ns)
        self._held = []

    def _take_from_dram(self, group: EngineSession, chain: KeyColumn, size: int, *, now_ns: int) -> list[HoldId]:
        """Holds on a chain by its last keys; none where DRAM has not all of it, or not all is allowed."""
        ranks = len(group.namespaces)
        if size * ranks > m.LEAF_CHUNKS_MAX:
            return []
        leaves = KeyColumn.of(column[-1] for column in chain.by_rank(ranks))
        held = self._directory.acquire_leaves(group.namespace_ids, leaves.packed, size, now_ns)
        holds = [HoldId(hold) for hold in held.ids]
        is_allowed = self._directory.affordable(self._session.holder, holds, group.size_classes, size) >= size
        if held.chunks == size and is_allowed:
            return holds
        for hold in holds:
            self._directory.release(hold, now_ns)
        return []

    def _size(self, position: int) -> int:
        """How many chunks a chain has."""
        group, chain = self._chains[position]
        return len(chain) // len(group.namespaces)


def counts_of(session: EngineSession, chunks: int) -> list[int]:
    """How many chunks of each group a hit of `chunks` chunks needs."""
    layout = session.layout
    roles = [group.layout.group for group in session.groups]
    return [role.chunks_of(chunks, layout.chunk_tokens) for role in roles if role is not None]


def chains_of(session: EngineSession, chunks: int) -> list[EngineSession]:
    """The session of each chain of a lease of so many chunks, by position; without groups there is one."""
    if not session.groups:
        return [session]
    counts = counts_of(session, chunks)
    return [
        group
        for group, count in zip(session.groups, counts, strict=True)
        for _ in range(1 if group.layout.group is not None and group.layout.group.is_full else count)
    ]


def _chains(keys: KeyColumn, group: EngineSession) -> list[KeyColumn]:
    """The keys of a group as columns that can be held by a task each."""
    role = group.layout.group
    assert role is not None
    if role.is_full:
        return [keys]
    columns = keys.by_rank(len(group.namespaces))
    return [KeyColumn.of(column[index] for column in columns) for index in range(len(columns[0]))]
