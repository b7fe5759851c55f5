"""Session: an engine's connection and the namespaces it stands for. Immutable; control thread only."""

from dataclasses import dataclass, field

from kvpool.errors import Refused
from kvpool.index.namespaces import Namespace
from kvpool.layout import Layout
from kvpool.types import ConnectionId


@dataclass(frozen=True, slots=True)
class EngineSession:
    """A connection, and the namespace of each rank it stands for.

    `lease_ttl_ns`: the least time to live of a lease that the connection was given; it renews by that. `peer`: of another
    node's connection, the number by which all sessions of that node's key count together. What it asks for is never pulled
    from a third one, so that no two nodes ask one another in a circle, and is read from disk after what engines here ask for.
    """

    connection: ConnectionId
    layout: Layout
    model: str
    namespaces: dict[int, Namespace]
    lease_ttl_ns: int = 0
    peer: ConnectionId | None = None
    namespace_ids: list[int] = field(init=False)
    size_classes: list[int] = field(init=False)
    chunk_sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # Of each rank's namespace, by rank: needed by every acquire.
        object.__setattr__(self, "namespace_ids", [namespace.id for namespace in self.namespaces.values()])
        object.__setattr__(self, "size_classes", [namespace.size_class for namespace in self.namespaces.values()])
        object.__setattr__(
            self, "chunk_sizes", [namespace.layout.chunk_bytes for namespace in self.namespaces.values()]
        )

    @property
    def is_peer(self) -> bool:
        """Whether another node is served."""
        return self.peer is not None

    @property
    def holder(self) -> ConnectionId:
        """Whose share its leases count for."""
        return self.connection if self.peer is None else self.peer

    @property
    def own(self) -> Namespace:
        """The namespace that loads and saves go to. A scheduler has none."""
        if self.layout.rank is None:
            raise Refused("rank", "a scheduler's connection looks up and acquires, it does not load or save")
        return self.namespaces[self.layout.rank]

    @property
    def identity(self) -> tuple[str, bytes]:
        """Model and layout but for the rank: what a ticket's issuer and claimer must have in common."""
        return self.model, self.layout.for_rank(0).fingerprint()
