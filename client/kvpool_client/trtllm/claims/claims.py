"""Claims: chunks that may be promised to TensorRT-LLM, because they are leased, copied out of the pool and verified before.

The runtime has no way to report a failed load, so a chunk is claimed only when every rank's bytes of it are verified in the
connector's own memory: leased from DRAM, copied into staging with its checksums, and the lease released. The daemon is not
needed afterwards. The price is one more copy in host memory.

    FREE ──claim──► STAGED ──ordered──► ORDERED ──every rank done──► FREE
                       └──given up─────────────────────────────────► FREE

With layer groups a claim ends where every group of every shard can serve it: full groups have all chunks before that end, those
with a window the last ones. Where that cannot be staged, an earlier end is tried.

Invariant: a slot is in exactly one of those states; the ranks write no slot, and this class none that is ordered.
The executor's thread only. Copies per byte: one (arena to staging), by the Pools' native threads.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.layout import Layout
from kvpool.types import Level
from kvpool_client.copying.cache import SKIP_BLOCK, Cache
from kvpool_client.engines.shared_bytes import SharedBytes
from kvpool_client.grouped.leases import GroupLease
from kvpool_client.grouped.load import GroupLoad
from kvpool_client.grouped.lookups import GroupHit
from kvpool_client.key_chain import KeyChain
from kvpool_client.lease import Lease
from kvpool_client.load import Load
from kvpool_client.pool import Pool
from kvpool_client.results import Hit
from kvpool_client.trtllm.claims.claim import NO_CLAIM, Claim
from kvpool_client.trtllm.claims.staging import shard_bytes_of, staged_layers, staging_slots
from kvpool_client.trtllm.geometry import Geometry
from kvpool_client.trtllm.plan import ByGroup
from kvpool_client.trtllm.settings import Settings

# How many ends one lookup tries to stage, where a chunk was evicted in between or is wrong.
ENDS_TRIED_MAX = 3


class Claims:
    """The scheduler's Pools, one for each shard, and the staging memory. `slots`: of each layer group."""

    def __init__(self, settings: Settings, geometry: Geometry) -> None:
        """Raises KVPoolError or OSError; then nothing is left open."""
        self._settings = settings
        self._geometry = geometry
        self.shards = geometry.shards(settings.ranks)
        layouts = [geometry.layout(rank, settings.ranks) for rank in range(self.shards)]
        self.slots = staging_slots(geometry, settings.staging_bytes // self.shards)
        self.memory = SharedBytes.create("kvpool-staging", self.shards * shard_bytes_of(geometry, self.slots))
        self._free = [list(range(count)) for count in self.slots]
        self._ordered: deque[tuple[int, ByGroup]] = deque()
        self._last_sequence = 0
        self._pools: list[Pool] = []
        self._caches: list[list[Cache]] = []
        try:
            for shard, layout in enumerate(layouts):
                pool = connect(settings, layout)
                self._pools.append(pool)
                staged = staged_layers(self.memory.view, geometry, shard, self.slots)
                block = geometry.tokens_per_block
                self._caches.append([pool.register(rows, block, "packed", group) for group, rows in enumerate(staged)])
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Claims {self.shards} shards, {self.slots_free} slots free, {len(self._ordered)} orders under way>"

    @property
    def slots_free(self) -> int:
        """Slots that a claim may take, of the layer group that has the fewest."""
        return min(len(free) for free in self._free)

    def claim(
        self, tokens: npt.NDArray[np.int32], salt: bytes | None, adapter: str, first_chunk: int
    ) -> tuple[Claim, int]:
        """Stage what DRAM has of the prompt from `first_chunk` on, on every rank. The claim, and the chunk up to which full
        groups have more, 0 where they do not: with windows stored there it would be a hit.

        Waits at most `claim_timeout_s` and one round trip.
        """
        deadline = Deadline(self._settings.claim_timeout_s)
        chains = [pool.keys(tokens, salt=salt, adapter=adapter) for pool in self._pools]
        most = self._most_staged(first_chunk, len(chains[0]))
        if not self._geometry.has_groups:
            plain = [self._hit(pool, chain) for pool, chain in zip(self._pools, chains, strict=True)]
            return self._staged(plain, range(first_chunk, min(most, *(hit.chunks for hit in plain))), deadline), 0
        claim, junction = NO_CLAIM, 0
        for _ in range(ENDS_TRIED_MAX):
            hits, full_chunks = self._group_hits(chains, range(first_chunk, most), deadline)
            junction = max(junction, full_chunks)
            if not hits:
                break
            most = hits[0].chunks
            claim = self._staged(hits, range(first_chunk, most), deadline)
            if claim.chunks:
                break
        return claim, junction if junction > claim.end else 0

    def give_up(self, claim: Claim) -> None:
        """Give up a claim, or a part of one, that will not be ordered."""
        self._release(claim.slots)

    def order(self, claim: Claim) -> int:
        """The sequence number of the order that carries this claim out."""
        self._last_sequence += 1
        self._ordered.append((self._last_sequence, claim.slots))
        return self._last_sequence

    def reclaim(self, done: int) -> None:
        """Free the slots of every order up to `done`."""
        while self._ordered and self._ordered[0][0] <= done:
            self._release(self._ordered.popleft()[1])

    def close(self) -> None:
        """End the connections."""
        for pool in self._pools:
            pool.close()
        self.memory.close()

    def _release(self, slots: ByGroup) -> None:
        for free, of_group in zip(self._free, slots, strict=False):  # no claim has no groups
            free.extend(of_group)

    def _most_staged(self, first_chunk: int, chunks: int) -> int:
        """Up to which chunk there are slots; a group with a window needs no more than it covers."""
        for group, free in zip(self._geometry.groups, self._free, strict=True):
            if group.is_full or len(free) < group.run:
                chunks = min(chunks, first_chunk + len(free))
        return chunks

    def _hit(self, pool: Pool, keys: KeyChain) -> Hit:
        """The hit in DRAM. A lower tier could keep the executor waiting: what only it has is promoted for the next request."""
        hit = pool.lookup(keys)
        slower = np.flatnonzero(hit.tiers > Level.DRAM)
        if not len(slower):
            return hit
        pool.acquire(hit).release()
        return _first(hit, int(slower[0]), pool.layout.chunk_tokens)

    def _group_hits(
        self, chains: Sequence[KeyChain], wanted: range, deadline: Deadline
    ) -> tuple[Sequence[GroupHit], int]:
        """The hits of the shards with one end, in DRAM; none where that would be no more than the engine has. And up to which
        chunk full groups reach.

        A chunk in a lower tier is needed by every end behind it that this search comes to: it goes on before that chunk.
        """
        most, full_chunks, is_promoted = wanted.stop, 0, False
        while most > wanted.start and not deadline.has_passed():
            hits = [pool.groups.lookup(chain, most) for pool, chain in zip(self._pools, chains, strict=True)]
            full_chunks = max(full_chunks, min(hit.full_chunks for hit in hits))
            slower = [np.flatnonzero(hit.tiers > Level.DRAM) for hit in hits]
            ends = [int(below[0]) if len(below) else hit.chunks for hit, below in zip(hits, slower, strict=True)]
            if min(ends) > wanted.start and all(hit.chunks == min(ends) for hit in hits):
                return hits, full_chunks
            if not is_promoted:
                for pool, hit, below in zip(self._pools, hits, slower, strict=True):
                    if len(below):
                        is_promoted = True
                        pool.acquire(hit).release()
            most = min(ends)
        return (), full_chunks

    def _staged(self, hits: Sequence[Hit], wanted: range, deadline: Deadline) -> Claim:
        """A claim of the wanted chunks, as far as they could be staged."""
        if not wanted:
            return NO_CLAIM
        groups = self._geometry.groups
        counts = [len(wanted) if group.is_full else min(group.run, len(wanted)) for group in groups]
        slots = tuple(tuple(free.pop() for _ in range(count)) for free, count in zip(self._free, counts, strict=True))
        claim, end = Claim(wanted.start, wanted.stop, slots), wanted.start
        try:
            end = max(end, self._stage(hits, claim, deadline))
        finally:
            good, rest = claim.split(end)
            self._release(rest.slots)
        return good if good.chunks else NO_CLAIM

    def _stage(self, hits: Sequence[Hit], claim: Claim, deadline: Deadline) -> int:
        """The chunk up to which every shard has the claim's in its slots; after it has returned, nothing is copied."""
        begun: list[tuple[Lease, Load | GroupLoad | None]] = []
        good = claim.end
        try:
            for pool, caches, hit in zip(self._pools, self._caches, hits, strict=True):
                lease = pool.acquire(_first(hit, claim.end, pool.layout.chunk_tokens))
                begun.append((lease, None))
                good = min(good, lease.chunks)
                if good <= claim.first_chunk or deadline.has_passed():
                    return 0
                if isinstance(lease, GroupLease):
                    if lease.chunks != claim.end:
                        return 0
                    ids = self._slots_by_range(claim, lease)
                    begun[-1] = (lease, pool.groups.load(lease, caches, ids, first_chunk=claim.first_chunk))
                    continue
                slots = claim.slots[0][: lease.chunks - claim.first_chunk]
                rest = [SKIP_BLOCK] * (lease.chunks - claim.end)
                begun[-1] = (lease, pool.load(lease, caches[0], [*slots, *rest], first_chunk=claim.first_chunk))
            for _, load in begun:
                if load is not None:
                    good = min(good, load.wait(deadline.remaining_s()).chunks)
            return good
        finally:
            for lease, load in begun:
                if load is not None:
                    load.cancel()
                lease.release()

    def _slots_by_range(self, claim: Claim, lease: GroupLease) -> list[list[int]]:
        """The slot of each chunk that a load names: of full groups those of the claim, of others all that the lease has."""
        found = []
        for group, chunks in enumerate(lease.ranges):
            slots, start = claim.slots[group], claim.start(group)
            first = claim.first_chunk if self._geometry.groups[group].is_full else chunks.start
            found.append([slots[at - start] if at >= start else SKIP_BLOCK for at in range(first, chunks.stop)])
        return found


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


def _first(hit: Hit, chunks: int, chunk_tokens: int) -> Hit:
    if chunks == hit.chunks:
        return hit
    return replace(hit, chunks=chunks, tokens=chunks * chunk_tokens, tiers=hit.tiers[:chunks])
