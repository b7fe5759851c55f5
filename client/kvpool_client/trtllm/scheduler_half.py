"""The scheduler's half of the TensorRT-LLM connector: what may be claimed, and each step's plan for the workers.

    START ──every rank has posted its KV──► MAPPING ──every rank has mapped the staging──► SERVING

Before SERVING nothing is claimed; saves are ordered from the first step on. The engine asks once and an answer cannot be
withdrawn, so the half claims staged and verified chunks only (`claims`), always leaves one token to compute, and loads before
the forward. Failures are misses, counted and logged once. The executor's thread only; rank 0, or an owner of attention data
parallelism.
"""

import logging
from typing import Any

import numpy as np

from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.refusals import Refusals
from kvpool_client.trtllm.adapters import Adapters
from kvpool_client.trtllm.claims import NO_CLAIM, Claim, Claims
from kvpool_client.trtllm.plan import LoadOrder, Plan, SaveOrder
from kvpool_client.trtllm.prompts import REQUESTS_MAX, Prompt
from kvpool_client.trtllm.settings import Settings
from kvpool_client.trtllm.shared import Board

_log = logging.getLogger(__name__)


class SchedulerHalf:
    """See the module. Invariant: a slot of a claim is given up, or ordered, before its prompt is removed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = FailureGuard(_log)
        self._board = Board.create(settings.ranks)
        self._claims: Claims | None = None
        self._is_serving = False
        self._cannot_claim = False
        self._prompts: dict[int, Prompt] = {}
        self._dropped: list[int] = []
        self._adapters = Adapters()
        self._refusals = Refusals("trtllm")
        self._counts = {"claimed_tokens": 0, "asked_requests": 0, "refused_requests": 0}
        if settings.refusal:
            _log.warning("kvpool shares nothing with this engine: %s", settings.refusal)

    def __repr__(self) -> str:
        return f"<SchedulerHalf {'serving' if self._is_serving else 'starting'}, {len(self._prompts)} prompts>"

    @property
    def is_serving(self) -> bool:
        """Whether every rank can carry a claim out."""
        return self._is_serving

    def match(self, request: Any, computed_tokens: int) -> int:
        """How many tokens beyond `computed_tokens` are promised; they are staged and cannot be lost."""
        try:
            return self._match(request, computed_tokens)
        except ENGINE_FAILURES as error:
            self._guard.miss("get_num_new_matched_tokens", error)
            return 0

    def plan(self, scheduled: Any) -> Plan:
        """The step's plan. Raises what a claim that cannot be ordered raises: the runtime would take it for loaded."""
        saves: list[SaveOrder] = []
        loads = [order for data in scheduled.new_requests for order in self._begin(data)]
        try:
            self._look_at_board()
            for data in [*scheduled.new_requests, *scheduled.cached_requests]:
                saves += self._saves_of(data)
        except ENGINE_FAILURES as error:
            self._guard.miss("build_connector_meta", error)
        memory = self._claims.memory if self._claims is not None else None
        dropped, self._dropped = tuple(self._dropped), []
        return Plan(
            board=self._board.path,
            staging=memory.path if memory is not None else "",
            staging_bytes=memory.view.size if memory is not None else 0,
            loads=tuple(loads),
            saves=tuple(saves),
            dropped=dropped,
        )

    def cancel(self, request: Any, start: int, end: int) -> None:
        """The runtime rejects tokens `start` up to `end` of what was claimed of this request.

        It has the first of them itself, or has no pages for the last. The others stay promised, and blocks that are partly
        among them are loaded whole.
        """
        prompt = self._prompts.get(int(request.request_id))
        if prompt is None or self._claims is None or not prompt.claim.slots:
            return
        claim, block = prompt.claim, self._settings.tokens_per_block
        first, last = claim.first_chunk, claim.first_chunk + len(claim.slots)
        gone_from, gone_to = max(first, -(-start // block)), min(last, end // block)
        is_head = gone_from == first
        # Nothing is removed from the middle: a block loaded without need is computed over, a missing one would be wrong.
        if gone_from >= gone_to or not (is_head or gone_to == last):
            return
        kept = claim.slots[gone_to - first :] if is_head else claim.slots[: gone_from - first]
        self._claims.give_up(Claim(gone_from, claim.slots[gone_from - first : gone_to - first]))
        prompt.claim = Claim(gone_to if is_head else first, kept) if kept else NO_CLAIM

    def reset(self, request: Any) -> None:
        """The request's blocks were freed and it runs again from its start."""
        prompt = self._prompts.get(int(request.request_id))
        if prompt is not None:
            self._give_up(prompt)
            prompt.begin(0)
            if prompt.has_saves:
                self._dropped.append(prompt.request_id)

    def finish(self, request: Any) -> bool:
        """The request has ended; whether its blocks may still be read by saves."""
        prompt = self._prompts.pop(int(request.request_id), None)
        if prompt is None:
            return False
        self._give_up(prompt)
        return prompt.has_saves

    def stats(self) -> dict[str, int | float | str]:
        """Requests asked and refused (by reason too), tokens claimed, failures by call, staging slots free."""
        free = self._claims.slots_free if self._claims is not None else 0
        return {**self._counts, **self._refusals.counts(), **self._guard.counts(), "staging_slots_free": free}

    def close(self) -> None:
        """End the connections and the shared memory."""
        if self._claims is not None:
            self._claims.close()
        self._board.close()

    def _match(self, request: Any, computed_tokens: int) -> int:
        prompt = Prompt.of(request, self._adapters)
        self._counts["asked_requests"] += 1
        self._forget(prompt.request_id)
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
        # The last token is left out: the runtime needs its logits.
        tokens = np.asarray(request.get_tokens(0), dtype=np.int32)[:-1]
        prompt.claim = self._claims.claim(tokens, prompt.salt, prompt.adapter, computed_tokens // block)
        claimed = len(prompt.claim.slots) * block
        self._counts["claimed_tokens"] += claimed
        return claimed

    def _refuse(self, prompt: Prompt, refusal: str) -> None:
        """Count a request that is neither loaded nor saved, and log once why; the engine's own dummy requests are not
        logged."""
        self._counts["refused_requests"] += 1
        if prompt.is_prompt:
            self._refusals.count("engine" if self._settings.refusal else refusal)
            if not self._settings.refusal:
                self._guard.warn_once(f"a request is neither loaded nor saved: {refusal}")

    def _look_at_board(self) -> None:
        """Go from START to MAPPING to SERVING, and take back the slots of orders that every rank has carried out."""
        ranks = range(self._settings.ranks)
        if self._claims is None and not self._settings.refusal:
            geometry = self._board.geometry(ranks)
            if geometry is not None and not self._cannot_claim:
                try:
                    self._claims = Claims(self._settings, geometry)
                except ENGINE_FAILURES as error:  # it would fail again: the engine goes on without claims
                    self._cannot_claim = True
                    self._guard.miss("claims", error)
        if self._claims is not None:
            self._is_serving = self._is_serving or self._board.has_mapped(ranks)
            self._claims.reclaim(self._board.done(ranks))

    def _begin(self, data: Any) -> list[LoadOrder]:
        """The order that carries a new request's claim out, as far as the engine has given blocks for it."""
        prompt = self._prompts.get(int(data.request_id))
        if prompt is None:
            return []
        claim, prompt.claim = prompt.claim, NO_CLAIM
        prompt.begin(0)
        if not claim.slots:
            return []
        assert self._claims is not None
        block_ids = tuple(int(block) for block in data.new_block_ids)[claim.first_chunk :][: len(claim.slots)]
        held = Claim(claim.first_chunk, claim.slots[: len(block_ids)])
        self._claims.give_up(Claim(claim.first_chunk, claim.slots[len(block_ids) :]))
        prompt.begin(held.first_chunk + len(held.slots))
        return [LoadOrder(self._claims.order(held), held.slots, block_ids)] if held.slots else []

    def _saves_of(self, data: Any) -> list[SaveOrder]:
        prompt = self._prompts.get(int(data.request_id))
        if prompt is None:
            return []
        prompt.advance(data)
        # In a claimed request's first step the position leaves the claim out: too low is safe, the next step catches up.
        computed = int(data.computed_position) + int(data.num_scheduled_tokens)
        order = None if self._settings.refusal else prompt.order_save(computed, self._settings.tokens_per_block)
        return [] if order is None else [order]

    def _give_up(self, prompt: Prompt) -> None:
        if self._claims is not None and prompt.claim.slots:
            self._claims.give_up(prompt.claim)
        prompt.claim = NO_CLAIM

    def _forget(self, request_id: int) -> None:
        """A request that is looked up again has lost its blocks: its saves end before the blocks are reused."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._give_up(prompt)
            if prompt.has_saves:
                self._dropped.append(request_id)

    def _make_room(self) -> None:
        """Drop the oldest request where the runtime has ended requests without a call."""
        if len(self._prompts) >= REQUESTS_MAX:
            self._forget(next(iter(self._prompts)))
