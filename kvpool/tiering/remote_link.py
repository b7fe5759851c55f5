"""Remote link: chunks that are pulled from a remote tier into the arena, for a request that leases or announces them.

What an arena and its lower tiers lack may be pulled from another node, after what they have. Pulled chunks get slots in the
state PROMOTING, which every connection may lease at once; each layer is loaded after it has landed.

    RESERVED ──pull──► LANDED
        └──failed──► dropped with its descendants: the prefix ends before it

Control thread only; no I/O. Invariant: each pull under way has one hold in the arena's directory, and where its chunks have no
parent one for each, released after its last chunk was reported.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.clock import NS_PER_S, Clock
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.tiering.landings import Landings, leading
from kvpool.tiering.promotions import Wanted
from kvpool.tiers.base import NOT_STARTED, Counters, Finished, JobId, Moves
from kvpool.tiers.jobs import Jobs
from kvpool.tiers.remote import NOBODY, Asker, PullOrder, RemoteRun, RemoteTier
from kvpool.types import HoldId, Level, SaveState

# A tier that has reported nothing of a job for so long has lost it: every pull has a deadline of its own, which is far shorter.
LOST_S = 300


@dataclass(frozen=True, slots=True)
class _Pull:
    """One pull. `generations`: of the slots in the arena."""

    owner: "RemoteLink"
    holds: list[HoldId]
    moves: Moves
    generations: list[int]

    def settle(self, finished: Finished, now_ns: int) -> None:  # noqa: ARG002 - a landing has no time
        """See `Job`."""
        self.owner.settle(self.moves.keys[finished.chunk], self.generations[finished.chunk], finished)

    def end(self, now_ns: int) -> None:
        """See `Job`."""
        self.owner.end(self.holds, now_ns)


@dataclass(slots=True)
class _Placed:
    """Chunks that may have a slot in the arena, and the holds on them; the columns are of the chunks, as in the directory's
    answers."""

    holds: list[HoldId] = field(default_factory=list)
    states: bytes = b""
    offsets: bytes = b""
    slots: bytes = b""
    generations: bytes = b""

    def add(self, made: kvpool_native.Reserved) -> None:
        """The next chunks."""
        self.holds += [HoldId(made.id)] if made.id else []
        self.states += made.states
        self.offsets += made.offsets
        self.slots += made.slots
        self.generations += made.generations


class RemoteLink:
    """See the module. `on_settled` is called after chunks have been settled."""

    def __init__(
        self, directory: kvpool_native.Directory, remote: RemoteTier, clock: Clock, *, on_settled: Callable[[], None]
    ) -> None:
        """`directory`: the arena's."""
        self.remote = remote
        self._directory = directory
        self._clock = clock
        self._on_settled = on_settled
        self._jobs = Jobs(clock)
        self._landings = Landings(directory, remote.name)
        self._under_way = self._holds = 0

    def __repr__(self) -> str:
        return f"<RemoteLink to {self.remote!r}, {self._under_way} pulls>"

    @property
    def holds(self) -> int:
        """Holds that pulls have in the arena's directory."""
        return self._holds

    def start(self) -> None:
        """Begin to serve, in the background."""
        self.remote.start(self)

    def on_completed(self) -> None:
        """See `TierOwner`: settle finished chunks."""
        now_ns = self._clock.now_ns()
        for finished in self.remote.completed():
            self._jobs.settle(finished, now_ns)
        self._on_settled()

    def on_doubt(self) -> None:
        """See `TierOwner`. Nothing is written there, so nothing is in doubt."""

    def find(self, namespace: Namespace, keys: KeyColumn, first: int, asker: Asker = NOBODY) -> RemoteRun:
        """The run of chunks from number `first` on that one node seems to have; `end` is `first` where there is none. What is
        known counts before the node that the request names."""
        known = self.remote.find(namespace, keys, first)
        named = self.remote.find_at(asker, keys, first) if asker.owner and known.end < len(keys) else known
        return named if named.end > known.end else known

    def pull(self, wanted: Wanted, order: PullOrder, now_ns: int) -> int:
        """Start to pull the wanted chunks: how many leading ones are in the arena or being pulled."""
        made = self._place(wanted, now_ns)
        placed = leading(made.states)
        reserved = [number for number in range(placed) if made.states[number] == SaveState.RESERVED]
        if reserved and not self._read(wanted, order, reserved, made):
            placed = reserved[0]
            reserved = []
        if not reserved:
            self._release(made.holds, now_ns)
        return placed

    def settle(self, key: bytes, generation: int, finished: Finished) -> None:
        """Note that a chunk has landed or failed. `generation`: of its slot in the arena."""
        self._landings.settle(key, generation, finished)

    def end(self, holds: list[HoldId], now_ns: int) -> None:
        """A pull has ended: release its holds."""
        self._under_way -= 1
        self._holds -= len(holds)
        self._release(holds, now_ns)

    def stats(self) -> Counters:
        """Counters, by name."""
        return {
            f"{self.remote.name}.pulled_chunks": self._landings.chunks,
            f"{self.remote.name}.failed_chunks": self._landings.failed_chunks,
            f"{self.remote.name}.pulls_under_way": self._under_way,
            **self.remote.stats(),
        }

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        name, silence_s = self.remote.name, self._jobs.silence_ns() // NS_PER_S
        wrong = [f"{name}: {self._jobs.strays} reports were nobody's"] if self._jobs.strays else []
        if silence_s > LOST_S:
            wrong.append(
                f"{name}: a pull has had no report for {silence_s} s, expected {LOST_S} at most: the tier has lost it and the "
                "daemon needs a restart"
            )
        if len(self._jobs) != self._under_way:
            wrong.append(f"{name}: {self._under_way} pulls have holds, {len(self._jobs)} are under way")
        return self.remote.verify() + wrong

    def _place(self, wanted: Wanted, now_ns: int) -> _Placed:
        """Give the wanted chunks slots, up to one that gets none."""
        namespace, placed = wanted.namespace, _Placed()
        # Readers of the shared index know no level beyond PEER: on its way, a chunk of a store is one of another node.
        level = bytes([min(self.remote.level, Level.PEER)])
        place = partial(self._directory.promote, namespace.id, namespace.size_class, wanted.parent)
        for chain in wanted.keys.parts(1 if wanted.is_run else len(wanted.keys)):
            made = place(chain.packed, now_ns, level * len(chain), is_external=True)
            placed.add(made)
            if leading(made.states) < len(made.states):
                break
        return placed

    def _release(self, holds: list[HoldId], now_ns: int) -> None:
        for hold in holds:
            self._directory.release(hold, now_ns)

    def _read(self, wanted: Wanted, order: PullOrder, reserved: list[int], made: _Placed) -> bool:
        """Start to pull the reserved chunks. False when the tier takes no job now: then their slots are given up."""
        chosen = np.array(reserved)
        fresh: list[int] = np.frombuffer(made.generations, "<u8")[chosen].tolist()
        keys = list(wanted.keys.chosen(reserved))
        moves = Moves(
            keys=keys,
            parents=[b"" if wanted.is_run else wanted.keys.before(number, wanted.parent) for number in reserved],
            offsets=[0] * len(keys),
            generations=[0] * len(keys),
            arena_offsets=np.frombuffer(made.offsets, "<u8")[chosen].tolist(),
            arena_slots=np.frombuffer(made.slots, "<u8")[chosen].tolist(),
        )
        present = wanted.keys[: 0 if wanted.is_run else reserved[0]]
        before = KeyColumn(order.before.packed + present.packed) if present else order.before
        job_id = self._start(wanted.namespace, moves, replace(order, before=before))
        if not job_id:
            self._landings.give_up(keys, fresh)
            return False
        self._jobs.add(job_id, _Pull(self, made.holds, moves, fresh), len(moves))
        self._under_way += 1
        self._holds += len(made.holds)
        return True

    def _start(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:
        try:
            failpoint.reach("daemon.pull.before_read")
        except OSError:
            return NOT_STARTED
        return self.remote.read(namespace, moves, order)
