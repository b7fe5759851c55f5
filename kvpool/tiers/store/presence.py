"""Presence: what the shared store has answered about chunks, remembered briefly.

An answer is a hint: the store may have lost the chunk since, or have got it. Bounded, the oldest answers out first. Control
thread only; time is an argument.
"""

from collections import OrderedDict
from collections.abc import Iterable

ANSWERS_MAX = 65_536


class Presence:
    """See the module. `size`: answers at most."""

    def __init__(self, size: int = ANSWERS_MAX) -> None:
        self._size = size
        self._answers: OrderedDict[bytes, tuple[bool, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Presence {len(self._answers)} answers>"

    def __len__(self) -> int:
        return len(self._answers)

    def note_answer(self, key: bytes, until_ns: int, *, is_there: bool) -> None:
        """Remember an answer until then."""
        self._answers[key] = (is_there, until_ns)
        self._answers.move_to_end(key)
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)

    def of(self, key: bytes, now_ns: int) -> bool | None:
        """The last answer; None where there is none, or an old one."""
        found = self._answers.get(key)
        return found[0] if found is not None and found[1] > now_ns else None

    def leading(self, keys: Iterable[bytes], now_ns: int) -> int:
        """How many leading chunks are there, as far as is known."""
        count = 0
        for key in keys:
            if not self.of(key, now_ns):
                break
            count += 1
        return count

    def clear(self) -> None:
        """Forget every answer: the store may be another one now."""
        self._answers.clear()
