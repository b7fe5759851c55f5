"""Page store: finds, loads and saves SGLang's host pages in the pool, a batch at a time.

SGLang names a page by a hash over everything before it, so each page is a chunk at a root of its own: a batch may begin in
the middle of a prompt, and what precedes it need not be passed. (SGLang can pass those hashes, but 0.5.23 leaves out the last
node's where it prefetches.) Pages share round trips: one leases a batch, two save it. The order in which pages are taken keeps
the first of a batch the most recently used, so that eviction begins at its end.

Nothing here raises into SGLang: what fails is a miss, counted, logged once. Any thread; SGLang calls from its prefetch and
backup threads. Copies per byte: one, by the Pool's native threads.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvpool.clock import Deadline
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.protocol.blocking import BlockingConnection
from kvpool.types import TokenRange
from kvpool_client.copying.cache import Cache
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.refusals import Refusals
from kvpool_client.hints.envelope import Outcome
from kvpool_client.key_chain import KeyChain
from kvpool_client.lease import Lease
from kvpool_client.load import Load
from kvpool_client.pool import Pool
from kvpool_client.results import Hit
from kvpool_client.save import Save
from kvpool_client.sglang.host_pages import HostPages, Shard, describe_host_pool
from kvpool_client.sglang.page_retention import hints_of, page_retention
from kvpool_client.sglang.settings import Settings

# Pages under way at once. Loads: as many as SGLang requests at once. Saves: as many as a daemon's connection may have by
# default.
LOADS_AT_ONCE = 128
# Of pages that other nodes have: each is pulled alone, and a daemon asks a node for so many without waiting.
PULLS_AT_ONCE = 12
SAVES_AT_ONCE = 64
DIGEST_BYTES = 32

_log = logging.getLogger(__name__)


class PageStore:
    """One rank's pages. Until `register` has accepted a host pool, everything is a miss."""

    def __init__(self, settings: Settings, shard: Shard, refusal: str = "") -> None:
        """`refusal`: why nothing may be stored for this engine; empty where it may."""
        self._settings = settings
        self._refusal = refusal
        self._refusals = Refusals("sglang")
        self._shard = shard
        self._guard = FailureGuard(_log)
        self._host_pool: Any = None  # keeps the host memory alive
        self._pages: HostPages | None = None
        self._pool: Pool | None = None
        self._cache: Cache | None = None
        self._counts = {
            "loaded_pages": 0,
            "saved_pages": 0,
            "present_pages": 0,
            "declined_pages": 0,
            "clipped_pages": 0,
        }

    def __repr__(self) -> str:
        return f"<PageStore {self._pool!r} {self._cache!r}>"

    @property
    def model(self) -> str:
        """The model's name in the daemon's pool."""
        return self._settings.identity

    @property
    def is_ready(self) -> bool:
        """Whether a host pool was accepted."""
        return self._pool is not None

    def register(self, host_pool: Any) -> None:
        """Take SGLang's host pool and connect. With a pool that cannot be described, everything stays a miss."""
        if self._refusal:
            self._guard.warn_once(f"kvpool shares nothing with this engine: {self._refusal}")
            return
        try:
            pages = describe_host_pool(host_pool, self._shard)
            cache = Cache(pages.parts, pages.layout, block_tokens=pages.page_tokens, form="packed")
            pool = Pool(
                self._settings.socket,
                model=self._settings.model,
                revision=self._settings.revision,
                layout=pages.layout,
                salt=self._settings.salt.encode(),
                timeout_s=self._settings.timeout_s,
                copy_threads=self._settings.copy_threads,
            )
        except ENGINE_FAILURES as error:
            self._refusal = f"layout: {error}"
            self._guard.miss("register", f"kvpool shares nothing with this engine: {error}")
            return
        self.close()
        self._host_pool, self._pages, self._cache, self._pool = host_pool, pages, cache, pool

    def count_present(self, keys: Sequence[str]) -> int:
        """How many leading pages the pool has. No request, but one for each page that a shared store is asked for."""
        if self._pool is None:
            self._count_refused(len(keys))
            return 0
        try:
            return self._present(self._pool, self._chains(self._pool, keys), len(keys))
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_exists", error)
            return 0

    def load(self, keys: Sequence[str], host_indices: object) -> list[bool]:
        """Copy pages into host memory; which leading ones are in place and verified. The rest of the pages is undefined."""
        answer = [False] * len(keys)
        if self._pool is None or self._pages is None:
            return answer
        deadline = Deadline(self._settings.batch_timeout_s)
        try:
            numbers = self._pages.page_numbers(host_indices, len(keys))
            chains = list(self._chains(self._pool, keys))
            good = 0
            while good < len(keys) and not deadline.has_passed():
                asked = slice(good, good + LOADS_AT_ONCE)
                hits = self._hits(self._pool, chains[asked])
                got = self._load_some(self._pool, hits, numbers[asked], deadline)
                good += got
                if got < len(hits) or not hits:
                    break
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_get", error)
            return answer
        self._counts["loaded_pages"] += good
        return [number < good for number in range(len(keys))]

    def save(self, keys: Sequence[str], host_indices: object, extra_info: object = None) -> list[bool]:
        """Store pages from host memory; which of them are in the pool now, or just being stored by another writer.

        `extra_info`: SGLang's; hints in it set the retention of pages.
        """
        if not self._shard.is_writer:
            return [True] * len(keys)
        answer = [False] * len(keys)
        if self._pool is None or self._pages is None:
            self._count_refused(len(keys))
            return answer
        deadline = Deadline(self._settings.batch_timeout_s)
        try:
            numbers = self._pages.page_numbers(host_indices, len(keys))
            chains = list(self._chains(self._pool, keys))
            retention = self._page_retention(extra_info, len(keys), self._pages.page_tokens)
            for first in reversed(range(0, len(keys), SAVES_AT_ONCE)):
                if deadline.has_passed():
                    break
                asked = slice(first, first + SAVES_AT_ONCE)
                answer[asked] = self._save_some(self._pool, chains[asked], numbers[asked], retention[asked])
        except ENGINE_FAILURES as error:
            self._guard.miss("batch_set", error)
        return answer

    def clear(self) -> bool:
        """Drop every chunk of this model, all ranks' and all engines', as SGLang's own backends do."""
        try:
            with BlockingConnection.admin(self._settings.socket, self._settings.timeout_s) as connection:
                connection.flush(self._settings.identity, None)
        except (KVPoolError, OSError) as error:
            self._guard.miss("clear", error)
            return False
        return True

    def stats(self) -> dict[str, int | float | str]:
        """Pages moved and refused, failures by call, and the Pool's own counters."""
        pool = self._pool.stats() if self._pool is not None else {}
        return {**self._counts, **self._refusals.counts(), **self._guard.counts(), **pool}

    def close(self) -> None:
        """End the connection. Idempotent; everything is a miss afterwards."""
        pool, self._pool, self._cache = self._pool, None, None
        if pool is not None:
            pool.close()

    def refuse(self, call: str, refusal: str, pages: int) -> None:
        """`call` is answered by a miss because of `refusal`, which names its remedy."""
        self._refusals.count(refusal, pages)
        self._guard.miss(call, refusal)

    def _count_refused(self, pages: int) -> None:
        if self._refusal:
            self._refusals.count(self._refusal, pages)

    def _chains(self, pool: Pool, keys: Sequence[str]) -> Iterator[KeyChain]:
        """A chain of one chunk for each page, made on demand."""
        for key in keys:
            digest = bytes.fromhex(key)
            if len(digest) != DIGEST_BYTES:
                raise InvalidArgument(f"page key {key[:80]!r} is no SHA-256 in hexadecimal")
            yield pool.keys_from_hashes([digest], block_tokens=pool.layout.chunk_tokens)

    def _present(self, pool: Pool, chains: Iterable[KeyChain], count: int) -> int:
        """How many of `count` chains lead a run of present ones."""
        return next((number for number, chain in enumerate(chains) if not pool.lookup(chain)), count)

    def _hits(self, pool: Pool, chains: Sequence[KeyChain]) -> list[Hit]:
        """The hits of leading pages, as many as may be loaded at once."""
        hits: list[Hit] = []
        pulls = 0
        for chain in chains:
            hit = pool.lookup(chain)
            pulls += hit.chunks - hit.chunks_here
            if not hit or pulls > PULLS_AT_ONCE:
                break
            hits.append(hit)
        return hits

    def _load_some(self, pool: Pool, hits: Sequence[Hit], numbers: Sequence[int], deadline: Deadline) -> int:
        """Leading pages that are in place; after it has returned, nothing writes to a page."""
        leases: list[Lease] = []
        loads: list[Load] = []
        good = 0
        try:
            leases = pool.separate.acquire(hits[::-1])[::-1]
            for lease, number in zip(leases, numbers, strict=False):
                loads.append(pool.load(lease, self._cache, [number] * lease.chunks))
            for load in loads:
                if load.wait(deadline.remaining_s()).chunks != 1:
                    break
                good += 1
        finally:
            for load in loads:
                load.cancel()
                load.wait()
            pool.separate.release(leases)
        return good

    def _page_retention(self, extra_info: object, pages: int, page_tokens: int) -> list[tuple[TokenRange, ...]]:
        hints = hints_of(extra_info)
        for entry in hints.actions if hints is not None else ():
            if isinstance(entry, Outcome):
                self._guard.miss("kv_hints", entry.reason)
        return page_retention(extra_info, hints, pages=pages, page_tokens=page_tokens, priority=self._settings.priority)

    def _save_some(
        self,
        pool: Pool,
        chains: Sequence[KeyChain],
        numbers: Sequence[int],
        retention: Sequence[tuple[TokenRange, ...]],
    ) -> list[bool]:
        """One save for each page, all copying at once; committed from the last page to the first."""
        assert self._cache is not None
        saves: list[Save] = []
        try:
            saves = pool.separate.save(chains, self._cache, [[number] for number in numbers], retention)
            results = pool.separate.publish(saves[::-1])
        finally:
            for save in saves:
                save.abort()
        for result in results:
            self._counts["saved_pages"] += result.stored
            self._counts["present_pages"] += result.present
            self._counts["declined_pages"] += result.declined
            self._counts["clipped_pages"] += result.clipped
        return [not result.declined or "pending" in result.reasons for result in reversed(results)]
