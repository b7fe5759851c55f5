"""Places of a save's chunks: where a reserve task takes slots for one run of them, from the directory or in joint saves.

Each has what it has taken until its task makes a reservation of it, or gives it up. Control thread only; `now_ns` is an
argument.
"""

from itertools import repeat
from typing import Protocol

import kvpool_native
from kvpool.ids import ConnectionId, ReservationId
from kvpool.index.joint_chunks import Part, Placed, Rows
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.pool.writers.ending_reservations import EndingReservations
from kvpool.pool.writers.joint_saves import JointSaves
from kvpool.states import SaveState

_RESERVED = bytes([SaveState.RESERVED])


class Place(Protocol):
    """Where the chunks of a run are reserved."""

    @property
    def extents(self) -> int:
        """Extents of a chunk that are written here."""
        ...

    def reserve(self, first: int, end: int, now_ns: int, *, may_wait: bool) -> Rows:
        """Slots for the chunks from `first` up to `end`, or for fewer where (if it may) it must wait for room."""
        ...

    def take_holders(self) -> list[ReservationId]:
        """Who holds what was reserved: of the run, or of one RESERVED chunk each. It belongs to the caller from now on."""
        ...

    def give_up(self, now_ns: int) -> None:
        """End what was not taken."""
        ...


class ChainPlace:
    """Whole chunks of a chain behind `parent`."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        ending: EndingReservations,
        own: Namespace,
        *,
        parent: bytes,
        keys: KeyColumn,
        holder: ConnectionId,
    ) -> None:
        self._directory = directory
        self._ending = ending
        self._own = own
        self._parent = parent
        self._keys = keys
        self._holder = holder
        self._reservation = ReservationId(0)
        self._chunks = 0

    @property
    def extents(self) -> int:
        """See `Place`."""
        return self._own.extents

    def reserve(self, first: int, end: int, now_ns: int, *, may_wait: bool) -> Rows:
        """See `Place`."""
        most, packed, own = end - first, self._keys.packed, self._own
        if self._reservation:
            made = self._directory.reserve_more(self._reservation, packed, now_ns, first, most, may_wait)
        else:
            made = self._directory.reserve(
                own.id, own.size_class, self._parent, packed, now_ns, self._holder, first, most, may_wait
            )
            self._reservation = ReservationId(made.id)
        self._chunks += len(made.states)
        return made

    def take_holders(self) -> list[ReservationId]:
        """See `Place`."""
        taken, self._reservation = self._reservation, ReservationId(0)
        return [taken]

    def give_up(self, now_ns: int) -> None:
        """See `Place`."""
        if self._reservation:
            self._ending.end_reservation(self.take_holders()[0], self._chunks, now_ns)


class SinglesPlace:
    """Whole chunks without a parent, each by itself."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        ending: EndingReservations,
        own: Namespace,
        keys: KeyColumn,
        *,
        holder: ConnectionId,
    ) -> None:
        self._directory = directory
        self._ending = ending
        self._own = own
        self._keys = keys
        self._holder = holder
        self._reservations: list[ReservationId] = []

    @property
    def extents(self) -> int:
        """See `Place`."""
        return self._own.extents

    def reserve(self, first: int, end: int, now_ns: int, *, may_wait: bool) -> Rows:
        """See `Place`."""
        own, rows = self._own, Placed()
        for key in self._keys[first:end].parts(1):
            made = self._directory.reserve(
                own.id, own.size_class, b"", key.packed, now_ns, self._holder, 0, 1, may_wait
            )
            if made.states[:1] == _RESERVED:
                self._reservations.append(ReservationId(made.id))
            elif made.id:
                self._directory.end_reservation(made.id, now_ns)  # what is present was merely touched
            if not made.states:
                break
            rows.add_rows(made)
        if own.layout.is_chained and first + len(rows.states) == len(self._keys):
            # What is present, in the order of a set: its first chunk is used last.
            self._directory.use_again(own.id, self._keys.packed, now_ns)
        return rows

    def take_holders(self) -> list[ReservationId]:
        """See `Place`."""
        taken, self._reservations = self._reservations, []
        return taken

    def give_up(self, now_ns: int) -> None:
        """See `Place`."""
        taken = self.take_holders()
        if taken:
            self._ending.end_reservations(taken[0], zip(taken, repeat(1)), now_ns, chunks=len(taken))


class PartPlace:
    """The extents of a share, of chunks that other connections fill as well. `is_chain`: behind `parent`, or each by itself."""

    def __init__(
        self,
        joint_saves: JointSaves,
        own: Namespace,
        keys: KeyColumn,
        *,
        parent: bytes,
        is_chain: bool,
        part: Part,
    ) -> None:
        self._joint_saves = joint_saves
        self._own = own
        self._keys = keys
        self._parent = parent
        self._is_chain = is_chain
        self._part: Part | None = part
        self._is_closed = False

    @property
    def extents(self) -> int:
        """See `Place`."""
        assert self._part is not None
        return len(self._part.numbers)

    def reserve(self, first: int, end: int, now_ns: int, *, may_wait: bool) -> Rows:
        """See `Place`."""
        assert self._part is not None
        rows = Placed()
        if self._is_closed:
            rows.fill(end - first)
            return rows
        asked = self._keys[first:end]
        above = self._keys.before(first, self._parent)
        for keys in [asked] if self._is_chain else asked.parts(1):
            placed = self._joint_saves.place(
                self._part,
                self._own,
                above if self._is_chain else b"",
                keys,
                now_ns=now_ns,
                may_wait=may_wait,
            )
            if not placed.states:
                break
            rows.add_rows(placed)
            self._is_closed = self._is_chain and placed.is_closed
        return rows

    def take_holders(self) -> list[ReservationId]:
        """See `Place`."""
        assert self._part is not None
        taken, self._part = self._part, None
        taken.is_taken = True
        return [taken.id]

    def give_up(self, now_ns: int) -> None:
        """See `Place`."""
        if self._part is not None:
            self._joint_saves.end_part(self.take_holders()[0], now_ns)
