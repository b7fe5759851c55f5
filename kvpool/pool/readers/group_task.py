"""Group task: holds on what a hit needs of every group of a layout, taken one after the other: all of it, or none.

Tasks that wait for room at once would keep from each other what each of them has: only the first one that waits keeps its
holds, the others release theirs and begin anew.

A full group is one chain. Each chunk of a window or a state has no parent: a chain of its own, and a hold of its own. Control
thread only; `now_ns` is an argument. Invariant: its holds are numbered by group, rank and chunk, so that those of a rank are
the ones whose number has it as the rest by `world`, in the order of the lease's rows.
"""

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.index.parts import Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.chains_task import Chain, ChainsTask
from kvpool.protocol import columns
from kvpool.protocol.records import messages as m
from kvpool.tiering.tiering import Tiering
from kvpool.types import HoldId

# The tasks that wait for room, the one that waits longest first.
WaitingGroups = dict["GroupTask", None]


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
        is_announced: bool = False,
        waiting: WaitingGroups | None = None,
    ) -> None:
        """`is_announced`: the holds are not of a reader, whose share they would count for, and nothing is urgent. `waiting`:
        all that wait; None: it keeps its holds while it waits."""
        self._session = session
        self._waiting = waiting
        self.chunks = chunks
        chains = [
            Chain(group, chain)
            for group, column in zip(session.groups, keys, strict=True)
            for chain in ([column] if group.layout.is_chained else alone(column, len(group.namespaces)))
        ]
        self._task = ChainsTask(directory, tiering, session, chains, is_announced=is_announced)

    def __repr__(self) -> str:
        return f"<GroupTask {self._task!r}>"

    @property
    def holds(self) -> list[HoldId]:
        """All holds that it has."""
        return self._task.holds

    def advance(self, now_ns: int) -> Step:
        """Hold the next part. DONE where all is held, or something is not stored, or not allowed, any longer."""
        step = self._task.advance(now_ns)
        if step is Step.WAIT and self._waiting is not None:
            self._waiting.setdefault(self)
            if next(iter(self._waiting)) is not self:
                self._task.release(now_ns)
        return step

    def is_whole(self) -> bool:
        """Whether all of it is held, and nothing of it was dropped since."""
        return self._task.count_whole() == len(self._task.chains)

    def take(self) -> tuple[dict[int, HoldId], dict[int, int]]:
        """The holds by number, which belong to the caller from now on, and the chunks of those of windows and states."""
        layout, chains = self._session.layout, self._task.chains
        holds: dict[int, HoldId] = {}
        sizes: dict[int, int] = {}
        for position, of_ranks in enumerate(self._task.take(len(chains))):
            size = chains[position].chunks
            for rank, hold in zip(layout.ranks, of_ranks, strict=True):
                number = position * layout.world + rank
                holds[number] = hold
                if size != self.chunks:
                    sizes[number] = size
        return holds, sizes

    def end(self, now_ns: int) -> None:
        """Release the remaining holds."""
        if self._waiting is not None:
            self._waiting.pop(self, None)
        self._task.release(now_ns)


def keys_of_hit(session: EngineSession, packed: bytes, chunks: int) -> list[KeyColumn]:
    """The keys of a request about what a hit of so many chunks needs, by group. Raises ProtocolError."""
    if not session.groups or not 0 < chunks <= m.KEYS_MAX:
        raise ProtocolError(f"request about {chunks} chunks of {len(session.groups)} groups")
    return columns.keys_of_groups(packed, counts_of(session, chunks), ranks=len(session.layout.ranks))


def hold_count(session: EngineSession, chunks: int) -> int:
    """How many holds a hit of so many chunks needs."""
    return len(chains_of(session, chunks)) * len(session.layout.ranks)


def naming_group(session: EngineSession) -> int:
    """The group by whose chunks a hit is named: the first full one, which has a key for each of them, or the first of all."""
    return next((number for number, group in enumerate(session.groups) if group.layout.is_chained), 0)


def place_of(session: EngineSession, chunks: int, chunk: int) -> tuple[int, int] | None:
    """Where a lease of so many chunks has the naming group's chunk of this number: the position of its chain and the index in
    that. None: it does not have it."""
    if not session.groups:
        return (0, chunk) if session.layout.is_chained else (chunk, 0)
    counts, named = counts_of(session, chunks), naming_group(session)
    position = sum(counts[:named])  # those before a full one are of windows and states
    if session.groups[named].layout.is_chained:
        return position, chunk
    first = chunks - counts[named]
    return (position + chunk - first, 0) if chunk >= first else None


def counts_of(session: EngineSession, chunks: int) -> list[int]:
    """How many chunks of each group a hit of `chunks` chunks needs."""
    layout = session.layout
    roles = [group.layout.group for group in session.groups]
    return [role.chunks_of(chunks, layout.chunk_tokens) for role in roles if role is not None]


def chains_of(session: EngineSession, chunks: int) -> list[EngineSession]:
    """The session of each chain of a lease of so many chunks, by position; without groups there is one, or each chunk is."""
    if not session.groups:
        return [session] * (1 if session.layout.is_chained else chunks)
    counts = counts_of(session, chunks)
    return [
        group
        for group, count in zip(session.groups, counts, strict=True)
        for _ in range(1 if group.layout.is_chained else count)
    ]


def alone(keys: KeyColumn, ranks: int) -> list[KeyColumn]:
    """The keys of chunks without a parent as columns that can be held by themselves: of each chunk, on all ranks."""
    columns = keys.by_rank(ranks)
    return [KeyColumn.of(column[index] for column in columns) for index in range(len(columns[0]))]
