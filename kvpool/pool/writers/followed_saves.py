"""Followed saves: chunks that other nodes read extent by extent while an engine is still saving them.

    reserved ──first extent lands──► followed ──commit──► stored
                                       └──abort, deadline──► lost

The last extent of a chunk's KV, and its summaries, land with its commit: nobody has all KV of a chunk that was not stored. What
is followed is not held: a save that is given up has its slots back at once, and who follows it sees that in the slot's
generation. Without a listener nothing is noted. Control thread only.

Invariant: `_saves` has exactly the reservations with chunks that are not committed, made since there is a listener.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.index.reservations import Reservation
from kvpool.index.sessions import EngineSession
from kvpool.index.staged_slots import CHECKSUM_BYTES, Extents
from kvpool.key_column import KeyColumn
from kvpool.types import ReservationId, SaveState

_STORED = bytes([SaveState.STORED])


class SaveListener(Protocol):
    """Who is called, on the control thread, for each save that can be followed."""

    def note_save(self, keys: KeyColumn) -> None:
        """Its first extent has landed."""
        ...

    def end_save(self, keys: KeyColumn, stored: int) -> None:
        """It has ended: so many of its chunks are stored, the others are lost."""
        ...


@dataclass(slots=True)
class _Save:
    """`keys`: of the reserved chunks. `is_followed`: the listener has been called for them. `stored`: leading ones that are."""

    keys: KeyColumn
    is_followed: bool = False
    stored: int = 0


class SavedRun(NamedTuple):
    """Where consecutive chunks lie that are being saved: columns of u64."""

    offsets: bytes
    slots: bytes
    generations: bytes


class FollowedSaves:
    """See the module."""

    def __init__(self, directory: kvpool_native.Directory) -> None:
        self._directory = directory
        self._listener: SaveListener | None = None
        self._saves: dict[ReservationId, _Save] = {}

    def __repr__(self) -> str:
        return f"<FollowedSaves {sum(save.is_followed for save in self._saves.values())} of {len(self._saves)}>"

    @property
    def is_listened(self) -> bool:
        """Whether saves are noted."""
        return self._listener is not None

    def listen(self, listener: SaveListener) -> None:
        """Note saves from now on, and call `listener`."""
        self._listener = listener

    def begin(self, reservation: ReservationId, keys: KeyColumn) -> None:
        """A save has begun, of these reserved chunks."""
        self._saves[reservation] = _Save(keys)

    def land(self, reservation: Reservation, extents: Extents, checksums: bytes) -> None:
        """Extents of a save lie in their slots; `checksums`: u32 [chunk][extent]. Those before are in place, or these are left
        out."""
        save = self._saves.get(reservation.id)
        if save is None or not checksums:
            return
        chunks, first = extents.chunks, extents.numbers.start
        landing = min(extents.numbers.stop, reservation.kv_extents - 1) - first
        if landing <= 0:
            return
        shown = first_columns(checksums, len(extents.numbers), landing)
        self._directory.land_saved(reservation.id, chunks.start, len(chunks), first, shown)
        if first == 0 and not save.is_followed and self._listener is not None:
            save.is_followed = True
            self._listener.note_save(save.keys)

    def commit(self, reservation: Reservation, states: bytes) -> None:
        """The next chunks of a save have been committed, with these states. Behind one that is not stored none is."""
        save = self._saves.get(reservation.id)
        if save is not None and save.stored == reservation.committed:
            save.stored += len(states) - len(states.lstrip(_STORED))

    def end(self, reservation: Reservation) -> None:
        """A reservation ends, or expires."""
        save = self._saves.pop(reservation.id, None)
        if save is not None and save.is_followed and self._listener is not None:
            self._listener.end_save(save.keys, save.stored)

    def find(self, session: EngineSession, parent: bytes, keys: KeyColumn) -> SavedRun:
        """Where the chunks lie that are being saved after `parent`, or at the beginning of a run of chunks without one. Nothing
        is held."""
        is_chained, found = session.layout.is_chained, SavedRun(b"", b"", b"")
        for chain in [keys] if is_chained else keys.parts(1):
            saved = self._directory.follow_saves(session.own.id, parent if is_chained else b"", chain.packed)
            if not saved.offsets:
                break
            found = SavedRun(
                found.offsets + saved.offsets, found.slots + saved.slots, found.generations + saved.generations
            )
        return found

    def verify(self, reservations: set[ReservationId]) -> list[str]:
        """Broken invariants, one line each."""
        unknown = set(self._saves) - reservations
        return [f"followed saves: {len(unknown)} of no reservation"] if unknown else []


def first_columns(checksums: bytes, columns: int, wanted: int) -> bytes:
    """Of checksums [chunk][extent] with so many columns, the first `wanted`."""
    if wanted == columns:
        return checksums
    row, kept = columns * CHECKSUM_BYTES, wanted * CHECKSUM_BYTES
    return b"".join(checksums[at : at + kept] for at in range(0, len(checksums), row))


def extents_of(reservation: Reservation, first_extent: int, checksums: bytes) -> Extents:
    """The extents of all chunks of a save that these checksums are of. Raises ProtocolError."""
    extents = len(checksums) // (CHECKSUM_BYTES * reservation.chunks)
    if not extents or len(checksums) != extents * reservation.chunks * CHECKSUM_BYTES:
        raise ProtocolError(
            f"{len(checksums)} bytes of checksums, expected 4 for each extent of {reservation.chunks} chunks"
        )
    if not 0 <= first_extent <= reservation.extents - extents:
        raise ProtocolError(
            f"extents {first_extent}..{first_extent + extents - 1} landed, a chunk has {reservation.extents}"
        )
    return Extents(range(reservation.chunks), range(first_extent, first_extent + extents))
