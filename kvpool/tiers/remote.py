"""Interface of a remote tier: chunks that other nodes may have, known by hints alone.

A backing tier (`base.py`) has a directory of its own here. A remote tier has none: it may have a chunk or
not, which is known when its extents have landed. It is read from and never written, so that it has no slots, no demotions and
nothing to restore. A read goes into slots of the arena that are being promoted, extent by extent, like a backing tier's:

    read ──a number──► under way ──each chunk once──► DONE | BAD_SOURCE | FAILED | CANCELLED
             └─0: nothing was started

A chunk that the other node does not have any more ends as FAILED. A lookup may answer chunks at the level `peer`; whatever asks
if *this* node has a chunk, a save above all, does not count that level. Control thread only; no call waits.
"""

from dataclasses import dataclass
from typing import Protocol

from kvpool.config.config import Config
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.tiers.base import Counters, Finished, Info, JobId, Moves, TierOwner
from kvpool.types import ConnectionId, Level


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
    """The rest of an order to pull chunks: from which run, the keys of the chain before them from its root, and for whom."""

    run: RemoteRun
    before: KeyColumn
    is_urgent: bool
    asker: Asker = NOBODY


class RemoteTier(Protocol):
    """See the module. It may fail and recover at any time; the pool works without it."""

    @property
    def name(self) -> str:
        """Its name in statistics and options."""
        ...

    @property
    def level(self) -> Level:
        """Its number in events and answers."""
        ...

    def start(self, owner: TierOwner) -> None:
        """Begin to serve, in the background, until `close`. Never raises. REQUIRES: a running event loop."""
        ...

    async def close(self) -> bool:
        """End everything; remaining jobs complete as CANCELLED. False where a thread is left waiting for the network."""
        ...

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on, as far as it can change at run time."""
        ...

    def find(self, namespace: Namespace, keys: KeyColumn, first: int) -> RemoteRun:
        """The longest run of chunks from number `first` on that one node seems to have; `end` is `first` where there is none.

        From local knowledge, without I/O. Nodes that do not answer now are left out.
        """
        ...

    def find_at(self, asker: Asker, keys: KeyColumn, first: int) -> RemoteRun:
        """All chunks from number `first` on, as if the node that the request names had them; `end` is `first` where it cannot
        be asked now."""
        ...

    def read(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:
        """Start to pull chunks of a run into the arena. Offsets and generations there are zero."""
        ...

    def completed(self) -> list[Finished]:
        """The chunks that have ended since the last call, as of a backing tier."""
        ...

    def stats(self) -> Counters:
        """Counters by their public names, `NAME.read_bytes` among them."""
        ...

    def info(self) -> Info:
        """The resources in use, for operators."""
        ...

    def verify(self) -> list[str]:
        """Broken invariants, one line each. A forked child calls this: it takes no lock."""
        ...

    def problems(self) -> list[str]:
        """Problems that a restart of the daemon may solve, one line each. Any thread."""
        ...

    def shortcomings(self) -> list[str]:
        """Configured parts that are missing, one line each. Any thread."""
        ...
