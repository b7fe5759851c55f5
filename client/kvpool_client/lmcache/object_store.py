"""Object store: the objects of one form of one model of LMCache's, found, locked, loaded and saved in kvpool.

A namespace with a connection of its own; its objects are a set of chunks without parents. A lookup reads shared memory, and
asks only for what it finds in DRAM: a lease on that is the lock. What the lower tiers and other nodes have is found and not
leased, since a lease would bring it all to DRAM, and LMCache asks for whole prompts that it mostly has itself; the load leases
it. What is leased, released and saved keeps the first objects of a prompt the most recently used, so that eviction begins at
its end.

Nothing here raises into LMCache: what fails is a miss, counted, logged once. Any thread; every call but `probe` may wait for
the daemon, until its deadline. Lock: `_counting` guards the counts. Copies per byte: one, by the Pool's native threads, between
LMCache's L1 and the arena.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.states import DRAM, TokenRange
from kvpool_client.connection.stall import Stall
from kvpool_client.engines.connection_name import connection_name
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.lease_size import CHUNKS_AT_ONCE, chunks_at_once
from kvpool_client.engines.set_loads import SetLoads
from kvpool_client.lmcache.object_layout import Form, address_of, are_valid, bytes_of, layout_of
from kvpool_client.lmcache.settings import Settings
from kvpool_client.named_keys import Names
from kvpool_client.pool import Pool
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load

# Objects locked by one request.
LOCKS_AT_ONCE = 1024

Levels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Locked:
    """What of a set was found, and the leases on what of it is in DRAM."""

    found: npt.NDArray[np.bool_]
    leases: tuple[Lease, ...]


class _Watch(Stall):
    """Ends a load at its task's deadline, or as soon as an object is freed into which it may still write."""

    def __init__(self, load: Load, memories: Sequence[Any], deadline: Deadline) -> None:
        super().__init__(load, deadline.remaining_s())
        self._memories = memories

    def has_lasted(self) -> bool:
        """Whether the load is to end."""
        return super().has_lasted() or not are_valid(self._memories)


class ObjectStore:
    """See the module."""

    def __init__(self, settings: Settings, form: Form, guard: FailureGuard, *, model: str, revision: str) -> None:
        """Connects. `revision`: names the weights. Raises InvalidArgument, LayoutMismatch."""
        self._guard = guard
        self._priority = settings.priority
        self.object_bytes = bytes_of(form)
        self._pool = Pool(
            settings.socket,
            model=model,
            revision=revision,
            layout=layout_of(form),
            salt=settings.salt.encode(),
            timeout_s=settings.timeout_s,
            copy_threads=settings.copy_threads,
            name=connection_name("lmcache", 0, 1),
        )
        self._set_loads = SetLoads(self._pool, guard, timeout_s=settings.timeout_s)
        self._is_closing = threading.Event()
        self._saves_at_once = chunks_at_once(self._pool.layout, CHUNKS_AT_ONCE)
        self._counting = threading.Lock()
        self._counts = {  # guarded by _counting
            "loaded_objects": 0,
            "saved_objects": 0,
            "present_objects": 0,
            "declined_objects": 0,
            "late_load_objects": 0,
            "late_save_objects": 0,
            "freed_objects": 0,
        }

    def __repr__(self) -> str:
        return f"<ObjectStore {self._pool!r} {self.object_bytes} bytes>"

    @property
    def is_connected(self) -> bool:
        """Whether a daemon serves it now."""
        return self._pool.connected

    def probe(self, names: Names) -> Levels:
        """The level of each object, 0 for one that is not known to be anywhere. No request."""
        return self._pool.probe(names)

    def must_ask(self, levels: Levels) -> bool:
        """Whether a lookup that has found these levels takes a request: for a lease, or of the store that nodes share."""
        return bool((levels == DRAM).any()) or (self._pool.has_store and bool((levels == 0).any()))

    def note_lookup(self, levels: Levels) -> None:
        """A lookup has found these, for hit rates."""
        self._pool.counters.count_lookup(len(levels), levels[levels > 0].tobytes())

    def lock(self, names: Names, deadline: Deadline) -> Locked:
        """Look objects up and lease what is in DRAM. What is not leased by the deadline is not found."""
        found = np.zeros(len(names), np.bool_)
        leases: list[Lease] = []
        try:
            levels = self._pool.probe(names, asks_store=True, is_counted=True)
            in_dram = np.flatnonzero(levels == DRAM)
            found |= levels > 0
            found[in_dram] = False
            for first in range(0, len(in_dram), LOCKS_AT_ONCE):
                if deadline.has_passed():
                    break
                part = in_dram[first : first + LOCKS_AT_ONCE]
                lease = self._pool.acquire_set(names[part])
                leases.append(lease)
                found[part] = lease.held
        except ENGINE_FAILURES as error:
            self._guard.miss("lookup", error)
        return Locked(found, tuple(lease for lease in leases if lease.chunks))

    def load(self, names: Names, memories: Sequence[Any], deadline: Deadline) -> npt.NDArray[np.bool_]:
        """Bring objects into these; which of them are there and were verified. The bytes of others are undefined. After it has
        returned, nothing is written there."""

        def load_part(lease: Lease, places: npt.NDArray[np.intp]) -> list[str] | None:
            moved = [memories[place] for place in places.tolist()]
            if not self._are_valid(moved):
                return None
            with self._pool.load_set(lease, self._addresses_of(moved)) as load:
                states = load.wait_watched(_Watch(load, moved, deadline), deadline).states
            return list(states) if self._are_valid(moved) else None

        good = np.zeros(len(names), np.bool_)
        try:
            states = self._set_loads.load(names, load_part, deadline=deadline, stop=self._is_closing)
            good = np.array([state == "complete" for state in states], np.bool_)
        except ENGINE_FAILURES as error:
            self._guard.miss("load", error)
        loaded = int(good.sum())
        self._count("loaded_objects", loaded)
        if loaded < len(good) and deadline.has_passed():
            self._count("late_load_objects", len(good) - loaded)
        return good

    def save(self, names: Names, memories: Sequence[Any], deadline: Deadline) -> tuple[bool, int]:
        """Store these objects: whether all of them are in the pool now, or just being stored by another writer, and how many
        this save has stored. After it has returned, nothing is read there."""
        is_whole, stored = True, 0
        try:
            for first in reversed(range(0, len(names), self._saves_at_once)):
                if deadline.has_passed():
                    self._count("late_save_objects", min(first + self._saves_at_once, len(names)))
                    is_whole = False
                    break
                part = slice(first, first + self._saves_at_once)
                moved = memories[part]
                if not self._are_valid(moved):
                    is_whole = False
                    break
                retention = () if self._priority is None else (TokenRange(0, None, self._priority),)
                with self._pool.save_set(names[part], self._addresses_of(moved), retention=retention) as save:
                    if save.copy(deadline) and not self._are_valid(
                        moved
                    ):  # other bytes, perhaps: none of them is stored
                        is_whole = False
                        break
                    result = save.commit()
                self._count("saved_objects", result.stored)
                self._count("present_objects", result.present)
                self._count("declined_objects", result.declined)
                self._count("late_save_objects", result.reasons.get("timeout", 0))
                stored += result.stored
                is_whole = is_whole and set(result.reasons) <= {"pending"}
        except ENGINE_FAILURES as error:
            self._guard.miss("store", error)
            is_whole = False
        return is_whole, stored

    def stats(self) -> dict[str, int | float | str]:
        """Objects moved, those for which a task's time was not enough, and the Pool's own counters."""
        with self._counting:
            counts = dict(self._counts)
        return {**counts, **self._pool.stats()}

    def close(self) -> None:
        """End the connection: everything is a miss from then on, what is under way too. Idempotent."""
        self._is_closing.set()
        self._pool.close()
        self._set_loads.close()

    def _count(self, name: str, amount: int) -> None:
        with self._counting:
            self._counts[name] += amount

    def _are_valid(self, memories: Sequence[Any]) -> bool:
        """Whether none of these was freed; else all of them are left alone."""
        if are_valid(memories):
            return True
        self._count("freed_objects", len(memories))
        self._guard.warn_once("LMCache has freed objects while they were moved; they are not stored, and not loaded")
        return False

    def _addresses_of(self, memories: Sequence[Any]) -> list[int]:
        return [address_of(memory, self.object_bytes) for memory in memories]
