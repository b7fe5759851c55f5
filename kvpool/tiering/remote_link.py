"""Remote link: chunks that are pulled from a remote tier into the arena, for a request that leases or announces them.

What an arena and its lower tiers lack may be pulled from another node, after what they have. Pulled chunks get slots in the
state PROMOTING, which every connection may lease at once; each extent is loaded after it has landed.

    RESERVED ──pull──► LANDED
        └──failed──► dropped with its descendants: the prefix ends before it

Chunks are placed part by part, and pulled together (`PlacedRun`).

Control thread only; no I/O. Invariant: each pull has a hold in the arena's directory for each of its parts, released after its
last chunk was reported; `_holds` counts them, and those of placed runs.
"""

from collections.abc import Sequence
from functools import partial

import kvpool_native
from kvpool import failpoint
from kvpool.ids import HoldId
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.states import Level, SaveState
from kvpool.tiering.landings import Landings, leading
from kvpool.tiering.link import ArenaSide, Link
from kvpool.tiering.placed_run import PlacedRun
from kvpool.tiering.promotions import Wanted
from kvpool.tiers.base import NOT_STARTED, Counters, Finished, JobId, Moves
from kvpool.tiers.remote import NOBODY, Asker, PullOrder, Remote, RemoteRun


class RemoteLink(Link[Remote]):
    """See the module."""

    def __init__(self, side: ArenaSide, remote: Remote) -> None:
        super().__init__(side, remote)
        self._landings = Landings(self._arena, remote.name, side.clock)
        self._under_way = 0
        self._holds = 0

    @property
    def holds(self) -> int:
        """See `Link`: those of pulls."""
        return self._holds

    def find(self, namespace: Namespace, keys: KeyColumn, first: int, asker: Asker = NOBODY) -> RemoteRun:
        """The run of chunks from number `first` on that one node seems to have; `end` is `first` where there is none. What is
        known counts before the node that the request names."""
        known = self.tier.find(namespace, keys, first)
        named = self.tier.find_at(asker, keys, first) if asker.owner and known.end < len(keys) else known
        return named if named.end > known.end else known

    def place(self, run: PlacedRun, first: int, end: int, now_ns: int) -> int:
        """Give the chunks from number `first` up to `end` of a run slots: how many leading ones of them are in the arena or on
        their way. `start_pull` is to follow, soon."""
        keys = run.keys[first:end]
        made = self._arena.promote(
            run.namespace.id,
            run.namespace.size_class,
            run.keys.before(first) if run.is_chained else b"",
            keys.packed,
            now_ns,
            bytes([min(self.tier.level, Level.PEER)]) * len(keys),  # readers of the shared index know no level beyond
            is_external=True,
            are_alone=not run.is_chained,
        )
        return leading(made.states) if self._keep(run, first, made, now_ns) else 0

    def pull_each(self, wanted: Wanted, *, asker: Asker, now_ns: int) -> list[int]:
        """Start to pull chunks that are alone, of each node with one request: which of the wanted ones a node seems to have. In
        the arena or on its way is what has got a slot."""
        found: list[int] = []
        for node, numbers in self.tier.find_each(wanted.namespace, wanted.keys):
            run = RemoteRun(len(numbers), node)
            keys = wanted.keys.chosen(numbers)
            placed = PlacedRun(wanted.namespace, keys, run, wanted.is_urgent, asker, is_chained=False, are_alone=True)
            self.place(placed, 0, len(keys), now_ns)
            self.start_pull(placed, now_ns)
            found += numbers
        return found

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
        end = partial(self._end_pull, holds)
        self._jobs.add_job(job_id, len(moves), partial(self.settle_chunk, moves.keys, generations), end)
        self._under_way += 1
        return True

    def settle_chunk(self, keys: Sequence[bytes], generations: list[int], finished: Finished) -> None:
        """Note that a chunk has landed or failed. `generations`: of the slots in the arena."""
        self._landings.settle_chunk(keys[finished.chunk], generations[finished.chunk], finished)

    def _end_pull(self, holds: list[HoldId], now_ns: int) -> None:
        """A pull has ended: release its holds."""
        self._under_way -= 1
        self._holds -= len(holds)
        self._release(holds, now_ns)

    def stats(self) -> Counters:
        """See `Link`."""
        return {
            f"{self.tier.name}.pulled_chunks": self._landings.chunks,
            f"{self.tier.name}.failed_chunks": self._landings.failed_chunks,
            f"{self.tier.name}.pulls_under_way": self._under_way,
            **self.tier.stats(),
        }

    def verify(self, *, with_shared: bool = True) -> list[str]:
        """See `Link`."""
        wrong = super().verify(with_shared=with_shared)
        if len(self._jobs) != self._under_way:
            wrong.append(f"{self.tier.name}: {self._under_way} pulls have holds, {len(self._jobs)} are under way")
        return wrong

    def _keep(self, run: PlacedRun, first: int, made: kvpool_native.Reserved, now_ns: int) -> bool:
        """Have the chunks of an answer that have new slots pulled with those before them. Where a chain's are not one behind
        the other, because somebody else pulls what lies between, those before are pulled by themselves; false where they are
        not, and these are given up too."""
        numbers = [first + at for at, state in enumerate(made.states) if state == SaveState.RESERVED]
        is_begun = not numbers or run.follows(numbers[0]) or self.start_pull(run, now_ns)
        if numbers and is_begun:
            run.add_slots(numbers, [number - first for number in numbers], made)
            run.holds.append(HoldId(made.id))
            self._holds += 1
        elif made.id:
            self._release([HoldId(made.id)], now_ns)
        return is_begun

    def _release(self, holds: list[HoldId], now_ns: int) -> None:
        for hold in holds:
            self._arena.release(hold, now_ns)

    def _start(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:
        try:
            failpoint.reach("daemon.pull.before_read")
        except OSError:
            return NOT_STARTED
        return self.tier.read(namespace, moves, order)
