"""Reserved saves: which saves of a session hold reservations, and until when.

A save that has been collected gives nothing back any more: it is forgotten. Any thread adds one; the link's thread removes.
"""

import math
import weakref
from collections import deque
from typing import Protocol

from kvpool.clock import Deadline


class Expiring(Protocol):
    """A save that holds a reservation until it has ended."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def expire(self) -> None:
        """Give the reservation back: its time is over."""
        ...


class ReservedSaves:
    """See the module."""

    def __init__(self) -> None:
        self._saves: deque[tuple[Deadline, weakref.ref[Expiring]]] = deque()

    def __repr__(self) -> str:
        return f"<ReservedSaves {len(self._saves)}>"

    def add_save(self, save: Expiring, ttl_s: float) -> None:
        """A save has a reservation from now on, for so long."""
        self._saves.append((Deadline(ttl_s), weakref.ref(save)))

    def next_expiry_s(self) -> float:
        """Seconds until `expired_saves` may have one; infinite where none has a reservation."""
        return self._saves[0][0].remaining_s() if self._saves else math.inf

    def expired_saves(self) -> list[Expiring]:
        """The saves whose reservations have run out since the last call."""
        expired: list[Expiring] = []
        for _ in range(len(self._saves)):
            deadline, reference = self._saves.popleft()
            save = reference()
            if save is None or save.done():
                continue
            if deadline.has_passed():
                expired.append(save)
            else:
                self._saves.append((deadline, reference))
        return expired
