"""Interface of a transport: how the bytes of an offer of another node come into slots of this node's arena.

    submit ──a number──► under way ──each chunk once──► DONE | WRONG | FAILED | CANCELLED
               └─0: nothing was started

Extent 0 of all chunks comes first, then extent 1, … (of small ones several of each chunk in turn); an extent is announced on
the landing board when its bytes have their checksum. A transport knows neither tiers nor keys: it moves extents that were
offered under a ticket. Loop thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.transfer.stream_address import StreamAddress


class Ending(IntEnum):
    """The end of one chunk. WRONG: the node no longer has it, or sent other bytes. The numbers are those of native code."""

    DONE = 0
    WRONG = 1
    FAILED = 2
    CANCELLED = 3


class ChunkEnd(NamedTuple):
    """The end of chunk number `chunk` of a job. `fault`: a word for what failed. `is_unmarked`: no extent of it has landed, and
    the board has no mark that it failed: it may be received again."""

    job: int
    chunk: int
    ending: Ending
    fault: str
    is_unmarked: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do. `is_encrypted`: nobody on the way reads or changes its bytes, where both nodes want it
    so. `extent_bytes_max`: of the largest extent."""

    is_encrypted: bool
    extent_bytes_max: int


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory: where the bytes go, and the words that announce them."""

    arena_offsets: bytes  # u64 of each chunk
    arena_slots: bytes  # u64 of each chunk

    @property
    def chunks(self) -> int:
        """How many."""
        return len(self.arena_slots) // 8


@dataclass(frozen=True, slots=True)
class Order:
    """Chunks to receive. `node`: that offers them, over `link`; `offer`: its answer, and `address` what that names.
    `stall_s`: the longest time without a byte, `timeout_s`: for all of them."""

    node: str
    link: PeerLink
    offer: r.Offer
    address: StreamAddress
    into: Region
    extents: int
    extent_bytes: int
    stall_s: float
    timeout_s: float

    @property
    def is_coming(self) -> bool:
        """Whether chunks are on their way to the node itself: an engine there saves them, or its disk reads them."""
        return bool(self.offer.chunks) and not self.offer.checks


class Transport(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """Its name in options and statistics."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def start(self, on_completed: Callable[[], None]) -> None:
        """Begin to serve, in the background, until `close`. `on_completed`: chunks have ended."""
        ...

    async def close(self) -> bool:
        """End everything; the remaining chunks end as CANCELLED. False where a thread is left that may still write to slots."""
        ...

    def meet(self, node: str, link: PeerLink) -> None:
        """A node can be asked. What has to be set up before its chunks can come is set up in the background."""
        ...

    def expect(self, node: str, link: PeerLink, chunks: int) -> bool:
        """A node is being asked for so many chunks. Whether they will come this way, as far as that is known; then what their
        offer needs is set up meanwhile."""
        ...

    async def accepts(self, order: Order) -> bool:
        """Whether this order can come this way now. May ask the node, with a deadline."""
        ...

    def submit(self, order: Order) -> int:
        """Begin to receive; 0 where too much is under way. REQUIRES: no extent has landed in these slots."""
        ...

    def completed(self) -> list[ChunkEnd]:
        """The chunks that have ended since the last call, each of each job once. Nothing writes to their slots any more."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        ...

    def info(self) -> dict[str, int | str]:
        """What is in use, for operators."""
        ...

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        ...
