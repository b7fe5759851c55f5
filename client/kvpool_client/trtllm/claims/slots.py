"""Slots of the staging that are free, by layer group.

The staging thread alone takes slots; it and the executor's give them back, so as many as were free stay free until it takes
them. Any thread. Lock: `_lock` guards the free ones.
"""

import threading
from collections.abc import Sequence

from kvpool_client.trtllm.plan import ByGroup


class Slots:
    """See the module. Invariant: no slot is free twice."""

    def __init__(self, counts: Sequence[int]) -> None:
        """`counts`: slots of each layer group, all free."""
        self._lock = threading.Lock()
        self._free = [list(range(count)) for count in counts]  # guarded by _lock

    def __repr__(self) -> str:
        return f"<Slots {self.free} free>"

    @property
    def free(self) -> tuple[int, ...]:
        """How many are free, of each layer group."""
        with self._lock:
            return tuple(len(of_group) for of_group in self._free)

    def take_slots(self, counts: Sequence[int]) -> ByGroup:
        """So many slots of each layer group. Requires: as many are free."""
        with self._lock:
            assert all(count <= len(of_group) for count, of_group in zip(counts, self._free, strict=True))
            return tuple(
                tuple(of_group.pop() for _ in range(count)) for count, of_group in zip(counts, self._free, strict=True)
            )

    def give_back_slots(self, slots: ByGroup) -> None:
        """Free slots that nobody writes or reads."""
        with self._lock:
            for of_group, given in zip(self._free, slots, strict=False):  # no claim has no groups
                of_group.extend(given)
