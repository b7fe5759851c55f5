"""Runs: the chunks of each group that a hit needs, as a request names them.

A run of a full group is one chain; its last keys alone may name it. Each chunk of a window or a state has no parent: it is a
chain of its own. A lease has one hold on each run on each rank; while it is taken part by part, on each chain. A layout without
groups has one run, of all chunks. Pure; any thread.
"""

from kvpool.errors import ProtocolError
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.protocol import columns
from kvpool.protocol.records import messages as m


class Run:
    """Chunks of a session's namespaces, in chains of so many `chunks`. `first`: of the chunk of a chain from which on it is
    held; `is_leaf`: the last key of each rank stands for the chain."""

    __slots__ = ("_keys", "chunks", "first", "is_chain", "is_leaf", "ranks", "session")

    def __init__(self, session: EngineSession, keys: KeyColumn, chunks: int = 0, *, first: int = 0) -> None:
        """`keys`: of one rank after those of another. `chunks`: of a chain that its last keys name."""
        self.session = session
        self._keys = keys
        self.ranks = len(session.namespace_ids)
        self.is_chain = session.layout.is_chained
        count = len(keys) // self.ranks
        self.chunks = (chunks or count) if self.is_chain else 1
        self.is_leaf = self.chunks > count
        self.first = first

    def __len__(self) -> int:
        """How many chains it has."""
        return 1 if self.is_chain else len(self._keys) // self.ranks

    @property
    def packed(self) -> bytes:
        """All its keys."""
        return self._keys.packed

    @property
    def columns(self) -> list[KeyColumn]:
        """The keys of each rank."""
        return self._keys.by_rank(self.ranks)

    def leading(self, chunks: int) -> "Run":
        """The run of a chain's leading chunks. REQUIRES: their keys are known."""
        return Run(self.session, KeyColumn(b"".join(column[:chunks].packed for column in self.columns)))

    def leaves(self, index: int) -> KeyColumn:
        """The last key of a chain on each rank."""
        if len(self._keys) == self.ranks:
            return self._keys
        return KeyColumn.of(column[-1 if self.is_chain else index] for column in self.columns)

    def keys(self, index: int) -> KeyColumn:
        """All keys of a chain, of one rank after those of another."""
        part = slice(index * self.chunks, (index + 1) * self.chunks)
        return KeyColumn(b"".join(column[part].packed for column in self.columns))


def runs_of_hit(session: EngineSession, packed: bytes, chunks: int, *, allows_leaves: bool = False) -> list[Run]:
    """The runs that a request about a hit of so many chunks names, by their keys; 0: of as many as it names, without groups.
    `allows_leaves`: the last key of a chain may stand for it. Raises ProtocolError."""
    ranks = len(session.parts[0].namespace_ids)
    if not chunks and not session.groups:
        return [Run(session, columns.keys_of(packed, ranks=ranks))]
    if not 0 < chunks * ranks <= m.KEYS_MAX:
        raise ProtocolError(f"chunks is {chunks}, expected 1..{m.KEYS_MAX // ranks}")
    if allows_leaves and not session.groups and len(packed) == packed_bytes(ranks):
        return [Run(session, KeyColumn(packed), chunks)]
    counts = counts_of(session, chunks)
    chains = [count for _, count in chains_of(session, chunks)]
    are_leaves = allows_leaves and len(packed) == packed_bytes(ranks * sum(chains))
    keys = columns.keys_of_groups(packed, chains if are_leaves else counts, ranks=ranks)
    return [Run(part, column, count) for part, column, count in zip(session.parts, keys, counts, strict=True)]


def counts_of(session: EngineSession, chunks: int) -> list[int]:
    """How many chunks of each group a hit of `chunks` chunks needs."""
    if not session.groups:
        return [chunks]
    roles = [group.layout.group for group in session.groups]
    return [role.chunks_of(chunks, session.layout.chunk_tokens) for role in roles if role is not None]


def chains_of(session: EngineSession, chunks: int) -> list[tuple[EngineSession, int]]:
    """The session of each group, and how many chains a lease of so many chunks has of it: one, or each chunk is one."""
    counts = zip(session.parts, counts_of(session, chunks), strict=True)
    return [(part, 1 if part.layout.is_chained else count) for part, count in counts]


def hold_count(session: EngineSession, chunks: int) -> int:
    """How many holds a hit of so many chunks needs."""
    return sum(count for _, count in chains_of(session, chunks)) * len(session.layout.ranks)


def naming_group(session: EngineSession) -> int:
    """The group by whose chunks a hit is named: the first full one, which has a key for each of them, or the first of all."""
    return next((number for number, part in enumerate(session.parts) if part.layout.is_chained), 0)
