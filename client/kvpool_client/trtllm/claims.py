"""Claims: chunks that may be promised to TensorRT-LLM, because they are leased, copied out of the pool and verified before.

The runtime has no way to report a failed load, so a chunk is claimed only when every rank's bytes of it are verified in the
connector's own memory: leased from DRAM, copied into staging with its checksums, and the lease released. The daemon is not
needed afterwards. The price is one more copy in host memory.

    FREE ──claim──► STAGED ──ordered──► ORDERED ──every rank done──► FREE
                       └──given up─────────────────────────────────► FREE

Invariant: a slot is in exactly one of those states; the ranks write no slot, and this class none that is ordered.
The executor's thread only. Copies per byte: one (arena to staging), by the Pools' native threads.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.layout import Layout
from kvpool.types import Level
from kvpool_client.copying.cache import SKIP_BLOCK, Cache
from kvpool_client.engines.shared_bytes import SharedBytes
from kvpool_client.lease import Lease
from kvpool_client.load import Load
from kvpool_client.pool import Pool
from kvpool_client.results import Hit
from kvpool_client.trtllm.plan import Geometry
from kvpool_client.trtllm.settings import Settings


@dataclass(frozen=True, slots=True)
class Claim:
    """Staged chunks of one prompt, from `first_chunk` on."""

    first_chunk: int
    slots: tuple[int, ...]


NO_CLAIM = Claim(0, ())


class Claims:
    """The scheduler's Pools, one for each shard, and the staging memory."""

    def __init__(self, settings: Settings, geometry: Geometry) -> None:
        """Raises KVPoolError or OSError; then nothing is left open."""
        self._settings = settings
        self.shards = geometry.shards(settings.ranks)
        layouts = [geometry.layout(rank, settings.ranks) for rank in range(self.shards)]
        self._chunk_bytes = layouts[0].chunk_bytes
        slots = max(1, settings.staging_bytes // (self.shards * self._chunk_bytes))
        self.memory = SharedBytes.create("kvpool-staging", self.shards * slots * self._chunk_bytes)
        self._free = list(range(slots))
        self._ordered: deque[tuple[int, tuple[int, ...]]] = deque()
        self._last_sequence = 0
        self._pools: list[Pool] = []
        self._caches: list[Cache] = []
        try:
            for shard, layout in enumerate(layouts):
                self._pools.append(connect(settings, layout))
                staged = staged_layers(self.memory.view, geometry, shard, slots)
                self._caches.append(self._pools[-1].register(staged, geometry.tokens_per_block, "packed"))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Claims {self.shards} shards, {len(self._free)} slots free, {len(self._ordered)} orders under way>"

    @property
    def slots_free(self) -> int:
        """Slots that a claim may take."""
        return len(self._free)

    def claim(self, tokens: npt.NDArray[np.int32], salt: bytes | None, adapter: str, first_chunk: int) -> Claim:
        """Stage what DRAM has of the prompt from `first_chunk` on, on every rank.

        Waits at most `claim_timeout_s` and one round trip.
        """
        deadline = Deadline(self._settings.claim_timeout_s)
        hits = [self._hit(pool, tokens, salt, adapter) for pool in self._pools]
        chunks = min(min(hit.chunks for hit in hits), first_chunk + len(self._free))
        if chunks <= first_chunk:
            return NO_CLAIM
        slots = [self._free.pop() for _ in range(chunks - first_chunk)]
        good = 0
        try:
            good = max(first_chunk, self._stage(hits, slots, range(first_chunk, chunks), deadline)) - first_chunk
        finally:
            self._free.extend(slots[good:])
        return Claim(first_chunk, tuple(slots[:good])) if good else NO_CLAIM

    def give_up(self, claim: Claim) -> None:
        """Give up a claim, or a part of one, that will not be ordered."""
        self._free.extend(claim.slots)

    def order(self, claim: Claim) -> int:
        """The sequence number of the order that carries this claim out."""
        self._last_sequence += 1
        self._ordered.append((self._last_sequence, claim.slots))
        return self._last_sequence

    def reclaim(self, done: int) -> None:
        """Free the slots of every order up to `done`."""
        while self._ordered and self._ordered[0][0] <= done:
            self._free.extend(self._ordered.popleft()[1])

    def close(self) -> None:
        """End the connections."""
        for pool in self._pools:
            pool.close()
        self.memory.close()

    def _hit(self, pool: Pool, tokens: npt.NDArray[np.int32], salt: bytes | None, adapter: str) -> Hit:
        """The hit in DRAM. A lower tier could keep the executor waiting: what only it has is promoted for the next request."""
        hit = pool.lookup(pool.keys(tokens, salt=salt, adapter=adapter))
        slower = np.flatnonzero(hit.tiers > Level.DRAM)
        if not len(slower):
            return hit
        pool.acquire(hit).release()
        return _first(hit, int(slower[0]), pool.layout.chunk_tokens)

    def _stage(self, hits: list[Hit], slots: list[int], wanted: range, deadline: Deadline) -> int:
        """Chunks up to which every shard has the wanted ones in its slots; after it has returned, nothing is copied."""
        first_chunk, chunks = wanted.start, wanted.stop
        loads: list[tuple[Lease, Load | None]] = []
        good = chunks
        try:
            for pool, cache, hit in zip(self._pools, self._caches, hits, strict=True):
                lease = pool.acquire(_first(hit, chunks, pool.layout.chunk_tokens))
                loads.append((lease, None))
                good = min(good, lease.chunks)
                if good <= first_chunk or deadline.has_passed():
                    return 0
                ids = [*slots[: lease.chunks - first_chunk], *[SKIP_BLOCK] * (lease.chunks - chunks)]
                loads[-1] = (lease, pool.load(lease, cache, ids, first_chunk=first_chunk))
            for _, load in loads:
                if load is not None:
                    good = min(good, load.wait(deadline.remaining_s()).chunks)
            return good
        finally:
            for lease, load in loads:
                if load is not None:
                    load.cancel()
                lease.release()


def connect(settings: Settings, layout: Layout) -> Pool:
    """A Pool for one shard. Raises InvalidArgument, LayoutMismatch."""
    return Pool(
        settings.socket,
        model=settings.model,
        revision=settings.revision,
        layout=layout,
        salt=settings.salt.encode(),
        timeout_s=settings.timeout_s,
        copy_threads=settings.copy_threads,
    )


def staged_layers(
    memory: npt.NDArray[np.uint8], geometry: Geometry, shard: int, slots: int
) -> list[npt.NDArray[np.uint8]]:
    """One shard's slots, layer by layer: uint8 [slots, layer_bytes] each."""
    whole = memory.reshape(-1, slots, geometry.layers, geometry.layer_bytes)[shard]
    return [whole[:, layer] for layer in range(geometry.layers)]


def _first(hit: Hit, chunks: int, chunk_tokens: int) -> Hit:
    return replace(hit, chunks=chunks, tokens=chunks * chunk_tokens, tiers=hit.tiers[:chunks])
