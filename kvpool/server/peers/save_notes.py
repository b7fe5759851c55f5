"""Save notes: chunks that others may follow while an engine saves them, and those whose save was given up, as numbered notes.

    under way ──stored──► forgotten: an event says so
        └──not stored, or dropped again──► lost, with a number of its own

A follower names the number of the last note that it has, and gets the later ones, the oldest first, so many at once. What was
lost is reported only while this node has not got the chunk all the same. Where notes of lost chunks were dropped that a
follower lacks, it gets none: it has to ask for everything anew. Notes about chunks under way may be dropped: these are not
followed.

Loop thread only. Invariant: `_notes` has each key once, in the order of its numbers, NOTES_MAX keys at most.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, takewhile

from kvpool.key_column import KeyColumn

# Chunks that are remembered for who has not asked since, and those of one answer.
NOTES_MAX = 16_384
NOTES_ONCE = 1024


@dataclass(frozen=True, slots=True)
class NotesSlice:
    """Chunks of saves `under_way`, and `lost` ones, as of note `last`. `is_gap`: notes before these were dropped."""

    last: int
    under_way: tuple[bytes, ...] = ()
    lost: tuple[bytes, ...] = ()
    is_gap: bool = False


class SaveNotes:
    """See the module. `has`: whether some tier of this node has a chunk."""

    def __init__(self, has: Callable[[bytes], bool]) -> None:
        self._has = has
        # The number of each, and how many saves of it have not ended.
        self._notes: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._last = 0
        self._dropped = 0  # the number of the newest note of a lost chunk that was dropped

    def __repr__(self) -> str:
        return f"<SaveNotes {len(self._notes)}, the last one {self._last}>"

    def begin_save(self, keys: KeyColumn) -> None:
        """Chunks of a save can be followed from now on."""
        for key in keys:
            self._note(key, self._saves_of(key) + 1)

    def end_save(self, keys: KeyColumn, stored: int) -> bool:
        """A save has ended: so many of its chunks were stored, the others are lost. So is one that was dropped since: while the
        save was under way, the event of that was not reported. Whether any is lost."""
        lost = []
        for key in keys[:stored]:
            if self._has(key):
                self._notes.pop(key, None)
            else:
                lost.append(key)
        lost += keys[stored:]
        for key in lost:
            others = self._saves_of(key) - 1
            if others > 0:  # begun after the chunk was dropped under this one's writer
                self._notes[key] = self._notes[key][0], others
            else:
                self._note(key, 0)
        return bool(lost)

    def since(self, last: int) -> NotesSlice:
        """The notes after number `last`; 0: of who knows of no save, and needs to know of none that was lost."""
        if last > self._last or 0 < last < self._dropped:
            return NotesSlice(self._last, is_gap=True)
        newer = list(takewhile(lambda key: self._notes[key][0] > last, reversed(self._notes)))
        chosen = list(islice(reversed(newer), NOTES_ONCE))
        under_way = tuple(key for key in chosen if self._notes[key][1])
        lost = tuple(key for key in chosen if last and not self._notes[key][1] and not self._has(key))
        has_all = len(chosen) == len(newer)
        return NotesSlice(self._last if has_all else self._notes[chosen[-1]][0], under_way, lost)

    def is_under_way(self, key: bytes) -> bool:
        """Whether a chunk is being saved now, as far as that is remembered."""
        return self._saves_of(key) > 0

    def _saves_of(self, key: bytes) -> int:
        return self._notes.get(key, (0, 0))[1]

    def _note(self, key: bytes, saves: int) -> None:
        self._last += 1
        self._notes.pop(key, None)
        self._notes[key] = self._last, saves
        while len(self._notes) > NOTES_MAX:
            _, (number, saves_of_oldest) = self._notes.popitem(last=False)
            if not saves_of_oldest:
                self._dropped = number
