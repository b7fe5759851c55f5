"""Reserve task: slots for the chunks of one save, reserved part by part.

A save is answered for what is certain: a chunk on its way from another tier, or from another client, is pending, never present.

Not yet a reservation of a connection: its creator makes one of it, or ends the task. Control thread only; `now_ns` is an
argument. Invariant: `reservation` is the directory's, or 0 while it holds nothing; the columns have a row for each of the first
`chunks` keys.
"""

from dataclasses import dataclass

import numpy as np

import kvpool_native
from kvpool import failpoint
from kvpool.index.parts import PART_CHUNKS, Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.writers.retention import Retention, RetentionColumns
from kvpool.types import ReservationId, SaveState


@dataclass(frozen=True, slots=True)
class ReservedSlots:
    """A reservation as its holder sees it: u8 states, columns of u64 offsets and generations. Id 0: nothing to write.

    `retained`: a `RetainState` for each chunk where the request has retention, else empty.
    """

    reservation: int
    states: bytes
    offsets: bytes
    generations: bytes
    retained: bytes


class ReserveTask:
    """See the module. `wanted`: the retention that the save asks for its chunks, new or present; `retention` sets it."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        retention: Retention,
        session: EngineSession,
        keys: KeyColumn,
        *,
        parent: bytes,
        wanted: RetentionColumns,
    ) -> None:
        self._directory = directory
        self._retention = retention
        self._own = session.own
        self._connection = session.connection
        self._parent = parent
        self.keys = keys
        self._wanted = wanted
        self.reservation = ReservationId(0)
        self.states = bytearray()
        self.offsets = bytearray()
        self.generations = bytearray()
        self.retained = bytearray()

    def __repr__(self) -> str:
        return f"<ReserveTask {self.chunks} of {len(self.keys)} chunks>"

    @property
    def chunks(self) -> int:
        """Keys that are answered."""
        return len(self.states)

    def advance(self, now_ns: int, *, may_wait: bool) -> Step:
        """Reserve the next part. WAIT (if it may) where only memory that is being faulted in or demoted could serve."""
        first = len(self.states)
        evicted_before = self._directory.evicted_chunks
        made = self._reserve(first, now_ns, may_wait=may_wait)
        self.reservation = ReservationId(made.id)
        failpoint.reach("daemon.reserve.after", failpoint.refused)
        if self._directory.evicted_chunks > evicted_before:
            failpoint.reach("daemon.evict.after", failpoint.refused)
        states = made.states
        self.states += states
        self.offsets += made.offsets
        self.generations += made.generations
        if self._wanted.priorities:
            self.retained += self._retain(first, made, now_ns)
        if len(self.states) == len(self.keys):
            return Step.DONE
        return Step.MORE if len(states) == PART_CHUNKS else Step.WAIT

    def take(self) -> ReservationId:
        """The reservation, which belongs to the caller from now on."""
        taken, self.reservation = self.reservation, ReservationId(0)
        return taken

    def _reserve(self, first: int, now_ns: int, *, may_wait: bool) -> kvpool_native.Reserved:
        if self.reservation:
            return self._directory.reserve_more(
                self.reservation, self.keys.packed, now_ns, first, PART_CHUNKS, may_wait
            )
        own, holder = self._own, self._connection
        return self._directory.reserve(
            own.id, own.size_class, self._parent, self.keys.packed, now_ns, holder, first, PART_CHUNKS, may_wait
        )

    def _retain(self, first: int, made: kvpool_native.Reserved, now_ns: int) -> bytes:
        end = first + len(made.states)
        wanted = self._wanted.part(first, end)
        states = states_for_retention(made.states, made.generations)
        return self._retention.of_save(self._own, self.keys[first:end], states, wanted, now_ns=now_ns)


def states_for_retention(states: bytes, generations: bytes) -> bytes:
    """The same states; PRESENT for chunks that are not this save's to write and have a slot."""
    found = np.frombuffer(states, np.uint8).copy()
    # Pending with a slot: on its way here from another tier, or another one's part of a chunk is being written.
    found[(found != SaveState.RESERVED) & (np.frombuffer(generations, "<u8") != 0)] = SaveState.PRESENT
    return found.tobytes()
