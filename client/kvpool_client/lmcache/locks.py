"""Locks: what LMCache has found and may load, held in the pool until it is unlocked.

    locked ──LMCache unlocks each of its keys, once for each lock──► released
       └──its time is over, or LOCKS_MAX younger ones were taken──► released

A lock is one lookup's: the leases on what it found in DRAM. A lease ends as a whole, so all of its chunks are held until the
last of them is unlocked. LMCache gives up a request without unlocking what is still being looked up, so a lock ends by itself,
here or in the daemon, whose leases end when they are not used (`server.lease_ttl`); a load takes a lease of its own.

Any thread. Lock: `_guarded` guards all fields, never held while a lease is released.
"""

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from kvpool.clock import Deadline
from kvpool_client.verbs.lease import Lease

LOCKS_MAX = 4096


class _Lock:
    """One lookup's. `left`: its keys that are not unlocked, each as often as it was found."""

    __slots__ = ("deadline", "leases", "left")

    def __init__(self, keys: Iterable[Hashable], leases: Sequence[Lease], deadline: Deadline) -> None:
        self.left = Counter(keys)
        self.leases = leases
        self.deadline = deadline


class Locks:
    """See the module. Invariant: `_of_key` has a lock under a key exactly as long as the key is in its `left`, oldest first."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: of one that is not unlocked."""
        self._timeout_s = timeout_s
        self._guarded = threading.Lock()
        self._locks: dict[int, _Lock] = {}  # oldest first
        self._of_key: dict[Hashable, dict[int, _Lock]] = {}
        self._next = 0

    def __len__(self) -> int:
        """Locks that are held."""
        return len(self._locks)

    def add_lock(self, keys: Sequence[Hashable], leases: Sequence[Lease]) -> None:
        """Hold these leases until each of these keys is unlocked. Of no leases nothing is held."""
        ended = self._take_ended(LOCKS_MAX - 1)
        if leases:
            lock = _Lock(keys, leases, Deadline(self._timeout_s))
            with self._guarded:
                self._next += 1
                self._locks[self._next] = lock
                for key in lock.left:
                    self._of_key.setdefault(key, {})[self._next] = lock
        _release(ended)

    def unlock(self, keys: Iterable[Hashable]) -> None:
        """End one lock of each key, the oldest; nothing for a key without one. Never waits."""
        ended = self._take_ended(LOCKS_MAX)
        with self._guarded:
            for key in keys:
                held = self._of_key.get(key)
                if held is None:
                    continue
                number, lock = next(iter(held.items()))
                lock.left[key] -= 1
                if not lock.left[key]:
                    self._forget_key(key, number, lock)
                    if not lock.left:
                        del self._locks[number]
                        ended.append(lock)
        _release(ended)

    def close(self) -> None:
        """End them all."""
        _release(self._take_ended(0))

    def _take_ended(self, most: int) -> list[_Lock]:
        """Take out those whose time is over, and the oldest of more than `most`."""
        ended: list[_Lock] = []
        with self._guarded:
            while self._locks:
                number, lock = next(iter(self._locks.items()))
                if len(self._locks) <= most and not lock.deadline.has_passed():
                    break
                del self._locks[number]
                for key in list(lock.left):
                    self._forget_key(key, number, lock)
                ended.append(lock)
        return ended

    def _forget_key(self, key: Hashable, number: int, lock: _Lock) -> None:
        del lock.left[key]
        held = self._of_key[key]
        del held[number]
        if not held:
            del self._of_key[key]


def _release(locks: Iterable[_Lock]) -> None:
    for lock in locks:
        for lease in lock.leases:
            lease.release()
