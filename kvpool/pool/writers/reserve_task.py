"""Reserve task: slots for the chunks of one save, reserved run by run and part by part.

Not yet a reservation of a connection: its creator makes one of it, or ends the task. Control thread only; `now_ns` is an
argument. Invariant: the columns have a row for each of the first `chunks` keys.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import kvpool_native
from kvpool import failpoint
from kvpool.index.namespaces import Namespace
from kvpool.index.parts import Step, save_chunks
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.packed_numbers import u64_of
from kvpool.pool.writers.places import Place
from kvpool.pool.writers.retention import Retention, RetentionColumns
from kvpool.protocol.reserve_runs import RunForm
from kvpool.states import SaveState


class ReservedSlots(NamedTuple):
    """A reservation as its holder sees it: u8 states, columns of u64 offsets and generations. Id 0: nothing to write.

    `retained`: a `RetainState` for each chunk where the request has retention, else empty.
    """

    reservation: int
    states: bytes
    offsets: bytes
    generations: bytes
    retained: bytes


class TaskRun(NamedTuple):
    """Chunks of one group that are to be reserved. `session`: the group's, whose namespace is `own`; `is_part`: of each chunk a
    share is."""

    session: EngineSession
    own: Namespace
    form: RunForm
    keys: KeyColumn
    place: Place
    is_part: bool = False


class ReservedPart(NamedTuple):
    """Chunks of a run that were just answered, with a state for each."""

    run: TaskRun
    keys: KeyColumn
    states: bytes


class ReserveTask:
    """See the module. `wanted`: the retention that the save asks for its chunks, new or present; `retention` sets it. Of
    several parts of a chunk the last request counts, as for chunks that are stored."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        retention: Retention,
        runs: Sequence[TaskRun],
        wanted: RetentionColumns,
    ) -> None:
        self._directory = directory
        self._retention = retention
        self.runs = runs
        self._wanted = wanted
        self._run = 0  # the one that is being reserved
        self._first = 0  # of its chunks
        self.latest = ReservedPart(runs[0], KeyColumn(b""), b"")
        self.chunks = 0  # keys that are answered
        # Of each answer: columns joined when all are there.
        self._rows: list[tuple[bytes, bytes, bytes, bytes]] = []

    def __repr__(self) -> str:
        return f"<ReserveTask {self.chunks} of {sum(len(run.keys) for run in self.runs)} chunks>"

    def columns(self) -> Iterator[bytes]:
        """States, offsets, generations and retained of all keys that are answered."""
        if len(self._rows) == 1:
            return iter(self._rows[0])
        return (b"".join(columns) for columns in zip(*self._rows, strict=True))

    def advance(self, now_ns: int, *, may_wait: bool) -> Step:
        """Reserve the next part; behind the last one, let go what is there already: with its retention, in the order of its
        use. WAIT (if it may) where only memory that is being faulted in or demoted could serve."""
        if self._run == len(self.runs):
            self.latest = ReservedPart(self.runs[-1], KeyColumn(b""), b"")
            return self._let_go(now_ns)
        run, first = self.runs[self._run], self._first
        most = save_chunks(is_part=run.is_part, is_chain=run.form is not RunForm.ALONE)
        chunks = len(run.keys)
        end = min(first + most, chunks)
        evicted_before = self._directory.evicted_chunks
        made = run.place.reserve(first, end, now_ns, may_wait=may_wait)
        failpoint.reach("daemon.reserve.after", failpoint.refused)
        if self._directory.evicted_chunks > evicted_before:
            failpoint.reach("daemon.evict.after", failpoint.refused)
        states, generations, retained = bytes(made.states), bytes(made.generations), b""
        answered = len(states)
        keys = run.keys if answered == chunks else run.keys[first : first + answered]
        if self._wanted.priorities and answered:
            wanted = self._wanted.part(self.chunks, self.chunks + answered)
            have_slots = _states_for_retention(states, generations)
            retained = self._retention.of_save(run.own, keys, have_slots, wanted, now_ns=now_ns)
        self.latest = ReservedPart(run, keys, states)
        self._rows.append((states, bytes(made.offsets), generations, retained))
        self.chunks += answered
        self._first += answered
        if self._first < end:
            return Step.WAIT
        if self._first == chunks:
            self._run, self._first = self._run + 1, 0
        return Step.MORE if self._run < len(self.runs) else self._let_go(now_ns)

    def _let_go(self, now_ns: int) -> Step:
        return Step.DONE if all(run.place.let_go(now_ns) for run in self.runs) else Step.MORE

    def give_up(self, now_ns: int) -> None:
        """End what no reservation was made of."""
        for run in self.runs:
            run.place.give_up(now_ns)


def _states_for_retention(states: bytes, generations: bytes) -> bytes:
    """The same states; PRESENT for chunks that are not this save's to write and have a slot."""
    # Pending with a slot: on its way here from another tier, or another one's part of a chunk is being written.
    pairs = zip(states, u64_of(generations), strict=True)
    return bytes(
        [SaveState.PRESENT if generation and state != SaveState.RESERVED else state for state, generation in pairs]
    )
