"""Hit finder: what of a prompt is worth loading, and whether to wait for chunks that are just being saved.

A hit of an engine of one full part may be cut anywhere, also inside its last chunk. Of others it has an end that windows were
stored for: it is loaded whole or not at all. The scheduler's thread.
"""

from kvpool.clock import Clock, Deadline
from kvpool_client.connection.peer_pace import PeerPace
from kvpool_client.engines.load_cost import RateEstimator, wait_limit_s
from kvpool_client.pool import Pool
from kvpool_client.verbs.results import Hit
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.scheduler.offers import Offers
from kvpool_client.vllm.scheduler.requests import Tracked
from kvpool_client.vllm.settings import Settings
from kvpool_client.vllm.statistics import Tally, by_level


class HitFinder:
    """See the module. `rates`: measured by others."""

    def __init__(
        self,
        pool: Pool,
        geometry: Geometry,
        *,
        settings: Settings,
        rates: RateEstimator,
        offers: Offers,
        tally: Tally,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._geometry = geometry
        self._settings = settings
        self._rates = rates
        self._offers = offers
        self._tally = tally
        self._clock = clock

    def goes_on_waiting(self, entry: Tracked, held_tokens: int) -> bool:
        """Whether the chunks that a request waits for are still being saved: looking it up again would find nothing else."""
        if not entry.awaited or entry.awaited_behind != held_tokens or entry.save_wait is None:
            return False
        return not entry.save_wait.has_passed() and self._are_being_saved(entry, *entry.awaited)

    def find(self, entry: Tracked, held_tokens: int, usable: int) -> Hit | None:
        """The hit to load; None while it is better to wait for chunks that are just being saved.

        Only for what would bring more than the `held_tokens` that vLLM has itself: what it holds this engine may be saving.
        """
        size = self._geometry.chunk_tokens
        wanted = min(-(-usable // size), self._pool.chunks_max)  # no lease has more
        hit = self._look_up(entry, wanted)
        chunks = min(hit.chunks, wanted)
        self._tally.count("lookups")
        first = held_tokens // size
        next_chunk = max(chunks, first)  # the first one that would bring more; vLLM may hold a part of it
        if next_chunk < min(wanted, len(entry.keys)):
            missing_tokens = usable - max(chunks * size, held_tokens)
            if self._is_worth_waiting(entry, chunks, next_chunk, missing_tokens=missing_tokens):
                entry.awaited_behind = held_tokens
                return None
        entry.chunks_planned = hit.chunks_here  # what is computed of the others is saved
        offered = hit.levels[first:chunks]
        taken = len(offered) if self._settings.always_load else self._chunks_to_load(offered, hit.peer_pace)
        left_out = offered[taken:]
        entry.declined = dict(by_level("declined_tokens_slower_than_computing", left_out, size)) if left_out else {}
        chunks = first + taken if taken else 0
        if chunks == hit.chunks and hit.tokens <= usable:
            return hit
        return Hit(chunks, min(chunks * size, usable), hit.levels[:chunks], hit.keys, hit.peer_pace, hit.owner)

    def _look_up(self, entry: Tracked, wanted: int) -> Hit:
        if self._geometry.may_cut_hits:
            return self._pool.lookup(entry.keys, entry.hints.owner)
        hit = self._pool.lookup(entry.keys, chunks_max=min(wanted, len(entry.keys)))
        if hit.full_chunks > hit.chunks:
            entry.boundaries.add(hit.full_chunks)  # others have gone that way: with the windows there it is a hit
            entry.shared = hit.full_chunks
        return hit

    def _chunks_to_load(self, levels: bytes, peer_pace: PeerPace | None) -> int:
        layout = self._geometry.layout
        return self._rates.plan_load(
            levels,
            chunk_bytes=self._geometry.chunk_bytes,
            chunk_tokens=layout.chunk_tokens,
            now_ns=self._clock.now_ns(),
            peer_pace=peer_pace,
            may_cut=self._geometry.may_cut_hits,
        )

    def _is_worth_waiting(self, entry: Tracked, chunks: int, next_chunk: int, *, missing_tokens: int) -> bool:
        """Whether to wait for `next_chunk`, behind a hit of `chunks` and what vLLM holds. A hit ends before a gap, so the chunk
        behind it has to come too."""
        is_expected = entry.hints.load == "wait" and self._pool.connected
        are_under_way = not self._offers.are_declined and self._are_being_saved(entry, next_chunk, chunks)
        entry.awaited = (chunks, next_chunk) if are_under_way else ()
        if self._offers.are_declined or not (is_expected or are_under_way):
            return False
        if entry.save_wait is None:
            limit_s = self._settings.wait_s / 2
            if not (is_expected or self._settings.always_load):
                limit_s = wait_limit_s(missing_tokens, rates=self._rates.rates(), longest_s=limit_s)
            entry.save_wait = Deadline(limit_s, self._clock)
            self._tally.count("waits_for_another_save")
        return not entry.save_wait.has_passed()

    def _are_being_saved(self, entry: Tracked, *chunks: int) -> bool:
        return all(self._pool.is_being_saved(entry.keys, chunk) for chunk in dict.fromkeys(chunks))
