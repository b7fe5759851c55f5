"""Save planner: the chunks that a step completes and that may be saved when its forward pass has run.

Invariant: a chunk is planned only when every token of it is known and computed by the end of the step. Its blocks are pinned
from then on where they can be; where too many are, it is planned in a later step, if its request has one. With several shards
a step that loads synchronously orders nothing before it is known to have gone well: one shard's failed load spoils what all of
them compute, and only that shard notices. So does one in which another connector of a MultiConnector loads synchronously. What
is pinned is held back until then, also where its request ends with the step; what cannot be is planned in a later step.

After a failed load exactly what was lost by it is planned again: chunks of a step that is given up, and those that had no KV.
Nothing computed from KV that never came is ordered. The scheduler's thread.
"""

from collections.abc import Container, Mapping, Sequence
from itertools import compress

from kvpool.clock import Deadline
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.identity.parts import NULL_BLOCK, Part
from kvpool_client.vllm.plan import LoadOrder, SaveOrder
from kvpool_client.vllm.scheduler.requests import Tracked
from kvpool_client.vllm.scheduler.saves.pins import Pins
from kvpool_client.vllm.scheduler.saves.sightings import SightingCounts
from kvpool_client.vllm.scheduler.unverified_loads import first_bad_block
from kvpool_client.vllm.surface import EngineStep, RunningRequests


class SavePlanner:
    """Block tables of the running requests, kept step by step, and what to save of them.

    Invariant: a scheduled request with chunks to save is in `_open`, with a number of tokens below which the next of them is
    not whole.
    """

    def __init__(self, geometry: Geometry, pins: Pins, sightings: SightingCounts) -> None:
        self._geometry = geometry
        self._pins = pins
        self._sightings = sightings
        self._chunk_blocks = sum(map(geometry.blocks_of, geometry.tables_kept))
        self._full_blocks = sum(geometry.blocks_of(part) for part in geometry.parts if part.is_full)
        self._end_blocks = sum(part.run * geometry.blocks_of(part) for part in geometry.tables_kept)
        self._longest_run = max(part.run for part in geometry.parts)
        self._has_states = any(part.is_state for part in geometry.parts)
        self._lets_go_of_blocks = not all(part.is_full for part in geometry.parts)
        self._is_sharded = geometry.ranks.count > 1
        self._unconfirmed: set[int] = set()
        self._held_back: list[SaveOrder] = []
        # By step what was ordered beside a synchronous load that is not known to have gone well: workers drop it if it fails.
        self._beside_loads: dict[int, tuple[SaveOrder, ...]] = {}
        self._open: dict[str, int] = {}

    def plan(
        self, number: int, step: EngineStep, requests: Mapping[str, Tracked], loads: Sequence[LoadOrder]
    ) -> tuple[SaveOrder, ...]:
        """The saves of step `number`, and those of earlier steps that were held back until now."""
        running = step.scheduled_cached_reqs
        if running.resumed_req_ids or any(running.new_block_ids):
            self._extend_tables(running, requests)
        if not (
            self._open or step.scheduled_new_reqs or loads or self._unconfirmed or self._held_back or self._beside_loads
        ):
            return ()
        steps = self._computed_tokens(step, requests)
        has_loads = bool(loads) and any(not order.is_async for order in loads)
        if self._is_sharded and has_loads:
            self._unconfirmed.add(number)
        if self._unconfirmed and not self._pins.are_possible:
            for request_id, tokens in steps.items():
                entry = requests[request_id]
                entry.unplanned = {
                    "declined_chunks_beside-a-load": max(
                        0, self._chunks_whole(entry, tokens.stop) - entry.chunks_planned
                    )
                }
            return ()
        orders = [
            order for name, tokens in steps.items() if (order := self._order(requests[name], tokens, step)) is not None
        ]
        if self._unconfirmed:
            self._held_back += orders
            return ()
        held_back, self._held_back = self._held_back, []
        ordered = (*held_back, *orders)
        if has_loads or self._beside_loads:
            self._beside_loads[number] = ordered
        return ordered

    def hold(self, number: int) -> None:
        """Plan nothing until step `number` is known to have gone well."""
        self._unconfirmed.add(number)

    def confirm(self, number: int, requests: Mapping[str, Tracked], *, has_failed: bool) -> int:
        """Step `number` has ended, and what failed in it is known. Returns how many saves were given up because they may depend
        on a failed load: they are planned again, as are those that the workers have dropped.
        """
        if self._unconfirmed:
            self._unconfirmed = {step for step in self._unconfirmed if step > number}
        lost: list[SaveOrder] = []
        if has_failed:
            lost = [*self._held_back, *(order for orders in self._beside_loads.values() for order in orders)]
        if self._beside_loads:
            self._beside_loads = {step: orders for step, orders in self._beside_loads.items() if step > number}
        for order in lost:
            entry = requests.get(order.request_id)
            if entry is not None:
                self.plan_from(entry, order.first_chunk)
        return self.give_up() if has_failed else 0

    def plan_from(self, entry: Tracked, chunk: int) -> None:
        """Plan a request's chunks from this one on again: stored ones are found present."""
        entry.chunks_planned = min(entry.chunks_planned, chunk)
        self._open[entry.request.request_id] = 0

    def plan_behind_bad_blocks(self, bad: Container[int], requests: Mapping[str, Tracked]) -> None:
        """Blocks were never filled: plan what lies behind the first one of a request again, where vLLM computes it again.

        Requires: vLLM has taken back what it had counted as computed. Where requests share a bad block, it does so for one of
        them alone: the others go on behind that block, maybe before it is computed, and nothing more of them is saved.
        """
        for entry in requests.values():
            first = first_bad_block(entry, bad)
            if first is None:
                continue
            place = first * self._geometry.parts[0].block_tokens
            entry.is_stale = entry.is_stale or entry.request.num_computed_tokens > place
            self.plan_from(entry, place // self._geometry.chunk_tokens)

    def give_up(self) -> int:
        """Give up the saves that are held back; how many those were."""
        given_up, self._held_back = self._held_back, []
        for order in given_up:
            self._pins.release_pin(order.pin)
        return len(given_up)

    def plan_again(self, unsaved: Mapping[str, int], requests: Mapping[str, Tracked], deadline: Deadline) -> None:
        """Plan again the chunks that other saves were just writing, from a chunk of each request on, until its `deadline` has
        passed."""
        for request_id, chunk in unsaved.items():
            entry = requests.get(request_id)
            if entry is None:
                continue
            entry.retry = entry.retry or deadline
            if not entry.retry.has_passed():
                self.plan_from(entry, chunk)

    def forget(self, request_id: str) -> None:
        """A request has ended, or is tracked no longer."""
        self._open.pop(request_id, None)

    def forget_tables(self, requests: Mapping[str, Tracked]) -> None:
        """Drop the block tables: a step's could not be read, so that the changed ones are outdated."""
        for entry in requests.values():
            entry.tables = None

    def _computed_tokens(self, step: EngineStep, requests: Mapping[str, Tracked]) -> dict[str, range]:
        """The tokens that each scheduled request with chunks to save computes. Begins the block tables of new ones.

        Others are not touched: a forward pass has evicted them from the processor's caches, which costs more than the work.
        """
        computed = {}
        for fresh in step.scheduled_new_reqs:
            entry = requests.get(fresh.req_id)
            if entry is not None:
                entry.tables = tuple(list(table) for table in fresh.block_ids)
                self._open[fresh.req_id] = 0
                computed[fresh.req_id] = _step_of(fresh.req_id, fresh.num_computed_tokens, step)
        if not self._open:
            return computed
        running, counts, size = step.scheduled_cached_reqs, step.num_scheduled_tokens, self._geometry.chunk_tokens
        for request_id, begun in zip(running.req_ids, running.num_computed_tokens, strict=True):
            whole = self._open.get(request_id)
            if whole is None or begun + counts.get(request_id, 0) < whole:
                continue
            entry = requests.get(request_id)
            if entry is not None and entry.chunks_planned < entry.save_chunks:
                computed[request_id] = _step_of(request_id, begun, step)
                self._open[request_id] = (entry.chunks_planned + 1) * size
            else:
                del self._open[request_id]
        return computed

    def _extend_tables(self, running: RunningRequests, requests: Mapping[str, Tracked]) -> None:
        resumed = running.resumed_req_ids
        self._open.update(dict.fromkeys(resumed, 0))
        changes = zip(running.req_ids, running.new_block_ids, strict=True)
        for request_id, blocks in changes if resumed else compress(changes, running.new_block_ids):
            entry = requests.get(request_id)
            if entry is None:
                continue
            if request_id in resumed:
                entry.tables = tuple(list(table) for table in blocks) if blocks is not None else None
                entry.unplanned = {}  # what it had computed is gone
            elif blocks is not None and entry.tables is not None:
                for table, more in zip(entry.tables, blocks, strict=True):
                    table += more

    def _order(self, entry: Tracked, tokens: range, step: EngineStep) -> SaveOrder | None:
        """The order to save what is whole when `tokens` are computed in this step, and is not planned yet."""
        first, last = entry.chunks_planned, self._chunks_whole(entry, tokens.stop)
        if entry.tables is None or last <= first:
            return None
        entry.extend_keys()
        self._sightings.see(entry.take_unseen())
        end = first + self._sightings.ready(entry.hashes[first:last])
        entry.unplanned = {}
        if self._pins.are_possible:
            ready, end = end, self._fitting(entry, first, end)
            entry.unplanned["declined_chunks_blocks-held"] = ready - end
        if end <= first:
            return None
        tables = _shown_tables(step, entry) if self._lets_go_of_blocks else None
        if tables is not None:
            entry.tables = tuple(list(table) for table in tables)
        chosen = [
            self._chosen(part, entry, range(first, end), step, tokens=tokens, are_shown=tables is not None)
            for part in self._geometry.parts
        ]
        if None in chosen:
            return None
        size = self._geometry.chunk_tokens
        entry.chunks_planned = end
        chunks, blocks = zip(*chosen, strict=True)
        if not any(blocks):
            return None
        return SaveOrder(
            request_id=entry.request.request_id,
            hashes=tuple(entry.hashes[:end]),
            salt=entry.salt,
            adapter=entry.adapter,
            first_chunk=first,
            chunks=chunks,
            block_ids=blocks,
            tokens=entry.token_ids(first * size, end * size),
            retention=entry.hints.retention_of(first * size, end * size),
            lora_name=str(getattr(getattr(entry.request, "lora_request", None), "lora_name", "")),
            pin=self._pins.hold_blocks(list(dict.fromkeys(block for named in blocks for block in named)))
            if self._pins.are_possible
            else 0,
        )

    def _fitting(self, entry: Tracked, first: int, end: int) -> int:
        """Up to where chunks from `first` on may be pinned now. A state that is not saved in this step is lost: what windows
        and states need is counted at the ends where they need it, and with every chunk only where there is no room for that."""
        room = self._pins.room()
        prompt_chunks = entry.request.num_prompt_tokens // self._geometry.chunk_tokens
        ends = sum(first < boundary < end + self._longest_run for boundary in entry.boundaries)
        ends += max(0, end - max(first, prompt_chunks)) + self._has_states
        if self._full_blocks * (end - first) + self._end_blocks * ends <= room:
            return end
        return min(end, first + room // self._chunk_blocks)

    def _chosen(
        self, part: Part, entry: Tracked, chunks: range, step: EngineStep, *, tokens: range, are_shown: bool
    ) -> tuple[Sequence[int], tuple[int, ...]] | None:
        """Which of these chunks of a part are saved, and their blocks; None where a full one's are not known. `are_shown`: vLLM
        shows the request's tables as they are."""
        assert entry.tables is not None
        count, table = self._geometry.blocks_of(part), entry.tables[part.table]
        if part.is_full:
            blocks = tuple(table[chunks.start * count : chunks.stop * count])
            return (chunks, blocks) if len(blocks) == len(chunks) * count else None
        if part.is_state:
            kept = self._kept_states(part, step, entry, tokens.stop) if are_shown else {}
            states = self._states(entry, chunks, kept)
            return states, tuple(kept[chunk] for chunk in states)
        windows = self._windows(part, entry, chunks, tokens.start)
        return windows, tuple(block for chunk in windows for block in table[chunk * count : (chunk + 1) * count])

    def _windows(self, part: Part, entry: Tracked, chunks: range, computed: int) -> tuple[int, ...]:
        """The chunks of a part with a window that a boundary needs, and whose blocks the request has in this step.

        `computed`: tokens before the step. What lies further back than the window was let go before it, and may be another
        request's by now. Chunks that are decoded are all stored: where decoding ends is not known.
        """
        assert entry.tables is not None
        prompt_chunks = entry.request.num_prompt_tokens // self._geometry.chunk_tokens
        count, table = self._geometry.blocks_of(part), entry.tables[part.table]
        oldest = part.oldest_token(computed) // part.block_tokens
        return tuple(
            chunk
            for chunk in chunks
            if chunk >= prompt_chunks or any(end - part.run <= chunk < end for end in entry.boundaries)
            if chunk * count >= oldest
            and len(named := table[chunk * count : (chunk + 1) * count]) == count
            and NULL_BLOCK not in named
        )

    def _kept_states(self, part: Part, step: EngineStep, entry: Tracked, end: int) -> dict[int, int]:
        """The blocks in which a request's states at ends of chunks are when this step has run, by chunk.

        vLLM names those that it keeps itself. Beside them there is the one that the step ends with: it is computed into the
        last block of the table, and the next step writes into another one.
        """
        size, kept = self._geometry.chunk_tokens, {}
        if end % size == 0 and entry.tables is not None:
            place = end // part.block_tokens - 1
            table = entry.tables[part.table]
            if place < len(table) and table[place] != NULL_BLOCK:
                kept[end // size - 1] = table[place]
        state = getattr(step, "kv_connector_block_state", None)
        offers = getattr(state, "boundary_state_offloads", None) or {}
        for group, block, tokens in offers.get(entry.request.request_id, ()):
            if group == part.table and tokens % size == 0:
                kept[tokens // size - 1] = block
        return kept

    def _states(self, entry: Tracked, chunks: range, kept: Mapping[int, int]) -> tuple[int, ...]:
        """The chunks whose state at their end is kept in this step, and that a later prompt may go on from: at a boundary,
        anywhere on the way that another prompt has gone, and behind the prompt."""
        prompt_chunks = entry.request.num_prompt_tokens // self._geometry.chunk_tokens
        return tuple(
            chunk
            for chunk in chunks
            if chunk in kept and (chunk >= prompt_chunks or chunk < entry.shared or chunk + 1 in entry.boundaries)
        )

    def _chunks_whole(self, entry: Tracked, computed: int) -> int:
        """Chunks to save that are computed; none where they must not be saved."""
        can_be_saved = entry.tables is not None and not entry.is_stale
        return min(computed // self._geometry.chunk_tokens, entry.save_chunks) if can_be_saved else 0


def _shown_tables(step: EngineStep, entry: Tracked) -> tuple[list[int], ...] | None:
    """A request's block tables as they are in this step; None where vLLM does not show them."""
    state = getattr(step, "kv_connector_block_state", None)
    return state.get_block_ids(entry.request.request_id) if state is not None else None


def _step_of(request_id: str, computed: int, step: EngineStep) -> range:
    return range(computed, computed + step.num_scheduled_tokens.get(request_id, 0))


def has_foreign_loads(step: EngineStep, asked: Mapping[str, int], own: Container[str]) -> bool:
    """Whether another connector loads in this step: a request begins with more tokens than vLLM held when it was asked about.

    `asked`: those tokens, of requests asked about since the last step; `own`: requests that this connector loads.
    """
    if not asked:
        return False
    running = step.scheduled_cached_reqs
    begun = [(fresh.req_id, fresh.num_computed_tokens) for fresh in step.scheduled_new_reqs]
    begun += [
        (name, running.num_computed_tokens[place])
        for place, name in enumerate(running.req_ids)
        if name in running.resumed_req_ids
    ]
    return any(name in asked and tokens > asked[name] and name not in own for name, tokens in begun)
