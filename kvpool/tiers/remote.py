"""Interface of a remote tier: chunks that other nodes may have, known by hints alone.

It has no directory here: it may have a chunk or not, which is known when its extents have landed. It is read from and never
written, so that it has no slots, no demotions and nothing to restore. A read goes into slots of the arena that are being
promoted, extent by extent.

A chunk that the other node does not have any more ends as FAILED. A lookup may answer chunks at the level `peer`; whatever asks
if *this* node has a chunk, a save above all, does not count that level. Control thread only; no call waits.
"""

from dataclasses import dataclass
from typing import Protocol

from kvpool.ids import ConnectionId
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.tiers.base import JobId, Moves, Tier


@dataclass(frozen=True, slots=True, eq=False)
class Asker:
    """A request that looks for chunks elsewhere, by itself: no two are equal. `connection`: the engine's; `owner`: the node
    that the request names, which is asked for what no other is known to have."""

    connection: ConnectionId
    owner: str = ""


NOBODY = Asker(ConnectionId(0))


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """The chunks that one node seems to have: those of a chain up to number `end`, or of chunks without a parent. `node`: its
    name in the tier. `is_named`: it may have none of them; a request names it."""

    end: int
    node: str = ""
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class PullOrder:
    """The rest of an order to pull chunks: from which run, the keys of the chain before them from its root, and for whom. Of
    chunks that `are_alone` one that does not come takes no other along."""

    run: RemoteRun
    before: KeyColumn
    is_urgent: bool
    asker: Asker = NOBODY
    are_alone: bool = False


class Remote(Tier, Protocol):
    """See the module."""

    def find(self, namespace: Namespace, keys: KeyColumn, first: int) -> RemoteRun:
        """The longest run of chunks from number `first` on that one node seems to have; `end` is `first` where there is none.

        From local knowledge, without I/O. Nodes that do not answer now are left out.
        """

    def find_at(self, asker: Asker, keys: KeyColumn, first: int) -> RemoteRun:
        """All chunks from number `first` on, as if the node that the request names had them; `end` is `first` where it cannot
        be asked now."""

    def find_each(self, namespace: Namespace, keys: KeyColumn) -> list[tuple[str, list[int]]]:
        """Nodes that seem to have some of these chunks, each alone, and which of them are to be pulled from there: each of them
        from one node. From local knowledge, without I/O, as `find`."""

    def read(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:
        """Start to pull chunks of a run into the arena. Offsets and generations there are zero."""
