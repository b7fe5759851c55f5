"""Followed saves: chunks that other nodes read extent by extent while an engine is still saving them.

    reserved ──first extent lands──► followed ──commit──► stored
                                       └──abort, deadline──► lost

The last extent of a chunk's KV, and its summaries, land with its commit: nobody has all KV of a chunk that was not stored. What
is followed is not held: a save that is given up has its slots back at once, and who follows it sees that in the slot's
generation. Without a listener nothing is noted. Control thread only.

Invariant: `_saves` has exactly the holders of slots with chunks that are not committed, reserved since there is a listener.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.ids import CHECKSUM_BYTES, ReservationId
from kvpool.index.reservations import ReservedRun
from kvpool.index.sessions import EngineSession
from kvpool.index.staged_slots import Extents
from kvpool.key_column import KeyColumn
from kvpool.states import SaveState

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

    def begin_save(self, run: ReservedRun, keys: KeyColumn) -> None:
        """A save has begun, of these reserved chunks of a run."""
        at = 0
        for holder, _, count in run.slices(0, run.chunks):
            self._saves[holder] = _Save(keys[at : at + count])
            at += count

    def land(self, run: ReservedRun, extents: Extents, checksums: bytes) -> None:
        """Extents of a save lie in their slots; `checksums`: u32 [chunk][extent]. Those before are in place, or these are left
        out."""
        chunks, first = extents.chunks, extents.numbers.start
        landing = min(extents.numbers.stop, run.kv_extents - 1) - first
        if landing <= 0 or not checksums or run.holders[0] not in self._saves:
            return
        shown, row = _first_columns(checksums, len(extents.numbers), landing), landing * CHECKSUM_BYTES
        at = 0
        for holder, start, count in run.slices(chunks.start, chunks.stop):
            of_holder = shown[at * row : (at + count) * row]
            self._directory.land_saved(holder, start, count, first, of_holder)
            at += count
            save = self._saves[holder]
            if first == 0 and not save.is_followed and self._listener is not None:
                save.is_followed = True
                self._listener.note_save(save.keys)

    def commit(self, run: ReservedRun, states: bytes) -> None:
        """The next chunks of a save have been committed, with these states. No chunk of a chain is behind one that is lost."""
        at = 0
        for holder, first, count in run.slices(run.committed, run.committed + len(states)):
            save = self._saves.get(holder)
            if save is not None and save.stored == first:
                of_holder = states[at : at + count]
                save.stored += count - len(of_holder.lstrip(_STORED))
            at += count

    def end_save(self, run: ReservedRun) -> None:
        """A run's reservation ends, or expires."""
        for holder in run.holders:
            save = self._saves.pop(holder, None)
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

    def verify(self, holders: set[ReservationId]) -> list[str]:
        """Broken invariants, one line each."""
        unknown = set(self._saves) - holders
        return [f"followed saves: {len(unknown)} of no reservation"] if unknown else []


def _first_columns(checksums: bytes, columns: int, wanted: int) -> bytes:
    """Of checksums [chunk][extent] with so many columns, the first `wanted`."""
    if wanted == columns:
        return checksums
    row, kept = columns * CHECKSUM_BYTES, wanted * CHECKSUM_BYTES
    return b"".join(checksums[at : at + kept] for at in range(0, len(checksums), row))


def extents_of(run: ReservedRun, first_extent: int, checksums: bytes) -> Extents:
    """The extents of all chunks of a save that these checksums are of. Raises ProtocolError."""
    extents = len(checksums) // (CHECKSUM_BYTES * run.chunks)
    if not extents or len(checksums) != extents * run.chunks * CHECKSUM_BYTES:
        raise ProtocolError(f"{len(checksums)} bytes of checksums, expected 4 for each extent of {run.chunks} chunks")
    if not 0 <= first_extent <= run.extents - extents:
        raise ProtocolError(f"extents {first_extent}..{first_extent + extents - 1} landed, a chunk has {run.extents}")
    return Extents(range(run.chunks), range(first_extent, first_extent + extents))
