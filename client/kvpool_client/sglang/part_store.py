"""Part store: finds, loads and saves one part of the pages of a host pool in kvpool, a batch at a time.

SGLang names a page by a hash over everything before it, so each page is a chunk at a root of its own: a batch may begin in
the middle of a prompt, and what precedes it need not be passed. (SGLang can pass those hashes, but 0.5.23 leaves out the last
node's where it prefetches.) Pages share round trips and copies: one request leases a batch and one native job loads it, two
requests save it. The order in which pages are saved and released keeps the first of a batch the most recently used, so that
eviction begins at its end.

Nothing here raises into SGLang: what fails is a miss, counted, logged once. Any thread; SGLang calls from its prefetch and
backup threads. Copies per byte: one, by the Pool's native threads.
"""

from collections.abc import Iterator, Sequence

from kvpool.clock import Deadline
from kvpool.errors import InvalidArgument
from kvpool.states import TokenRange
from kvpool_client.copying.cache import Cache
from kvpool_client.engines.connection_name import connection_name
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.hint_envelope import Outcome
from kvpool_client.key_chain import KeyChain
from kvpool_client.pool import Pool
from kvpool_client.sglang.host_pages import HostPages
from kvpool_client.sglang.page_retention import hints_of, page_retention
from kvpool_client.sglang.settings import Settings
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.results import Hit
from kvpool_client.verbs.save import Save

# Pages leased in one request, and loaded in one job; the next ones are leased while these are copied.
LOADS_AT_ONCE = 64
# Loaded pages whose leases are kept until all are released in order: as many as SGLang requests at once.
HELD_MAX = 128
# Of pages that other nodes have: each is pulled alone, and a daemon asks a node for so many without waiting.
PULLS_AT_ONCE = 12
# As many as a daemon's connection may have by default.
SAVES_AT_ONCE = 64
DIGEST_BYTES = 32


class PartStore:
    """See the module. A namespace and a connection of its own."""

    def __init__(self, settings: Settings, pages: HostPages, guard: FailureGuard) -> None:
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
        self._counts = {
            "loaded_pages": 0,
            "saved_pages": 0,
            "present_pages": 0,
            "declined_pages": 0,
            "clipped_pages": 0,
            "late_lookup_pages": 0,
            "late_load_pages": 0,
            "late_save_pages": 0,
        }

    def __repr__(self) -> str:
        return f"<PartStore {self._pool!r} {self._cache!r}>"

    def count_present(self, keys: Sequence[str]) -> int:
        """How many leading pages the pool has. No request, but one for each page that a shared store is asked for."""
        try:
            return self._count_present(keys)
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_exists", error)
            return 0

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which pages the pool has, for host pools that need the last ones alone: looked for from the last one on, within the
        time of a batch."""
        found = [False] * len(keys)
        deadline = Deadline(self._settings.batch_timeout_s)
        try:
            for number, chain in reversed(list(enumerate(self._chains(keys)))):
                if deadline.has_passed():
                    self._counts["late_lookup_pages"] += number + 1
                    break
                found[number] = bool(self._pool.lookup(chain))
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_exists", error)
            return [False] * len(keys)
        return found

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
            chains = list(self._chains(keys))
            retention = self._page_retention(extra_info, len(keys), self._pages.page_tokens)
            for first in reversed(range(0, len(keys), SAVES_AT_ONCE)):
                if deadline.has_passed():
                    self._counts["late_save_pages"] += min(first + SAVES_AT_ONCE, len(keys))
                    break
                asked = slice(first, first + SAVES_AT_ONCE)
                answer[asked] = self._save_pages(chains[asked], numbers[asked], retention[asked])
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_set", error)
        return answer

    def stats(self) -> dict[str, int | float | str]:
        """Pages moved, those for which a batch's time was not enough, and the Pool's own counters."""
        return {**self._counts, **self._pool.stats()}

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._pool.close()

    def _chains(self, keys: Sequence[str]) -> Iterator[KeyChain]:
        """A chain of one chunk for each page, made on demand."""
        for key in keys:
            digest = bytes.fromhex(key)
            if len(digest) != DIGEST_BYTES:
                raise InvalidArgument(f"page key {key[:80]!r} is no SHA-256 in hexadecimal")
            yield self._pool.keys_from_hashes([digest], block_tokens=self._pool.layout.chunk_tokens)

    def _count_present(self, keys: Sequence[str]) -> int:
        present = 0
        while present < len(keys):
            chains = list(self._chains(keys[present : present + LOADS_AT_ONCE]))
            here = len(self._pool.separate.lookup(chains))
            absent = (number for number in range(here, len(chains)) if not self._pool.lookup(chains[number]))
            found = next(absent, len(chains))
            present += found
            if found < len(chains):
                break
        return present

    def _load_pages(self, keys: Sequence[str], numbers: Sequence[int], deadline: Deadline) -> int:
        """Leading pages that are in place; after it has returned, nothing writes to a page."""
        good = 0
        held, pulls = self._lease_pages(keys)
        count = len(held)  # the last ones, which are to be copied
        try:
            while count and not deadline.has_passed():
                end = good + count
                blocks = [[number] for number in numbers[good:end]]
                with self._pool.separate.load(held[-count:], self._cache, blocks) as load:
                    following, pulls_ahead = ([], 0) if pulls else self._lease_pages(keys[end:])
                    held += following
                    good += load.wait(deadline.remaining_s()).chunks
                if good < end:
                    break
                if pulls:
                    following, pulls_ahead = self._lease_pages(keys[end:])
                    held += following
                count, pulls = len(following), pulls_ahead
                done = len(held) - count
                if done >= HELD_MAX:
                    self._release_leases(held[:done])
                    del held[:done]
        finally:
            self._release_leases(held)
        return good

    def _release_leases(self, leases: Sequence[Lease]) -> None:
        """What is released last counts as used last: eviction begins at the last page."""
        self._pool.separate.release(leases[::-1])

    def _lease_pages(self, keys: Sequence[str]) -> tuple[list[Lease], int]:
        """Leases on leading pages, as many as may be leased at once, and how many of them another node has."""
        hits: list[Hit] = []
        pulls = 0
        for hit in self._pool.separate.find_to_load(list(self._chains(keys[:LOADS_AT_ONCE]))):
            pulls += hit.chunks - hit.chunks_here
            if not hit or pulls > PULLS_AT_ONCE:
                break
            hits.append(hit)
        return self._pool.separate.acquire(hits), pulls

    def _page_retention(self, extra_info: object, pages: int, page_tokens: int) -> list[tuple[TokenRange, ...]]:
        hints = hints_of(extra_info)
        for entry in hints.actions if hints is not None else ():
            if isinstance(entry, Outcome):
                self._guard.miss("kv_hints", entry.reason)
        return page_retention(extra_info, hints, pages=pages, page_tokens=page_tokens, priority=self._settings.priority)

    def _save_pages(
        self,
        chains: Sequence[KeyChain],
        numbers: Sequence[int],
        retention: Sequence[tuple[TokenRange, ...]],
    ) -> list[bool]:
        """One save for each page, all copying at once; committed from the last page to the first."""
        saves: list[Save] = []
        try:
            saves = self._pool.separate.save(chains, self._cache, [[number] for number in numbers], retention)
            results = self._pool.separate.publish(saves[::-1])
        finally:
            for save in saves:
                save.abort()
        for result in results:
            self._counts["saved_pages"] += result.stored
            self._counts["present_pages"] += result.present
            self._counts["declined_pages"] += result.declined
            self._counts["clipped_pages"] += result.clipped
        return [not result.declined or "pending" in result.reasons for result in reversed(results)]
