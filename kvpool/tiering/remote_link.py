"""Remote link: chunks that are pulled from a remote tier into the arena, for a request that leases or announces them.

What an arena and its lower tiers lack may be pulled from another node, after what they have. Pulled chunks get slots in the
state PROMOTING, which every connection may lease at once; each extent is loaded after it has landed.

    RESERVED ──pull──► LANDED
        └──failed──► dropped with its descendants: the prefix ends before it

Chunks are placed part by part, and pulled together (`PlacedRun`).

Control thread only; no I/O. Invariant: each pull has a hold in the arena's directory for each of its parts, and where its
chunks have no parent one for each, released after its last chunk was reported; `_holds` counts them, and those of placed runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import kvpool_native
from kvpool import failpoint
from kvpool.clock import NS_PER_S, Clock
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.tiering.landings import Landings, leading
from kvpool.tiering.placed_run import PlacedRun
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
        self._landings = Landings(directory, remote.name, clock)
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

    def place(self, run: PlacedRun, first: int, end: int, now_ns: int) -> int:
        """Give the chunks from number `first` up to `end` of a run slots: how many leading ones of them are in the arena or on
        their way. `start_pull` is to follow, soon."""
        level = bytes([min(self.remote.level, Level.PEER)])  # readers of the shared index know no level beyond
        keys, is_chained = run.keys[first:end], run.is_chained
        parent, placed = run.keys.before(first) if is_chained else b"", 0
        for part in keys.parts(len(keys) if is_chained else 1):
            made = self._directory.promote(
                run.namespace.id,
                run.namespace.size_class,
                parent,
                part.packed,
                now_ns,
                level * len(part),
                is_external=True,
            )
            got = leading(made.states)
            if not self._keep(run, first + placed, made, now_ns):
                break
            placed += got
            if got < len(part):
                break
        return placed

    def start_pull(self, run: PlacedRun, now_ns: int) -> bool:
        """Start to pull what has been placed of a run. False where the tier takes no job now: then the slots are given up."""
        if not run.placed:
            self._release(run.take_holds(), now_ns)
            return True
        moves, generations = run.moves(), run.generations
        job_id = self._start(run.namespace, moves, run.order())
        holds = run.take_holds()
        if not job_id:
            self._holds -= len(holds)
            self._landings.give_up(list(moves.keys), generations)
            self._release(holds, now_ns)
            return False
        self._jobs.add(job_id, _Pull(self, holds, moves, generations), len(moves))
        self._under_way += 1
        return True

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

    def _keep(self, run: PlacedRun, first: int, made: kvpool_native.Reserved, now_ns: int) -> bool:
        """Have the leading chunks of an answer that have new slots pulled with those before them. Where a chain's are not one
        behind the other, because somebody else pulls what lies between, those before are pulled by themselves; false where
        they are not, and these are given up too."""
        numbers = [first + at for at in range(leading(made.states)) if made.states[at] == SaveState.RESERVED]
        is_begun = not numbers or run.follows(numbers[0]) or self.start_pull(run, now_ns)
        if numbers and is_begun:
            run.add(numbers, [number - first for number in numbers], made)
            run.holds.append(HoldId(made.id))
            self._holds += 1
        elif made.id:
            self._release([HoldId(made.id)], now_ns)
        return is_begun

    def _release(self, holds: list[HoldId], now_ns: int) -> None:
        for hold in holds:
            self._directory.release(hold, now_ns)

    def _start(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:
        try:
            failpoint.reach("daemon.pull.before_read")
        except OSError:
            return NOT_STARTED
        return self.remote.read(namespace, moves, order)
