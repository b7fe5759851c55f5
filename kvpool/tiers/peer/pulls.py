"""Pulls under way: the jobs of the peer tier, each from its first request to its last chunk's end.

    ASKED ──Offer──► RECEIVING ──each chunk──► ended
      ▲                 │
      └── a part has come, and there was more to ask for ──┘
    ASKED ──refused, late, nothing there, nobody to ask──► all chunks that are left have ended

Loop thread only. Invariant: `_left` of a pull counts the chunks that were not reported; a pull without any is forgotten.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import kvpool_native
from kvpool.clock import Deadline
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.tiers.base import Finished, JobId, Moves, Outcome
from kvpool.tiers.remote import NOBODY, Asker, PullOrder
from kvpool.types import ConnectionId

NO_KEYS = KeyColumn(b"")


def end_nothing() -> None:
    """The end of a pull to which nothing was offered."""


@dataclass(slots=True)
class Pull:
    """One pull of a namespace's chunks. `node`: the name of the node that is asked, for `asker`, who may have named it.
    `before`: the keys before its own. `first` and `offered`: where the part begins that is asked for or received, and how many
    chunks of it are offered. `is_coming`: chunks are on their way to the node itself. `is_reported`: of each chunk. `received`:
    the transport and its job, once it has begun at `begun_ns`. `is_broken`: its path failed. `fault`: why the first chunk that
    failed did."""

    job: JobId
    node: str
    namespace: Namespace
    moves: Moves
    deadline: Deadline
    before: KeyColumn = NO_KEYS
    asker: Asker = NOBODY
    is_named: bool = False
    first: int = 0
    offered: int = 0
    is_reported: bytearray = field(init=False)
    received: tuple[str, int] = ("", 0)
    begun_ns: int = 0
    received_bytes: int = 0
    is_coming: bool = False
    is_broken: bool = False
    fault: str = ""
    end: Callable[[], None] = end_nothing  # called once, when a part that was offered is over

    def __post_init__(self) -> None:
        self.is_reported = bytearray(len(self.moves))

    @property
    def layout(self) -> Layout:
        """The layout of its chunks."""
        return self.namespace.layout

    @property
    def left(self) -> int:
        """Chunks from the beginning of the part on."""
        return len(self.moves) - self.first

    @property
    def is_part_over(self) -> bool:
        """Whether all that is offered has ended, and more is left."""
        return 0 < self.offered < self.left and all(self.is_reported[self.first : self.first + self.offered])

    def columns(self, chunks: int) -> tuple[bytes, bytes]:
        """Where the first chunks of the part go: arena offsets and slots, u64."""
        part = slice(self.first, self.first + chunks)
        offsets = np.array(self.moves.arena_offsets[part], "<u8")
        return offsets.tobytes(), np.array(self.moves.arena_slots[part], "<u8").tobytes()


class Pulls:
    """See the module. `landings`: the board on which chunks that do not come are marked."""

    def __init__(self, landings: kvpool_native.LandingBoard) -> None:
        self._landings = landings
        self._by_job: dict[JobId, Pull] = {}
        self._by_received: dict[tuple[str, int], Pull] = {}
        self._ended: list[Finished] = []
        self._of_connection: Counter[ConnectionId] = Counter()
        self._jobs = 0

    def __repr__(self) -> str:
        return f"<Pulls {len(self._by_job)} under way>"

    def __len__(self) -> int:
        return len(self._by_job)

    def count_of(self, connection: ConnectionId) -> int:
        """Pulls under way for an engine's connection."""
        return self._of_connection[connection]

    def begin(self, order: PullOrder, namespace: Namespace, moves: Moves, deadline: Deadline) -> Pull:
        """A new pull, of which nothing was asked yet. Behind the deadline no further part is asked for."""
        self._jobs += 1
        run = order.run
        pull = Pull(JobId(self._jobs), run.node, namespace, moves, deadline, order.before, order.asker, run.is_named)
        self._by_job[pull.job] = pull
        self._of_connection[order.asker.connection] += 1
        return pull

    def receive(self, pull: Pull, received: tuple[str, int]) -> None:
        """A transport's job receives the part's chunks from now on."""
        self._by_received.pop(pull.received, None)
        pull.received = received
        self._by_received[received] = pull

    def of_received(self, received: tuple[str, int]) -> Pull | None:
        """The pull of a transport's job."""
        return self._by_received.get(received)

    def all(self) -> list[Pull]:
        """Every pull under way."""
        return list(self._by_job.values())

    def fail(self, pull: Pull, first: int, outcome: Outcome, fault: str) -> None:
        """Report the chunks from number `first` on that were not. REQUIRES: nothing is received into their slots."""
        for chunk in range(first, len(pull.moves)):
            if not pull.is_reported[chunk]:
                self._landings.fail(pull.moves.arena_slots[chunk])
                self.report(pull, Finished(pull.job, chunk, outcome, fault))

    def report(self, pull: Pull, finished: Finished) -> None:
        """A chunk has ended."""
        assert not pull.is_reported[finished.chunk]
        pull.is_reported[finished.chunk] = 1
        self._ended.append(finished)
        if all(pull.is_reported):
            del self._by_job[pull.job]
            self._of_connection[pull.asker.connection] -= 1
            if not self._of_connection[pull.asker.connection]:
                del self._of_connection[pull.asker.connection]
            self._by_received.pop(pull.received, None)
            pull.end()

    def take_ended(self) -> list[Finished]:
        """The chunks that have ended since the last call."""
        taken, self._ended = self._ended, []
        return taken

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        over = [pull for pull in self._by_job.values() if all(pull.is_reported)]
        strangers = [pull for pull in self._by_received.values() if pull.job not in self._by_job]
        return [f"peer: {len(over)} pulls have ended, {len(strangers)} are unknown"] if over or strangers else []
