"""The scheduler's half of the TensorRT-LLM connector: what may be claimed, and each step's plan for the workers.

    START ──every rank has posted its KV──► MAPPING ──every rank has mapped the staging──► SERVING

Before SERVING nothing is claimed; saves of one full group are ordered from the first step on, others from MAPPING on. The
engine asks once and an answer cannot be withdrawn, so the half claims staged and verified chunks only (`claims`), always leaves
one token to compute, and loads before the forward. All that an iteration does for new requests has one deadline: what is not
staged by then is computed. Failures are misses, counted and logged once; a promise that the engine breaks where it cannot be
served in part is an error. The executor's thread only; rank 0, or an owner of attention data parallelism.
"""

import logging
import os
from typing import Any

import numpy as np

from kvpool.clock import Clock, Deadline
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.refusals import Refusals
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.trtllm.adapters import Adapters
from kvpool_client.trtllm.claims.claim import NO_CLAIM, BrokenClaim
from kvpool_client.trtllm.claims.claims import Claims
from kvpool_client.trtllm.geometry import Geometry, GroupGeometry
from kvpool_client.trtllm.plan import LoadOrder, Plan, SaveOrder
from kvpool_client.trtllm.prompts import REQUESTS_MAX, Prompt, tables_of
from kvpool_client.trtllm.settings import Settings
from kvpool_client.trtllm.shared import Board

_log = logging.getLogger(__name__)


class SchedulerHalf:
    """See the module. Invariant: a slot of a claim is given up, or ordered, before its prompt is removed."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        """`clock`: of the iterations' deadlines; None: the machine's."""
        self._clock = clock
        self._deadline: Deadline | None = None  # of this iteration, from its first lookup on
        self._reader = WeightsReader(DigestMemory.of_user(os.environ), _log)
        self._weights = settings.later
        self._settings = settings = settings.begun(self._reader)
        self._guard = FailureGuard(_log)
        self._board = Board.create(settings.ranks)
        self._geometry: Geometry | None = None
        # Until all ranks have posted theirs: what an engine with one group of full attention is to save. Others leave it.
        self._plain = Geometry((GroupGeometry(1, 1, 1, settings.tokens_per_block, "", is_replicated=False),))
        self._claims: Claims | None = None
        self._is_serving = False
        self._cannot_claim = False
        self._prompts: dict[int, Prompt] = {}
        self._dropped: list[int] = []
        self._adapters = Adapters(self._reader)
        self._refusals = Refusals("trtllm")
        self._counts = {
            "claimed_tokens": 0,
            "asked_requests": 0,
            "refused_requests": 0,
            "late_requests": 0,
            "unstaged_requests": 0,
            "forgotten_requests": 0,
        }
        self._show_refusal()

    def __repr__(self) -> str:
        return f"<SchedulerHalf {'serving' if self._is_serving else 'starting'}, {len(self._prompts)} prompts>"

    @property
    def is_serving(self) -> bool:
        """Whether every rank can carry a claim out."""
        return self._is_serving

    def match(self, request: Any, computed_tokens: int) -> int:
        """How many tokens beyond `computed_tokens` are promised; they are staged and cannot be lost.

        The lookups between two plans are one iteration's: together they wait for `claim_timeout_s`, or for `timeout_s` where no
        request runs that would wait too.
        """
        if self._deadline is None:
            is_idle = not any(prompt.has_begun for prompt in self._prompts.values())
            given = self._settings
            self._deadline = Deadline(
                max(given.timeout_s, given.claim_timeout_s) if is_idle else given.claim_timeout_s, self._clock
            )
        try:
            self._take_name()
            return self._match(request, computed_tokens, self._deadline)
        except ENGINE_FAILURES as error:
            self._guard.miss("get_num_new_matched_tokens", error)
            return 0

    def plan(self, scheduled: Any) -> Plan:
        """The step's plan. Raises what a claim that cannot be ordered raises: the runtime would take it for loaded."""
        self._deadline = None
        saves: list[SaveOrder] = []
        loads = [order for data in scheduled.new_requests for order in self._begin_request(data)]
        try:
            self._take_name()
            self._look_at_board()
            for data in scheduled.new_requests:
                saves += self._saves_of(data, is_new=True)
            for data in scheduled.cached_requests:
                saves += self._saves_of(data, is_new=False)
        except ENGINE_FAILURES as error:
            self._guard.miss("build_connector_meta", error)
        memory = self._claims.memory if self._claims is not None and self._claims.is_ready else None
        dropped, self._dropped = tuple(self._dropped), []
        return Plan(
            board=self._board.path,
            staging=memory.path if memory is not None else "",
            staging_bytes=memory.view.size if memory is not None else 0,
            staging_slots=self._claims.slots if self._claims is not None else (),
            loads=tuple(loads),
            saves=tuple(saves),
            dropped=dropped,
        )

    def cancel(self, request: Any, start: int, end: int) -> None:
        """The runtime rejects tokens `start` up to `end` of what was claimed of this request.

        It has the first of them itself, or has no pages for the last. The others stay promised, and blocks that are partly
        among them are loaded whole. Raises BrokenClaim where a window's blocks before `start` were not staged.
        """
        prompt = self._prompts.get(int(request.request_id))
        if prompt is None or self._claims is None or self._geometry is None or not prompt.claim.chunks:
            return
        claim, block = prompt.claim, self._settings.tokens_per_block
        first, last = claim.first_chunk, claim.end
        if end > start > first * block and not claim.can_end_at(start, self._geometry):
            raise BrokenClaim(
                f"request {prompt.request_id}: tokens {start} to {end} of the promised {first * block} to {prompt.promised} "
                "are handed back, expected the first of them or all: layer groups with a window have their blocks before the "
                "promise's end alone"
            )
        gone_from, gone_to = max(first, -(-start // block)), min(last, end // block)
        is_head = gone_from == first
        if end >= prompt.promised and not is_head:
            prompt.promised = min(prompt.promised, start)
        # Nothing is removed from the middle: a block loaded without need is computed over, a missing one would be wrong.
        if gone_from >= gone_to or not (is_head or gone_to == last):
            return
        before, after = claim.split(gone_to if is_head else gone_from)
        gone, kept = (before, after) if is_head else (after, before)
        self._claims.give_up_claim(gone)
        prompt.claim = kept if kept.chunks else NO_CLAIM

    def reset(self, request: Any) -> None:
        """The request's blocks were freed and it runs again from its start."""
        prompt = self._prompts.get(int(request.request_id))
        if prompt is not None:
            self._give_up_claim(prompt)
            prompt.promised = 0
            prompt.begin_steps(0)
            if prompt.has_saves:
                self._dropped.append(prompt.request_id)

    def finish(self, request: Any) -> bool:
        """The request has ended; whether its blocks may still be read by saves."""
        prompt = self._prompts.pop(int(request.request_id), None)
        if prompt is None:
            return False
        self._give_up_claim(prompt)
        return prompt.has_saves

    def stats(self) -> dict[str, int | float | str]:
        """Requests asked, refused (by reason too), late, without a slot for all of their hit, and forgotten; tokens claimed,
        failures by call, staging slots free."""
        free = self._claims.slots_free if self._claims is not None else 0
        read = self._weights.counts() if self._weights is not None else {}
        return {**read, **self._counts, **self._refusals.counts(), **self._guard.counts(), "staging_slots_free": free}

    def close(self) -> None:
        """End the connections and the shared memory."""
        self._reader.stop()
        if self._claims is not None:
            self._claims.close()
        self._board.close()

    def _take_name(self) -> None:
        """Begin to share once the files of the weights were read."""
        if self._settings.later is not None:
            self._settings = self._settings.named()
            self._show_refusal()

    def _show_refusal(self) -> None:
        if self._settings.refusal and self._settings.later is None:
            _log.warning("kvpool shares nothing with this engine: %s", self._settings.refusal)

    def _match(self, request: Any, computed_tokens: int, deadline: Deadline) -> int:
        prompt = Prompt.of(request, self._adapters)
        self._counts["asked_requests"] += 1
        self._forget_request(prompt.request_id)
        self._make_room()
        self._prompts[prompt.request_id] = prompt
        block = self._settings.tokens_per_block
        refusal = prompt.refusal or self._settings.refusal
        if refusal or not prompt.is_prompt:
            self._refuse(prompt, refusal)
            return 0
        self._look_at_board()
        if self._claims is None or not self._is_serving or computed_tokens % block:
            return 0
        if deadline.has_passed():
            self._counts["late_requests"] += 1
            return 0
        # The last token is left out: the runtime needs its logits.
        tokens = np.asarray(request.get_tokens(0), dtype=np.int32)[:-1]
        answer = self._claims.claim(
            tokens, prompt.salt, prompt.adapter, first_chunk=computed_tokens // block, deadline=deadline
        )
        prompt.claim, prompt.junction = answer.claim, answer.junction
        self._counts["late_requests"] += answer.is_late
        self._counts["unstaged_requests"] += answer.is_unstaged
        claimed = prompt.claim.chunks * block
        prompt.promised = computed_tokens + claimed
        self._counts["claimed_tokens"] += claimed
        return claimed

    def _refuse(self, prompt: Prompt, refusal: str) -> None:
        """Count a request that is neither loaded nor saved, and log once why; the engine's own dummy requests are not
        logged."""
        self._counts["refused_requests"] += 1
        if prompt.is_prompt:
            is_refused = self._settings.refusal and self._settings.later is None
            self._refusals.count("engine" if is_refused else refusal)
            if not self._settings.refusal:
                self._guard.warn_once(f"a request is neither loaded nor saved: {refusal}")

    def _look_at_board(self) -> None:
        """Go from START to MAPPING to SERVING, and take back the slots of orders that every rank has carried out."""
        ranks = range(self._settings.ranks)
        if self._geometry is None and not self._settings.refusal:
            self._geometry = self._board.geometry(ranks)
        if self._claims is None and self._geometry is not None and not self._cannot_claim:
            try:
                self._claims = Claims(self._settings, self._geometry, self._guard)
            except ENGINE_FAILURES as error:
                self._go_without_claims(error)
        if self._claims is not None and self._claims.failure is not None:
            claims, self._claims = self._claims, None
            claims.close()
            self._go_without_claims(claims.failure)
        if self._claims is not None:
            self._is_serving = self._is_serving or self._board.has_mapped(ranks)
            self._claims.reclaim(self._board.done(ranks))

    def _go_without_claims(self, error: Exception | None) -> None:
        """It would fail again."""
        self._cannot_claim = True
        self._guard.miss("claims", error)

    def _begin_request(self, data: Any) -> list[LoadOrder]:
        """The order that carries a new request's claim out, as far as the engine has given blocks for it. Raises
        BrokenClaim."""
        prompt = self._prompts.get(int(data.request_id))
        if prompt is None:
            return []
        claim, prompt.claim = prompt.claim, NO_CLAIM
        prompt.begin_steps(0)
        if not claim.chunks:
            return []
        assert self._claims is not None
        assert self._geometry is not None
        tables = tuple(tuple(table) for table in tables_of(data))
        taken = int(data.computed_position) + (prompt.matched or 0)
        held, rest = claim.split(max(claim.first_chunk, min(claim.end, *(len(table) for table in tables))))
        try:
            if prompt.matched and taken < prompt.promised and not claim.can_end_at(taken, self._geometry):
                raise BrokenClaim(f"the engine goes on behind token {taken}, expected {prompt.promised}, as promised")
            block_ids = held.blocks(tables)
        except BrokenClaim as error:
            self._claims.give_up_claim(claim)
            if prompt.matched == 0 and claim.is_untaken(tables, self._geometry):
                return []
            raise BrokenClaim(f"request {prompt.request_id}: {error}") from error
        self._claims.give_up_claim(rest)
        if not held.chunks:
            return []
        prompt.begin_steps(held.end)
        return [LoadOrder(self._claims.order_claim(held), held.slots, block_ids)]

    def _saves_of(self, data: Any, *, is_new: bool) -> list[SaveOrder]:
        prompt = self._prompts.get(int(data.request_id))
        if prompt is None:
            return []
        prompt.add_step(data)
        if self._settings.refusal:
            return []
        geometry = self._geometry or self._plain
        position = int(data.computed_position)
        if is_new:
            position, prompt.promised = prompt.position(data), 0
        order = prompt.order_save(range(position, position + int(data.num_scheduled_tokens)), geometry)
        return [] if order is None else [order]

    def _give_up_claim(self, prompt: Prompt) -> None:
        if self._claims is not None and prompt.claim.chunks:
            self._claims.give_up_claim(prompt.claim)
        prompt.claim = NO_CLAIM

    def _forget_request(self, request_id: int) -> None:
        """A request that is looked up again has lost its blocks: its saves end before the blocks are reused."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._give_up_claim(prompt)
            if prompt.has_saves:
                self._dropped.append(request_id)

    def _make_room(self) -> None:
        """Drop the oldest request where the runtime has ended requests without a call."""
        if len(self._prompts) >= REQUESTS_MAX:
            self._counts["forgotten_requests"] += 1
            self._forget_request(next(iter(self._prompts)))
