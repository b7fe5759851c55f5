"""Promises: the pages that a linker has found for a request, leased until the request loads them.

SGLang asks what can be restored, agrees on a length with its other ranks, and then counts on it: a load must be taken on every
rank. So what is answered is in DRAM and leased before it is answered, and its memory stays mapped whatever becomes of the
daemon. What is in lower tiers and on other nodes is leased as well, which brings it up, but not answered: the next lookup finds
it in DRAM.

A promise belongs to a request. A lookup of the same request replaces it; where nothing has changed it stays as it is, until its
leases have to be renewed. No call of SGLang's ends one that is not used, so it ends by its time, and their number has a bound:
beyond it a lookup finds nothing. Scheduler thread only.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.states import DRAM
from kvpool_client.verbs.lease import Lease

if TYPE_CHECKING:
    from kvpool_client.sglang.part_store import PartStore

# Requests that SGLang looks up before it loads for one of them: as many as it may sort by what they share (a guess at a bound).
PROMISES_MAX = 1024
_SKIP = -1


class PagePromise:
    """Leases on pages of one pool, for each part of the pages in batches."""

    def __init__(self, keys: Sequence[str], parts: "Sequence[tuple[PartStore, Sequence[Lease]]]") -> None:
        self._places = {key: place for place, key in enumerate(keys)}
        self._parts = parts
        found = [np.concatenate([_in_dram(lease) for lease in leases]) for _, leases in parts if leases]
        # Which of the pages were leased in DRAM, with every part.
        self.in_dram: npt.NDArray[np.bool_] = np.logical_and.reduce(found) if found else np.zeros(len(keys), np.bool_)

    @property
    def leases(self) -> list[Lease]:
        """All of them."""
        return [lease for _, leases in self._parts for lease in leases]

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these pages were leased in DRAM."""
        return all(key in self._places and self.in_dram[self._places[key]] for key in keys)

    def begin_loads(self, keys: Sequence[str], numbers: Sequence[int]) -> "list[StartedLoad]":
        """Begin to load these pages into those of the engine with these numbers. REQUIRES: `has`, and none twice."""
        targets = np.full(len(self._places), _SKIP, np.int64)
        targets[[self._places[key] for key in keys]] = numbers
        begun = []
        for part, leases in self._parts:
            first = 0
            for lease in leases:
                own = targets[first : first + len(lease.held)]
                first += len(own)
                if (own != _SKIP).any():
                    begun.append(StartedLoad(part, lease, own))
        return begun

    def release(self) -> None:
        """End the leases. What is released last counts as used last: eviction begins at the last page."""
        for lease in reversed(self.leases):
            lease.release()


class StartedLoad:
    """A load of some pages, and how far the forward has waited for it."""

    def __init__(self, part: "PartStore", lease: Lease, targets: npt.NDArray[np.int64]) -> None:
        """Begins it."""
        self._ready_at = part.ready_at
        self._next = 0
        self.load = part.begin_load(lease, targets.tolist())

    def wait_until(self, layer: int) -> bool:
        """Wait for what the forward reads up to this layer of the engine's, or until the load has ended; a page that fails
        keeps none of the others from being waited for. True: `failure` has the answer."""
        while self._next < len(self._ready_at) and self._ready_at[self._next] <= layer:
            self.load.wait_layer(self._next)
            self._next += 1
        return True

    def failure(self) -> str:
        """Wait for its end: why a page is not in place; empty where all are."""
        states = self.load.wait().states
        return next((state for state in states if state not in ("complete", "skipped")), "")


class Promise:
    """What one request was promised."""

    def __init__(
        self, keys: Sequence[str], levels: Mapping[str, npt.NDArray[np.uint8]], pools: Mapping[str, PagePromise]
    ) -> None:
        """`levels`: of the pages of each pool when they were looked for."""
        self.keys = keys
        self.pools = pools
        self.lengths: list[int] = []
        self.until = Deadline(0.0)
        self._levels = levels
        self._leases = [lease for pool in pools.values() for lease in pool.leases]

    @property
    def is_live(self) -> bool:
        """Whether the daemon has all of its leases still."""
        return all(lease.hold.is_live for lease in self._leases if lease.chunks)

    def stands_for(self, keys: Sequence[str], levels: Mapping[str, npt.NDArray[np.uint8]]) -> bool:
        """Whether a lookup would come to the same: these pages, found where they were, in leases that are young."""
        is_same = keys == self.keys and all(np.array_equal(found, self._levels[name]) for name, found in levels.items())
        return (
            is_same and self.is_live and not any(each.hold.renewal.has_passed() for each in self._leases if each.chunks)
        )

    def extend(self, limit_s: float) -> None:
        """It lasts so long from now on, or half the time of its leases."""
        times = [lease.hold.session.welcome.lease_ttl_s / 2 for lease in self._leases if lease.hold.session is not None]
        self.until = Deadline(min([limit_s, *times]))

    def release(self) -> None:
        """End its leases."""
        for pool in self.pools.values():
            pool.release()


class Promises:
    """See the module. Invariant: at most PROMISES_MAX, the one that was looked up longest ago first."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._by_request: dict[str, Promise] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def find(self, rid: str) -> Promise | None:
        """The request's."""
        return self._by_request.get(rid)

    def keep(self, rid: str, promise: Promise) -> None:
        """It is the request's from now on, for its time; another one that the request had has ended."""
        before = self._by_request.pop(rid, None)
        if before is not None and before is not promise:
            before.release()
        promise.extend(self._limit_s)
        self._by_request[rid] = promise

    def take(self, rid: str) -> Promise | None:
        """The request's, which belongs to the caller from now on."""
        return self._by_request.pop(rid, None)

    def drop(self, rid: str) -> None:
        """The request's ends."""
        promise = self.take(rid)
        if promise is not None:
            promise.release()

    def has_room(self, rid: str) -> bool:
        """Whether this request may have one."""
        return rid in self._by_request or len(self._by_request) < PROMISES_MAX

    def end_late(self) -> int:
        """End those whose time is over. How many they were. Times differ where daemons do, so all are looked at, which are few;
        none where the one that was looked up longest ago has time left."""
        first = next(iter(self._by_request.values()), None)
        if first is None or not first.until.has_passed():
            return 0
        late = [rid for rid, promise in self._by_request.items() if promise.until.has_passed()]
        for rid in late:
            self.drop(rid)
        return len(late)

    def clear(self) -> None:
        """End them all."""
        for rid in list(self._by_request):
            self.drop(rid)


def _in_dram(lease: Lease) -> npt.NDArray[np.bool_]:
    """Which pages of a batch are leased and in DRAM."""
    held = lease.held.copy()
    held[held] = lease.tiers <= DRAM
    return held
