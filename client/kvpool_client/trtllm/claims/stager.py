"""Stager: copies what DRAM has of a prompt into the staging, with its checksums, for every rank.

A claim ends where every group of every shard can serve it: full groups have all chunks before that end, those with a window the
last ones. Without windows every end is one: a prompt is staged piece by piece, so that what is there when time runs out is a
claim. Where nothing of it can be staged, the hit that is left is tried.

The staging thread only, but for `close`. Copies per byte: one (arena to staging), by the Pools' native threads.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.layout import Layout
from kvpool.states import DRAM
from kvpool_client.copying.cache import SKIP_BLOCK, Cache
from kvpool_client.engines.connection_name import connection_name
from kvpool_client.key_chain import KeyChain
from kvpool_client.pool import Pool
from kvpool_client.trtllm.claims.claim import Claim
from kvpool_client.trtllm.claims.question import Question
from kvpool_client.trtllm.claims.slots import Slots
from kvpool_client.trtllm.claims.staging import staged_layers
from kvpool_client.trtllm.geometry import Geometry
from kvpool_client.trtllm.settings import Settings
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.results import Hit

# How many ends one lookup tries to stage, where a chunk was evicted in between or is wrong.
ENDS_TRIED_MAX = 3
# Of a shard: somewhat less than a millisecond of two threads that copy 5 GB/s, and several times a round trip (a guess).
PIECE_BYTES = 4 << 20
# One is copied while the next one is leased.
PIECES_AT_ONCE = 2


@dataclass(slots=True)
class _Piece:
    """Chunks that are staged together, on every shard. `good`: up to which chunk they may still be."""

    chunks: range
    good: int
    begun: list[tuple[Lease, Load | None]] = field(default_factory=list)

    def wait(self, deadline: Deadline) -> int:
        """The chunk up to which every shard has them, at the latest when the deadline has passed."""
        for _, load in self.begun:
            if load is not None:
                self.good = min(self.good, load.wait(deadline.remaining_s()).chunks)
        return max(self.good, self.chunks.start)

    def end_loads(self) -> None:
        """Stop copying and end the leases; after it has returned, nothing is copied."""
        for lease, load in self.begun:
            if load is not None:
                load.cancel()
            lease.release()


class Stager:
    """The scheduler's Pools, one for each shard, over the staging."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        *,
        memory: npt.NDArray[np.uint8],
        counts: tuple[int, ...],
        slots: Slots,
    ) -> None:
        """`memory`: the staging, uint8 [bytes]; `counts`: its slots of each layer group. Raises KVPoolError or OSError; then
        nothing is left open."""
        self._geometry = geometry
        self._slots = slots
        self._pools: list[Pool] = []
        self._caches: list[list[Cache]] = []
        self._promoted: list[tuple[Pool, Hit]] = []
        try:
            shards = geometry.shards(settings.ranks)
            for shard, layout in enumerate([geometry.layout(rank, settings.ranks) for rank in range(shards)]):
                pool = connect(settings, layout)
                self._pools.append(pool)
                staged = staged_layers(memory, geometry, shard, counts)
                block = geometry.tokens_per_block
                self._caches.append([pool.register(rows, block, "packed", group) for group, rows in enumerate(staged)])
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Stager {self._pools!r}>"

    def stage(self, question: Question) -> None:
        """Stage what DRAM has of the question's prompt, until its deadline; afterwards have what only a lower tier has
        promoted, for the next request."""
        if question.is_closed:
            return
        is_whole = False
        try:
            chains = [pool.keys(question.tokens, salt=question.salt, adapter=question.adapter) for pool in self._pools]
            is_whole = self._stage_prefix(question, chains)
        finally:
            question.end_staging(is_whole=is_whole)
            promoted, self._promoted = self._promoted, []
        for pool, hit in promoted:
            pool.acquire(hit).release()

    def close(self) -> None:
        """End the connections, and with them what waits for an answer. Any thread."""
        for pool in self._pools:
            pool.close()

    def _stage_prefix(self, question: Question, chains: Sequence[KeyChain]) -> bool:
        """Whether all that has a slot was staged, or there was time to find that there is nothing."""
        first, most = question.first_chunk, len(chains[0])
        for attempt in range(ENDS_TRIED_MAX):
            hits = self._hits(question, chains, range(first, most), is_counted=attempt == 0)
            if not hits:
                return not question.deadline.has_passed()
            most = hits[0].chunks
            good = self._stage_chunks(question, hits, range(first, most))
            if good != first:
                return good == most
        return False

    def _most_staged(self, first_chunk: int, chunks: int) -> int:
        """Up to which chunk there are slots; a group with a window needs no more than it covers."""
        for group, free in zip(self._geometry.groups, self._slots.free, strict=True):
            if group.is_full or free < group.run:
                chunks = min(chunks, first_chunk + free)
        return chunks

    def _hits(
        self, question: Question, chains: Sequence[KeyChain], wanted: range, *, is_counted: bool
    ) -> Sequence[Hit]:
        """The hits of the shards with one end, in DRAM and with slots; none where that would be no more than the engine has.

        A lower tier could take longer than anybody waits: a hit ends before a chunk that only it has, which is promoted
        afterwards. With windows it ends where they were stored for, before that chunk too: every later end needs it.
        """
        most = wanted.stop
        while most > wanted.start and not question.deadline.has_passed():
            hits = [
                pool.lookup(chain, chunks_max=most, is_counted=is_counted)
                for pool, chain in zip(self._pools, chains, strict=True)
            ]
            is_counted = False
            slower = [np.flatnonzero(hit.tiers > DRAM) for hit in hits]
            end = min(int(below[0]) if len(below) else hit.chunks for hit, below in zip(hits, slower, strict=True))
            most = min(end, self._most_staged(wanted.start, end))
            question.note_found(full_chunks=min(hit.full_chunks for hit in hits), is_unstaged=most < end)
            if most > wanted.start and all(hit.chunks == most for hit in hits):
                return hits
            if not self._promoted:
                self._promoted = [
                    (pool, hit) for pool, hit, below in zip(self._pools, hits, slower, strict=True) if len(below)
                ]
        return ()

    def _stage_chunks(self, question: Question, hits: Sequence[Hit], wanted: range) -> int:
        """Stage the wanted chunks. The chunk up to which that was done."""
        groups = self._geometry.groups
        counts = [len(wanted) if group.is_full else min(group.run, len(wanted)) for group in groups]
        claim = Claim(wanted.start, wanted.stop, self._slots.take_slots(counts))
        if not question.begin_staging(claim):
            self._slots.give_back_slots(claim.slots)
            return wanted.start
        try:
            return self._stage_claim(question, hits, claim)
        finally:
            self._slots.give_back_slots(question.take_rest().slots)

    def _stage_claim(self, question: Question, hits: Sequence[Hit], claim: Claim) -> int:
        """The chunk up to which every shard has the claim's in its slots; after it has returned, nothing is copied."""
        good, under_way = claim.first_chunk, deque[_Piece]()
        block_bytes = sum(group.chunk_bytes for group in self._geometry.groups)
        size = claim.chunks if self._geometry.has_windows else max(1, PIECE_BYTES // block_bytes)
        starts = iter(range(claim.first_chunk, claim.end, size))
        try:
            while True:
                while len(under_way) < PIECES_AT_ONCE and (start := next(starts, None)) is not None:
                    end = min(start + size, claim.end)
                    under_way.append(_Piece(range(start, end), end))
                    self._begin_piece(under_way[-1], hits, claim, question.deadline)
                if not under_way:
                    return good
                piece = under_way[0]
                good = piece.wait(question.deadline)
                piece.end_loads()
                under_way.popleft()
                if not question.note_staged(good) or good < piece.chunks.stop:
                    return good
        finally:
            for piece in under_way:
                piece.end_loads()

    def _begin_piece(self, piece: _Piece, hits: Sequence[Hit], claim: Claim, deadline: Deadline) -> None:
        """Lease a piece's chunks and begin to copy them, on every shard; nothing where one has none of them, or with windows
        not all: they serve their end alone."""
        start, end = piece.chunks.start, piece.chunks.stop
        for pool, caches, hit in zip(self._pools, self._caches, hits, strict=True):
            if piece.good <= start or deadline.has_passed():
                piece.good = start
                return
            lease = pool.acquire(_first(hit, end, pool.layout.chunk_tokens))
            piece.begun.append((lease, None))
            piece.good = min(piece.good, lease.chunks)
            if piece.good <= start or (self._geometry.has_windows and lease.chunks != end):
                piece.good = start
                return
            slots = self._slots_of(claim, lease, start)
            piece.begun[-1] = (lease, pool.load(lease, caches, slots, first_chunk=start))

    def _slots_of(self, claim: Claim, lease: Lease, first_chunk: int) -> list[tuple[int, ...]]:
        """The slot of each chunk that a load from a chunk on names: of others than full groups all that the lease has, of which
        the engine may have the first ones."""
        found = []
        for number, (group, chunks) in enumerate(zip(self._geometry.groups, lease.ranges, strict=True)):
            first, start = first_chunk if group.is_full else chunks.start, claim.start(number)
            skipped = (SKIP_BLOCK,) * max(0, start - first)
            found.append(skipped + claim.slots[number][max(0, first - start) : chunks.stop - start])
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
        name=connection_name("tensorrt-llm", layout.rank, layout.world),
    )


def _first(hit: Hit, chunks: int, chunk_tokens: int) -> Hit:
    if chunks == hit.chunks:
        return hit
    return replace(hit, chunks=chunks, tokens=chunks * chunk_tokens, levels=hit.levels[:chunks])
