"""Group task: holds on what a hit needs of every group of a layout, taken one after the other: all of it, or none.

Tasks that wait for room at once would keep from each other what each of them has: only the first one that waits keeps its
holds, the others release theirs and begin anew.

A full group is one chain. Each chunk of a window or a state has no parent: a chain of its own, and a hold of its own. Control
thread only; `now_ns` is an argument.
"""

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.index.parts import Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.chains_task import Chains, ChainsTask
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.protocol import columns
from kvpool.protocol.records import messages as m
from kvpool.tiering.tiering import Tiering
from kvpool.types import ConnectionId, HoldId

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
        holder: ConnectionId | None,
        ending: EndingHolds,
        waiting: WaitingGroups | None = None,
    ) -> None:
        """`holder`: whose share the holds count for; None: they are announced, of no reader, and nothing is urgent. `ending`:
        where what it releases goes. `waiting`: all that wait; None: it keeps its holds while it waits."""
        self._session = session
        self._waiting = waiting
        self.chunks = chunks
        chains = [Chains(group, column) for group, column in zip(session.groups, keys, strict=True)]
        self._task = ChainsTask(directory, tiering, session, chains, holder=holder, ending=ending)

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
        return self._task.count_whole() == len(self._task)

    def take(self) -> dict[int, list[HoldId]]:
        """The holds of each rank, in the order of the lease's rows; they belong to the caller from now on."""
        return dict(zip(self._session.layout.ranks, self._task.take(len(self._task)), strict=True))

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
    return sum(count for _, count in chains_of(session, chunks)) * len(session.layout.ranks)


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


def chains_of(session: EngineSession, chunks: int) -> list[tuple[EngineSession, int]]:
    """The session of each group, and how many chains a lease of so many chunks has of it: one, or each chunk is one."""
    groups = session.groups or (session,)
    counts = counts_of(session, chunks) if session.groups else [chunks]
    return [(group, 1 if group.layout.is_chained else count) for group, count in zip(groups, counts, strict=True)]
