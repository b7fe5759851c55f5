"""Session: an engine's connection and the namespaces it stands for. Immutable; control thread only."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import kvpool_native
from kvpool.errors import ProtocolError, Refused
from kvpool.ids import ConnectionId
from kvpool.index.namespaces import Namespace
from kvpool.layout import Layout

# More chunks than any hit has.
UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True)
class EngineSession:
    """A connection, and the namespace of each rank it stands for; with groups, of each group's ranks, numbered on.

    `lease_ttl_ns`: the least time to live of a lease that the connection was given; it renews by that. `peer`: of another
    node's connection, the number by which all sessions of that node's key count together. What it asks for is never pulled
    from a third one, so that no two nodes ask one another in a circle, and is read from disk after what engines here ask for.
    `groups`: a session of each of the layout's groups, over the same connection. `identity`: model and layout but for the
    rank, what a ticket's issuer and claimer must have in common. `holder`: whose share its leases count for. `reader`: the
    session as the native lease desk knows it.
    """

    connection: ConnectionId
    layout: Layout
    model: str
    namespaces: dict[int, Namespace]
    lease_ttl_ns: int = 0
    peer: ConnectionId | None = None
    groups: "tuple[EngineSession, ...]" = ()
    namespace_ids: list[int] = field(init=False)
    size_classes: list[int] = field(init=False)
    chunk_sizes: list[int] = field(init=False)
    identity: tuple[str, bytes] = field(init=False)
    holder: ConnectionId = field(init=False)
    reader: kvpool_native.Reader = field(init=False)

    def __post_init__(self) -> None:
        # Made once: every acquire needs what follows, of each rank's namespace by rank, and every ticket the identity.
        object.__setattr__(self, "identity", (self.model, self.layout.for_rank(0).fingerprint()))
        object.__setattr__(self, "namespace_ids", [namespace.id for namespace in self.namespaces.values()])
        object.__setattr__(self, "size_classes", [namespace.size_class for namespace in self.namespaces.values()])
        object.__setattr__(self, "holder", self.connection if self.peer is None else self.peer)
        object.__setattr__(
            self, "chunk_sizes", [namespace.layout.stored_bytes for namespace in self.namespaces.values()]
        )
        reader = kvpool_native.Reader(
            self.connection,
            self.holder,
            self.lease_ttl_ns,
            list(self.layout.ranks),
            is_scheduler=self.layout.rank is None,
            has_groups=bool(self.groups),
            groups=[_group_reader(part, self.layout.chunk_tokens if self.groups else 0) for part in self.parts],
        )
        object.__setattr__(self, "reader", reader)

    @classmethod
    def over(
        cls,
        connection: ConnectionId,
        model: str,
        layout: Layout,
        *,
        opened: Sequence[dict[int, Namespace]],
        lease_ttl_ns: int,
    ) -> "EngineSession":
        """The session over the namespaces of each group of a layout, by rank."""
        if not layout.groups:
            return cls(connection, layout, model, opened[0], lease_ttl_ns)
        groups = tuple(
            cls(connection, part, model, namespaces, lease_ttl_ns)
            for part, namespaces in zip(layout.group_layouts, opened, strict=True)
        )
        numbered = dict(enumerate(one for namespaces in opened for one in namespaces.values()))
        return cls(connection, layout, model, numbered, lease_ttl_ns, groups=groups)

    @property
    def parts(self) -> "tuple[EngineSession, ...]":
        """The session of each group; without groups there is one, of all chunks."""
        return self.groups or (self,)

    @property
    def written(self) -> kvpool_native.WriterGroup:
        """The session's own chunks as one group of a writer."""
        layout, own = self.layout, self.own
        return kvpool_native.WriterGroup(
            is_chain=layout.is_chained,
            namespace=own.id,
            size_class=own.size_class,
            extents=own.extents,
            chunk_tokens=layout.chunk_tokens,
            chunk_bytes=self.chunk_sizes[0],
        )

    @property
    def is_peer(self) -> bool:
        """Whether another node is served."""
        return self.peer is not None

    @property
    def own(self) -> Namespace:
        """The namespace that loads and saves go to. A scheduler has none."""
        rank = self.layout.rank
        if rank is None or self.groups:
            rank = self.check_rank()
            self.check_plain()
        return self.namespaces[rank]

    def of_group(self, index: int) -> "EngineSession":
        """The session of one group; without groups there is one. Raises ProtocolError."""
        parts = self.parts
        if not 0 <= index < len(parts):
            raise ProtocolError(f"group is {index}, this connection's layout has {len(self.groups) or 'none'}")
        return parts[index]

    def check_rank(self) -> int:
        """The session's rank. Raises Refused for a scheduler's."""
        if self.layout.rank is None:
            raise Refused("rank", "a scheduler's connection looks up and acquires, it does not load or save")
        return self.layout.rank

    def check_plain(self) -> None:
        """Raises Refused where the layout has groups: a request without a group names no chunks of theirs."""
        if self.groups:
            raise Refused("group", "this connection's layout has groups: their chunks are named by group alone")


def _group_reader(part: EngineSession, chunk_tokens: int) -> kvpool_native.ReaderGroup:
    """A session's chunks as a group of a reader, of a hit in chunks of so many tokens; 0: they are all that it reads."""
    layout, role = part.layout, part.layout.group
    chunks_max = role.chunks_of(UNBOUNDED, chunk_tokens) if role is not None and chunk_tokens else UNBOUNDED
    return kvpool_native.ReaderGroup(layout.is_chained, chunks_max, part.namespace_ids, part.chunk_sizes)
