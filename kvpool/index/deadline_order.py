"""Deadline order: entries in the order of their deadlines, where each lasts for one of a few times to live.

A queue for each time to live: a used entry moves to its queue's end, so a queue is in the order of its deadlines, and the next
to end is at the head of one of them. Times to live are few: they change when a configuration is read again.

Control thread only; `now_ns` is an argument. Invariant: each key is in exactly one queue. An empty queue stays until there is
a new time to live: most often the next entry comes to it.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class DeadlineOrder(Generic[Key]):
    """See the module."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Key, int]] = {}  # deadlines by key, by the time to live
        self._ttl_of: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._ttl_of)

    def __repr__(self) -> str:
        return f"<DeadlineOrder of {len(self)}, {len(self._queues)} times to live>"

    def use(self, key: Key, ttl_ns: int, now_ns: int) -> None:
        """Use an entry now, for the first time or again; it lasts so long from now."""
        if key in self._ttl_of:
            self.remove(key)
        queue = self._queues.get(ttl_ns)
        if queue is None:
            self._queues = {ttl: others for ttl, others in self._queues.items() if others}
            queue = self._queues[ttl_ns] = OrderedDict()
        self._ttl_of[key] = ttl_ns
        queue[key] = now_ns + ttl_ns

    def remove(self, key: Key) -> None:
        """Remove an entry that has ended."""
        del self._queues[self._ttl_of.pop(key)][key]

    def next_over(self, now_ns: int) -> Key | None:
        """An expired entry; None where there is none."""
        for queue in self._queues.values():
            for key, deadline_ns in queue.items():
                if deadline_ns <= now_ns:
                    return key
                break
        return None

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        problems = []
        if {key: ttl_ns for ttl_ns, queue in self._queues.items() for key in queue} != self._ttl_of:
            problems.append("deadlines: a key is in another queue than its own")
        if any(list(queue.values()) != sorted(queue.values()) for queue in self._queues.values()):
            problems.append("deadlines: a queue is not in order")
        return problems
