"""Places of a save's chunks: where a reserve task takes slots for one run of them, from the directory or in joint saves.

Each has what it has taken until its task makes a reservation of it, or gives it up. Control thread only; `now_ns` is an
argument.
"""

from collections import deque
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
# Chunks of a set that were there already and are let go in one call: 0.15 µs each (measured).
_LET_GO_AT_ONCE = 1024


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

    def let_go(self, now_ns: int) -> bool:
        """Once all runs are reserved: let a bounded number of chunks go that are there already. Whether none is left."""
        ...

    def give_up(self, now_ns: int) -> None:
        """End what was not taken."""
        ...


class _PresentChunks:
    """Chunks of a set that are there already: held until all of its save are placed, so that none is evicted for another one.

    Let go, the first of full chunks is used last, and the last of windows and states.
    """

    def __init__(self, directory: kvpool_native.Directory, own: Namespace) -> None:
        self._directory = directory
        self.held: deque[ReservationId] = deque()
        self._next = self.held.pop if own.layout.is_chained else self.held.popleft

    def let_go(self, now_ns: int) -> bool:
        """See `Place`."""
        for _ in range(min(len(self.held), _LET_GO_AT_ONCE)):
            self._directory.end_reservation(self._next(), now_ns)
        return not self.held


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

    def let_go(self, now_ns: int) -> bool:  # noqa: ARG002 - a chain holds what is there to its end
        """See `Place`."""
        return True

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
        self._present = _PresentChunks(directory, own)

    @property
    def extents(self) -> int:
        """See `Place`."""
        return self._own.extents

    def reserve(self, first: int, end: int, now_ns: int, *, may_wait: bool) -> Rows:
        """See `Place`."""
        own, rows = self._own, Placed()
        for key in self._keys[first:end].parts(1):
            made = self._directory.reserve(
                own.id, own.size_class, b"", key.packed, now_ns, self._holder, 0, 1, may_wait, is_kept=True
            )
            if made.states[:1] == _RESERVED:
                self._reservations.append(ReservationId(made.id))
            elif made.id:
                self._present.held.append(ReservationId(made.id))
            if not made.states:
                break
            rows.add_rows(made)
        return rows

    def take_holders(self) -> list[ReservationId]:
        """See `Place`."""
        taken, self._reservations = self._reservations, []
        return taken

    def let_go(self, now_ns: int) -> bool:
        """See `Place`."""
        return self._present.let_go(now_ns)

    def give_up(self, now_ns: int) -> None:
        """See `Place`."""
        while not self.let_go(now_ns):
            pass
        taken = self.take_holders()
        if taken:
            self._ending.end_reservations(taken[0], zip(taken, repeat(1)), now_ns, chunks=len(taken))


class PartPlace:
    """The extents of a share, of chunks that other connections fill as well. `is_chain`: behind `parent`, or each by itself."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
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
        self._present = _PresentChunks(directory, own)
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
                present=None if self._is_chain else self._present.held,
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

    def let_go(self, now_ns: int) -> bool:
        """See `Place`."""
        return self._present.let_go(now_ns)

    def give_up(self, now_ns: int) -> None:
        """See `Place`."""
        while not self.let_go(now_ns):
            pass
        if self._part is not None:
            self._joint_saves.end_part(self.take_holders()[0], now_ns)
