"""Part task: extents of a share, of the chunks of one save, reserved part by part. A `ReserveTask` for a joint save.

Not yet a reservation of a connection: its creator makes one of it, or ends the task. Control thread only; `now_ns` is an
argument. Invariant: `part` is one of the joint saves' until it is taken or given up; the columns have a row for each of the
first `chunks` keys.
"""

from kvpool import failpoint
from kvpool.index.joint_chunks import Part, Placed
from kvpool.index.parts import PART_CHUNKS, Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.writers.joint_saves import JointSaves
from kvpool.pool.writers.reserve_task import states_for_retention
from kvpool.pool.writers.retention import Retention, RetentionColumns
from kvpool.types import SaveState


class PartTask:
    """See the module. `wanted`: the retention that the save asks for; of several parts the last request counts, as for chunks
    that are stored."""

    def __init__(
        self,
        joint_saves: JointSaves,
        retention: Retention,
        session: EngineSession,
        keys: KeyColumn,
        *,
        part: Part,
        parent: bytes,
        wanted: RetentionColumns,
    ) -> None:
        self._joint_saves = joint_saves
        self._retention = retention
        self._own = session.own
        self._parent = parent
        self.keys = keys
        self.part: Part | None = part
        self._wanted = wanted
        self._is_closed = False
        self.states = bytearray()
        self.offsets = bytearray()
        self.generations = bytearray()
        self.retained = bytearray()

    def __repr__(self) -> str:
        return f"<PartTask {self.chunks} of {len(self.keys)} chunks>"

    @property
    def chunks(self) -> int:
        """Keys that are answered."""
        return len(self.states)

    def advance(self, now_ns: int, *, may_wait: bool) -> Step:
        """Reserve the next part. WAIT (if it may) where only memory that is being faulted in or demoted could serve."""
        first = len(self.states)
        asked = self.keys[first : first + PART_CHUNKS]
        placed = self._place(asked, now_ns, may_wait=may_wait)
        failpoint.reach("daemon.reserve.after", failpoint.refused)
        self.states += placed.states
        self.offsets += placed.offsets
        self.generations += placed.generations
        if self._wanted.priorities and placed.states:
            end = first + len(placed)
            states = states_for_retention(bytes(placed.states), bytes(placed.generations))
            wanted = self._wanted.part(first, end)
            self.retained += self._retention.of_save(self._own, self.keys[first:end], states, wanted, now_ns=now_ns)
        if len(self.states) == len(self.keys):
            return Step.DONE
        return Step.MORE if len(placed) == len(asked) else Step.WAIT

    def take(self) -> Part | None:
        """The part, which belongs to the caller from now on; None where that was taken before."""
        taken, self.part = self.part, None
        if taken is not None:
            taken.is_taken = True
        return taken

    def declined(self, first: int) -> bytes:
        """The states from `first` on, with PRESENT for every chunk that was not declined."""
        is_kept = bytes([SaveState.PRESENT if state == SaveState.PART else state for state in range(256)])
        return bytes(self.states[first:]).translate(is_kept)

    def _place(self, asked: KeyColumn, now_ns: int, *, may_wait: bool) -> Placed:
        assert self.part is not None
        first = len(self.states)
        if self._is_closed:
            placed = Placed()
            placed.fill(len(asked))
            return placed
        above = self.keys.before(first, self._parent)
        placed = self._joint_saves.place(self.part, self._own, above, asked, now_ns=now_ns, may_wait=may_wait)
        self._is_closed = placed.is_closed
        return placed
