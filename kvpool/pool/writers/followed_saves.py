"""Followed saves: chunks that other nodes read extent by extent while an engine is still saving them.

    reserved ──first extent lands──► followed ──commit──► stored
                                       └──abort, deadline──► lost

The last extent of a chunk's KV, and its summaries, land with its commit: nobody has all KV of a chunk that was not stored. What
is followed is not held: a save that is given up has its slots back at once, and who follows it sees that in the slot's
generation. Without a listener nothing is noted. The listener is called for a long save in bounded parts. Control thread only.

Invariant: `_saves` has exactly the runs with chunks that are not committed, reserved since there is a listener.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import NamedTuple, Protocol

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.ids import CHECKSUM_BYTES, ReservationId
from kvpool.index.reservations import ReservedRun
from kvpool.index.sessions import EngineSession
from kvpool.index.staged_slots import Extents
from kvpool.key_column import KeyColumn
from kvpool.states import SaveState

# Chunks of saves for which the listener is called in one turn: less than a millisecond (a guess).
CALLED_AT_ONCE = 256
# Of each state: whether it is STORED.
_IS_STORED = bytes([state == SaveState.STORED for state in range(256)])


class SaveListener(Protocol):
    """Who is called, on the control thread, for each save that can be followed."""

    def note_save(self, keys: KeyColumn) -> None:
        """Their first extents have landed."""
        ...

    def end_save(self, keys: KeyColumn, stored: int) -> None:
        """Their save has ended: so many of them, the first ones, are stored, the others are lost."""
        ...


@dataclass(slots=True)
class _Save:
    """A run: `keys` of the reserved chunks. `are_noted`: the listener has been called for them; `are_stored`: for those that
    were committed."""

    keys: KeyColumn
    are_noted: bytearray = field(init=False)
    are_stored: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.are_noted = bytearray(len(self.keys))

    def note(self, chunks: range) -> KeyColumn:
        """The keys of those of these chunks that were not noted before."""
        place = slice(chunks.start, chunks.stop)
        new = list(compress(chunks, map(not_, self.are_noted[place])))
        self.are_noted[place] = b"\x01" * len(chunks)
        return self.keys.chosen(new)

    def end(self) -> tuple[KeyColumn, int]:
        """The keys of the chunks that were noted, the stored ones first, and how many these are."""
        are_stored = self.are_stored.ljust(len(self.keys), b"\0")
        noted = list(compress(range(len(self.keys)), self.are_noted))
        stored = [number for number in noted if are_stored[number]]
        return self.keys.chosen(stored + [number for number in noted if not are_stored[number]]), len(stored)


class SavedRun(NamedTuple):
    """Where consecutive chunks lie that are being saved: columns of u64."""

    offsets: bytes
    slots: bytes
    generations: bytes


class FollowedSaves:
    """See the module."""

    def __init__(self, directory: kvpool_native.Directory, on_backlog: Callable[[], None] | None = None) -> None:
        """`on_backlog` has `end_more` called soon; without it everything is ended at once."""
        self._directory = directory
        self._on_backlog = on_backlog
        self._listener: SaveListener | None = None
        self._saves: dict[ReservationId, _Save] = {}  # by the first holder of slots of each run
        # What the listener is to be called with: chunks that are noted (None), or end and of which so many are stored.
        self._calls: deque[tuple[KeyColumn, int | None]] = deque()
        self._left = CALLED_AT_ONCE  # chunks for which it may be called before `end_more` is called again

    def __repr__(self) -> str:
        return f"<FollowedSaves {sum(1 in save.are_noted for save in self._saves.values())} of {len(self._saves)}>"

    @property
    def is_listened(self) -> bool:
        """Whether saves are noted."""
        return self._listener is not None

    def listen(self, listener: SaveListener) -> None:
        """Note saves from now on, and call `listener`."""
        self._listener = listener

    def begin_save(self, run: ReservedRun, keys: KeyColumn) -> None:
        """A save has begun, of these reserved chunks of a run."""
        self._saves[run.holders[0]] = _Save(keys)

    def land(self, run: ReservedRun, extents: Extents, checksums: bytes) -> None:
        """Extents of a save lie in their slots; `checksums`: u32 [chunk][extent]. Those before are in place, or these are left
        out."""
        chunks, first = extents.chunks, extents.numbers.start
        landing = min(extents.numbers.stop, run.kv_extents - 1) - first
        save = self._saves.get(run.holders[0])
        if save is None or landing <= 0 or not checksums:
            return
        shown, row = _first_columns(checksums, len(extents.numbers), landing), landing * CHECKSUM_BYTES
        at = 0
        for holder, start, count in run.slices(chunks.start, chunks.stop):
            of_holder = shown[at * row : (at + count) * row]
            self._directory.land_saved(holder, start, count, first, of_holder)
            at += count
        if first == 0:
            self._call_with(save.note(chunks), None)

    def commit(self, run: ReservedRun, states: bytes) -> None:
        """The next chunks of a save have been committed, with these states."""
        save = self._saves.get(run.holders[0])
        if save is not None:
            save.are_stored += states.translate(_IS_STORED)

    def end_save(self, run: ReservedRun) -> None:
        """A run's reservation ends, or expires."""
        save = self._saves.pop(run.holders[0], None) if run.holders else None
        if save is None or 1 not in save.are_noted:
            return
        self._call_with(*save.end())

    @property
    def has_backlog(self) -> bool:
        """Whether `end_more` has more to do."""
        return bool(self._calls)

    def end_more(self) -> None:
        """Call the listener for a bounded number of chunks."""
        self._left = CALLED_AT_ONCE
        self._call_some()

    def _call_with(self, keys: KeyColumn, stored: int | None) -> None:
        """Call the listener, in parts and after all that waits."""
        at = 0
        for part in keys.parts(CALLED_AT_ONCE):
            self._calls.append((part, None if stored is None else max(0, min(stored - at, len(part)))))
            at += len(part)
        self._call_some()
        if self._calls and self._on_backlog is not None:
            self._on_backlog()

    def _call_some(self) -> None:
        while self._calls and (self._left > 0 or self._on_backlog is None):
            keys, stored = self._calls.popleft()
            self._left -= len(keys)
            assert self._listener is not None
            if stored is None:
                self._listener.note_save(keys)
            else:
                self._listener.end_save(keys, stored)

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
    row, shown = columns * CHECKSUM_BYTES, wanted * CHECKSUM_BYTES
    return b"".join([checksums[at : at + shown] for at in range(0, len(checksums), row)])


def extents_of(run: ReservedRun, first_extent: int, checksums: bytes) -> range:
    """The numbers of the extents of all chunks of a save that these checksums are of. Raises ProtocolError."""
    extents = len(checksums) // (CHECKSUM_BYTES * run.chunks)
    if not extents or len(checksums) != extents * run.chunks * CHECKSUM_BYTES:
        raise ProtocolError(f"{len(checksums)} bytes of checksums, expected 4 for each extent of {run.chunks} chunks")
    if not 0 <= first_extent <= run.extents - extents:
        raise ProtocolError(f"extents {first_extent}..{first_extent + extents - 1} landed, a chunk has {run.extents}")
    return range(first_extent, first_extent + extents)
