"""Part store: finds, loads and saves one part of the pages of a host pool in kvpool, a batch at a time.

SGLang names a page by a hash over everything before it, so pages are a set of chunks without parents: a batch may begin in the
middle of a prompt, and what precedes it need not be passed. (SGLang can pass those hashes, but 0.5.23 leaves out the last
node's where it prefetches.) One request leases pages and one native job loads them, two requests save them. What is saved and
released keeps the first pages of a batch the most recently used, so that eviction begins at its end.

Nothing here raises into SGLang: what fails is a miss, counted, logged once. Any thread; SGLang calls from its prefetch and
backup threads. Copies per byte: one, by the Pool's native threads.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.errors import InvalidArgument
from kvpool.protocol.records import messages as m
from kvpool.states import PEER, TokenRange
from kvpool_client.copying.cache import Cache
from kvpool_client.engines.connection_name import connection_name
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.lease_size import ASKED_MAX, CHUNKS_AT_ONCE, LeaseSize, chunks_at_once
from kvpool_client.engines.set_loads import PULLS_AT_ONCE
from kvpool_client.hint_envelope import Outcome
from kvpool_client.named_keys import Names
from kvpool_client.pool import Pool
from kvpool_client.sglang.host_pages import PoolPages
from kvpool_client.sglang.page_retention import hints_of, page_retention
from kvpool_client.sglang.settings import Settings
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.set_load import SetLoad

# As many as SGLang backs up at once; of large ones fewer.
SAVES_AT_ONCE = 128
# Pages of a request that a linker has leased at once: as many as one request may name.
LEASED_AT_ONCE = m.SET_KEYS_MAX
Levels = npt.NDArray[np.uint8]
DIGEST_BYTES = 32


class PartStore:
    """See the module. A namespace and a connection of its own."""

    def __init__(self, settings: Settings, pages: PoolPages, guard: FailureGuard) -> None:
        """Connects. Raises InvalidArgument, LayoutMismatch."""
        self._settings = settings
        self._pages = pages
        self._guard = guard
        self._cache = Cache(pages.parts, pages.layout, block_tokens=pages.page_tokens, form="packed")
        self._pool = Pool(
            settings.socket,
            model=settings.model,
            revision=settings.revision,
            layout=pages.layout,
            salt=settings.salt.encode(),
            timeout_s=settings.timeout_s,
            copy_threads=settings.copy_threads,
            name=connection_name("sglang", pages.layout.rank, pages.layout.world),
        )
        self._size = LeaseSize(self._pool, timeout_s=settings.timeout_s)
        self._saves_at_once = chunks_at_once(pages.layout, SAVES_AT_ONCE)
        self._is_closed = threading.Event()
        self._counts = {
            "loaded_pages": 0,
            "saved_pages": 0,
            "present_pages": 0,
            "declined_pages": 0,
            "clipped_pages": 0,
            "late_load_pages": 0,
            "late_save_pages": 0,
        }

    def __repr__(self) -> str:
        return f"<PartStore {self._pool!r} {self._cache!r}>"

    def count_present(self, keys: Sequence[str]) -> int:
        """How many leading pages the pool has. No request, but one for each CHUNKS_AT_ONCE where a shared store is asked."""
        try:
            return self._count_present(keys)
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_exists", error)
            return 0

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which pages the pool has, for host pools that need the last ones alone."""
        try:
            found: list[bool] = (self._pool.probe(_names(keys), asks_store=True, is_counted=True) > 0).tolist()
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_exists", error)
            return [False] * len(keys)
        return found

    def levels(self, keys: Sequence[str], *, is_counted: bool) -> Levels:
        """The level of each page. No request."""
        try:
            return self._pool.probe(_names(keys), is_counted=is_counted)
        except ENGINE_FAILURES as error:
            self._guard.miss("lookup", error)
            return np.zeros(len(keys), np.uint8)

    def lease_batches(self, keys: Sequence[str]) -> list[Lease]:
        """Leases on these pages, each for LEASED_AT_ONCE of them. Each waits for `scheduler_timeout_s` at most: a daemon that
        does not answer until then has the connection ended."""
        names = _names(keys)
        return [
            self._pool.acquire_set(names[first : first + LEASED_AT_ONCE], timeout_s=self._settings.scheduler_timeout_s)
            for first in range(0, len(keys), LEASED_AT_ONCE)
        ]

    def fetch_up(self, keys: Sequence[str]) -> None:
        """Have pages of lower tiers and other nodes brought to DRAM, as far as there is room. Waits for it, as long as a batch
        may take."""
        names, held, deadline = _names(keys), list[Lease](), Deadline(self._settings.batch_timeout_s)
        while len(names) and (not held or held[-1].held.all()) and not deadline.has_passed():
            asked, names = names[: self._size.count], names[self._size.count :]
            held.append(self._size.acquire_set(asked))
        _release_leases(held)

    def begin_load(self, lease: Lease, numbers: Sequence[int]) -> SetLoad:
        """A load of leased pages into those of the engine with these numbers, one for each page that was named, −1 to leave it
        out. It outlives the daemon."""
        self._counts["loaded_pages"] += sum(number >= 0 for number in numbers)
        return self._pool.load_set(lease, cache=self._cache, block_ids=numbers, may_outlive=True)

    @property
    def ready_at(self) -> tuple[int, ...]:
        """Of each layer of a load after which of the engine's it is read."""
        return self._pages.ready_at

    def load(self, keys: Sequence[str], host_indices: object) -> list[bool]:
        """Copy pages into host memory; which leading ones are in place and verified. The rest of the pages is undefined."""
        answer = [False] * len(keys)
        deadline = Deadline(self._settings.batch_timeout_s)
        try:
            numbers = self._pages.page_numbers(host_indices, len(keys))
            good = self._load_pages(keys, numbers, deadline)
            if good < len(keys) and deadline.has_passed():
                self._counts["late_load_pages"] += len(keys) - good
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_get", error)
            return answer
        self._counts["loaded_pages"] += good
        return [number < good for number in range(len(keys))]

    def save(self, keys: Sequence[str], host_indices: object, extra_info: object = None) -> list[bool]:
        """Store pages from host memory; which of them are in the pool now, or just being stored by another writer.

        `extra_info`: SGLang's; hints in it set the retention of pages.
        """
        answer = [False] * len(keys)
        deadline = Deadline(self._settings.batch_timeout_s)
        try:
            numbers = self._pages.page_numbers(host_indices, len(keys))
            names = _names(keys)
            retention = self._page_retention(extra_info, len(keys), self._pages.page_tokens)
            for first in reversed(range(0, len(keys), self._saves_at_once)):
                if deadline.has_passed():
                    self._counts["late_save_pages"] += min(first + self._saves_at_once, len(keys))
                    break
                asked = slice(first, first + self._saves_at_once)
                answer[asked] = self._save_pages(names[asked], numbers[asked], retention[asked])
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_set", error)
        return answer

    def stats(self) -> dict[str, int | float | str]:
        """Pages moved, those for which a batch's time was not enough, and the Pool's own counters."""
        return {**self._counts, **self._pool.stats()}

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._is_closed.set()
        self._pool.close()

    def _count_present(self, keys: Sequence[str]) -> int:
        names, present, levels = _names(keys), 0, b""
        while present < len(keys):
            asked = names[present : present + CHUNKS_AT_ONCE]
            found = self._pool.probe(asked, asks_store=True)
            leading = _leading(found > 0)
            levels += found[:leading].tobytes()
            present += leading
            if leading < len(asked):
                break
        self._pool.counters.count_lookup(min(present + 1, len(keys)), levels)
        return present

    def _load_pages(self, keys: Sequence[str], numbers: Sequence[int], deadline: Deadline) -> int:
        """Leading pages that are in place; after it has returned, nothing writes to a page."""
        names, good = _names(keys), 0
        held: list[Lease] = []
        try:
            leased, pulls = self._lease_pages(names, held, deadline)
            while leased and not deadline.has_passed():
                end = good + leased
                lease = held[-1]
                blocks = numbers[good : good + len(lease.held)]
                with self._pool.load_set(lease, cache=self._cache, block_ids=blocks) as load:
                    leased, pulls_ahead = (0, 0) if pulls else self._lease_leading(names[end:], held)
                    good += _leading(
                        np.array([state == "complete" for state in load.wait(deadline.remaining_s()).states])
                    )
                if good < end:
                    break
                if not leased:
                    leased, pulls_ahead = self._lease_pages(names[end:], held, deadline)
                pulls = pulls_ahead
                done = held[:-1] if leased else held
                if sum(one.chunks for one in done) >= 2 * self._size.count:
                    _release_leases(done)
                    del held[: len(done)]
        finally:
            _release_leases(held)
        return good

    def _lease_pages(self, names: Names, held: list[Lease], deadline: Deadline) -> tuple[int, int]:
        """The same. Where a lease left out the first page: again, a few pages, once those before have made room."""
        leased = pulls = 0
        for _ in range(ASKED_MAX):
            asked_before = len(held)
            leased, pulls = self._lease_leading(names, held)
            if leased or len(held) == asked_before or deadline.has_passed():
                break
            _release_leases(held)
            held.clear()
            if not self._size.levels_again(names[:1], deadline, self._is_closed).any():
                break
        return leased, pulls

    def _lease_leading(self, names: Names, held: list[Lease]) -> tuple[int, int]:
        """Lease leading pages, as many as may be leased at once: how many they are, and how many of them another node has."""
        levels = self._pool.probe(names[: self._size.count], asks_store=True)
        levels = levels[: _leading(levels > 0)]
        levels = levels[: _leading(np.cumsum(levels >= PEER) <= PULLS_AT_ONCE)]
        if not len(levels):
            return 0, 0
        lease = self._size.acquire_set(names[: len(levels)])
        held.append(lease)
        return _leading(lease.held), int(np.count_nonzero(levels >= PEER))

    def _page_retention(self, extra_info: object, pages: int, page_tokens: int) -> list[tuple[TokenRange, ...]]:
        hints = hints_of(extra_info)
        for entry in hints.actions if hints is not None else ():
            if isinstance(entry, Outcome):
                self._guard.miss("kv_hints", entry.reason)
        return page_retention(extra_info, hints, pages=pages, page_tokens=page_tokens, priority=self._settings.priority)

    def _save_pages(
        self, names: Names, numbers: Sequence[int], retention: Sequence[tuple[TokenRange, ...]]
    ) -> list[bool]:
        """One save of all these pages."""
        tokens = self._pages.page_tokens
        ranges = tuple(
            TokenRange(page * tokens, (page + 1) * tokens, one.priority, one.duration_s)
            for page, of_page in enumerate(retention)
            for one in of_page[:1]
        )
        with self._pool.save_set(names, retention=ranges, cache=self._cache, block_ids=numbers) as save:
            result = save.commit()
        self._counts["saved_pages"] += result.stored
        self._counts["present_pages"] += result.present
        self._counts["declined_pages"] += result.declined
        self._counts["clipped_pages"] += result.clipped
        return [result.reason_of(page) in ("", "pending") for page in range(len(names))]


def _names(keys: Sequence[str]) -> Names:
    """The digests of pages, uint8 [pages, 32]. Raises InvalidArgument."""
    digests = [bytes.fromhex(key) for key in keys]
    for key, digest in zip(keys, digests, strict=True):
        if len(digest) != DIGEST_BYTES:
            raise InvalidArgument(f"page key {key[:80]!r} is no SHA-256 in hexadecimal")
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(keys), DIGEST_BYTES)


def _leading(are_so: npt.NDArray[np.bool_]) -> int:
    """How many leading ones are so."""
    return len(are_so) if are_so.all() else int(are_so.argmin())


def _release_leases(leases: Sequence[Lease]) -> None:
    """What is released last counts as used last: eviction begins at the last page."""
    for lease in reversed(leases):
        lease.release()
