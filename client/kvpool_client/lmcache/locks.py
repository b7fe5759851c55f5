"""Locks: what LMCache has found and may load, held in the pool until it is unlocked.

    locked ──LMCache unlocks each of its keys, once for each lock──► released
       └──its time is over, or LOCKS_MAX younger ones were taken──► released; its unlock, if it comes, ends no other's

A lock is one lookup's: the leases on what it found in DRAM. A lease ends as a whole, so all of its chunks are held until the
last of them is unlocked. LMCache gives up a request without unlocking what is still being looked up, so a lock ends by itself,
here, on a timer's thread, or in the daemon, whose leases end when they are not used (`server.lease_ttl`); a load takes a lease
of its own. An unlock does not have whose it is: the first one of a key after its lock has ended by itself counts as that one's,
and the lock that it may have been meant for ends by itself then.

Any thread. Lock: `_guarded` guards all fields, never held while a lease is released.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from kvpool.clock import Deadline
from kvpool_client.verbs.lease import Lease

LOCKS_MAX = 4096
# Keys of which an unlock may come yet, after its lock.
LATE_MAX = 65536


class _Lock:
    """One lookup's. `left`: its keys that are not unlocked, each as often as it was found; `taken`: how many of those unlocks
    may have come, and counted as an older lock's."""

    __slots__ = ("deadline", "leases", "left", "taken")

    def __init__(self, keys: Iterable[Hashable], leases: Sequence[Lease], deadline: Deadline) -> None:
        self.left = Counter(keys)
        self.taken: Counter[Hashable] = Counter()
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
        self._late: dict[
            Hashable, int
        ] = {}  # unlocks that may come yet of locks that have ended by themselves, oldest first
        self._timer: threading.Timer | None = None  # there while there are locks
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
                self._start_timer()
        _release(ended)

    def unlock(self, keys: Iterable[Hashable]) -> None:
        """End one lock of each key, the oldest; nothing for a key without one. Never waits."""
        ended = self._take_ended(LOCKS_MAX)
        with self._guarded:
            for key in keys:
                held = self._of_key.get(key)
                number, lock = next(iter(held.items())) if held else (0, None)
                if self._take_late(key):
                    if lock is not None:
                        lock.taken[key] += 1
                    continue
                if lock is None:
                    continue
                lock.left[key] -= 1
                if not lock.left[key]:
                    self._forget_key(key, number, lock)
                    if not lock.left:
                        del self._locks[number]
                        ended.append(lock)
        _release(ended)

    def close(self) -> None:
        """End them all, and the timer."""
        ended = self._take_ended(0)
        with self._guarded:
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
        _release(ended)

    def _take_ended(self, most: int) -> list[_Lock]:
        """Take out those whose time is over, and the oldest of more than `most`."""
        ended: list[_Lock] = []
        with self._guarded:
            while self._locks:
                number, lock = next(iter(self._locks.items()))
                if len(self._locks) <= most and not lock.deadline.has_passed():
                    break
                del self._locks[number]
                for key, count in list(lock.left.items()):
                    self._note_late(key, count - lock.taken[key])
                    self._forget_key(key, number, lock)
                ended.append(lock)
        return ended

    def _start_timer(self) -> None:
        """Have the oldest lock ended in its time. REQUIRES: _guarded."""
        if self._timer is not None or not self._locks:
            return
        oldest = next(iter(self._locks.values()))
        timer = threading.Timer(oldest.deadline.remaining_s(), self._end_over)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no more threads for this user: the next call ends it
            timer.start()
            self._timer = timer

    def _end_over(self) -> None:
        """The timer's thread."""
        ended = self._take_ended(LOCKS_MAX)
        with self._guarded:
            if self._timer is not None:  # else closed
                self._timer = None
                self._start_timer()
        _release(ended)

    def _note_late(self, key: Hashable, count: int) -> None:
        if count > 0:
            self._late[key] = self._late.pop(key, 0) + count
            if len(self._late) > LATE_MAX:
                del self._late[next(iter(self._late))]

    def _take_late(self, key: Hashable) -> bool:
        """Whether an unlock counts as that of a lock that has ended by itself."""
        left = self._late.pop(key, 0)
        if left > 1:
            self._late[key] = left - 1
        return left > 0

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
