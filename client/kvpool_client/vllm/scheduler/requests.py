"""Record of one request in the scheduler's half, from its first lookup to its end. One thread."""

from collections.abc import Callable, Mapping

import numpy as np

from kvpool.clock import Deadline
from kvpool_client.connection.promise_line import Question
from kvpool_client.key_chain import KeyChain
from kvpool_client.vllm.identity.weight_epoch import FIRST_EPOCH, hash_in_epoch
from kvpool_client.vllm.scheduler.request_hints import HintReply, RequestHints
from kvpool_client.vllm.surface import EngineRequest

# Attributes that make KV depend on more than token ids, salt and adapter: such token ids would mislead their readers.
FURTHER_INPUTS = ("prompt_embeds", "mm_features")


class Tracked:
    """One request. Invariant: `keys` has a key for each whole chunk whose block hashes were known at the last look.

    `chunks_planned`: leading chunks that the pool has or that were put into a plan; `unplanned`: how many whole ones behind
    those the last step has left for a later one, by counter. `tables`: its blocks in order, by vLLM's group, None while they
    are not known. `boundaries`: numbers of chunks before which windows and states are stored; `shared`: how many chunks other
    prompts have begun with, too. `save_wait` and `answer_wait` run from the first time that the request was held back for that
    reason.
    `awaited`: chunks that others are saving and that it was held back for, with `awaited_behind` tokens in vLLM's blocks.
    `asked_tokens`: tokens that the pending answer covers, after `held_tokens`. `declined`: tokens of its hit that are not to be
    loaded, by counter, which is added to when vLLM has given it blocks: until then it may be looked up again.
    `has_given_up`: no more lookups for this request. `hints`: its hints, `hint_reply` the reply to them; `announced` runs while
    it need not be announced again. `save_chunks`: how many of its chunks may be saved at most. `retry`: runs while chunks that
    another save was writing are planned again. `epoch`: of the weights that compute it (see `weight_epoch`); `is_stale`: it may
    have KV of others, nothing of it is saved. `has_had_blocks`: vLLM has given it blocks once, and what is in them may come
    from anywhere.
    """

    def __init__(
        self,
        request: EngineRequest,
        new_keys: Callable[[], KeyChain],
        *,
        salt: bytes,
        adapter: str,
        chunk_hashes: int,
        hints: RequestHints,
    ) -> None:
        self.request = request
        self.keys = new_keys()
        self.hints = hints
        self.hint_reply: HintReply | None = None
        self.announced = Deadline(0.0)
        self.salt = salt
        self.adapter = adapter
        self.hashes: list[bytes] = []
        self.tables: tuple[list[int], ...] | None = None
        self.boundaries: set[int] = set()
        self.shared = 0
        self.chunks_planned = 0
        self.unplanned: dict[str, int] = {}
        self.save_chunks = 0
        self.retry: Deadline | None = None
        self.held_tokens = 0
        self.asked_tokens = 0
        self.declined: dict[str, int] = {}
        self.answer: Question | None = None
        self.is_offered = False
        self.save_wait: Deadline | None = None
        self.awaited: tuple[int, ...] = ()
        self.awaited_behind = 0
        self.answer_wait: Deadline | None = None
        self.is_loading = False
        self.has_given_up = False
        self.hit_sources: dict[str, int] = {}
        self.epoch = FIRST_EPOCH
        self.is_stale = self.has_had_blocks = False
        self._preemptions_at_allocation: int | None = None
        self._chunk_hashes = chunk_hashes
        self._new_keys = new_keys
        self._prompt_tokens = 0
        self._hashes_max: int | None = None  # leading block hashes that are of the tokens; None: all
        self._seen = 0

    def __repr__(self) -> str:
        return f"<Tracked {self.request.request_id} {len(self.hashes)} chunks, {self.chunks_planned} planned>"

    def extend_keys(self) -> None:
        """Add the chunks that have become whole: the last block hash of each stands for it."""
        fresh = self._hashes_from(len(self.hashes))
        if fresh:
            self.keys.append_hashes(fresh)
            self.hashes += fresh

    def has_new_input(self, *, is_rehashed: bool) -> bool:
        """Whether the prompt has another length than at the last call: the request is new, or a session with its next input.

        Before that input the engine drops a token that it has not computed: hashes that depend on it are dropped here.
        `is_rehashed`: see `rehashes_sessions`; where the engine does not, no later block's hash counts any more.
        """
        last, self._prompt_tokens = self._prompt_tokens, self.request.num_prompt_tokens
        if last == self._prompt_tokens:
            return False
        self.awaited = ()
        if last and not is_rehashed and self._hashes_max is None:
            held, size = self.request.num_computed_tokens, self.keys.chunk_tokens // self._chunk_hashes
            if not held or (held + 1) % size == 0:  # 0: it was preempted meanwhile
                self._hashes_max = held // size
        known = self._hashes_from(0) if self.hashes else []
        kept = next(
            (place for place, value in enumerate(self.hashes) if known[place : place + 1] != [value]), len(self.hashes)
        )
        if kept < len(self.hashes):
            self.keys, self.hashes = self._new_keys(), []
            self.chunks_planned, self._seen = min(self.chunks_planned, kept), min(self._seen, kept)
        return True

    def _hashes_from(self, chunk: int) -> list[bytes]:
        known, size = self.request.block_hashes[: self._hashes_max], self._chunk_hashes
        places = range((chunk + 1) * size - 1, len(known) // size * size, size)
        return [hash_in_epoch(self.epoch, bytes(known[place])) for place in places]

    def take_unseen(self) -> list[bytes]:
        """The chunks' hashes that were not taken before."""
        fresh = self.hashes[self._seen :]
        self._seen = len(self.hashes)
        return fresh

    def token_ids(self, first: int, end: int) -> bytes:
        """Tokens `first` up to `end`, i32; none where the KV depends on more than them."""
        if any(
            getattr(self.request, name, None) is not None and len(getattr(self.request, name))
            for name in FURTHER_INPUTS
        ):
            return b""
        tokens = np.asarray(self.request.all_token_ids[first:end], np.int32)
        return tokens.tobytes() if len(tokens) == end - first else b""

    def note_allocation(self, request: EngineRequest) -> None:
        """vLLM has given the request blocks. A step names them all when it runs; those of before are others' by now."""
        self.has_had_blocks = True
        self.tables = None
        self._preemptions_at_allocation = getattr(request, "num_preemptions", None)

    def has_come_back(self, request: EngineRequest) -> bool:
        """Whether it had blocks, and is looked up again without a preemption: a load has failed.

        Offered another asynchronous load, it may be first in vLLM's queue for ever: vLLM keeps room for requests behind it,
        whose blocks it frees only when their turn comes.
        """
        known = getattr(request, "num_preemptions", None)
        return known is not None and known == self._preemptions_at_allocation

    def offers(self, tokens: int) -> bool:
        """Whether the last answer to vLLM was an offer: where vLLM does not take it, another connector's was better."""
        self.is_offered = tokens > 0
        return self.is_offered

    def forget_answer(self) -> None:
        """Drop the answer: it is used, or no longer needed."""
        self.answer = None
        self.is_offered = False
        self.save_wait = self.answer_wait = None


def rehashes_sessions() -> bool:
    """Whether this vLLM takes back the hash of a block whose last token it drops before a session's next input.

    0.32 does. Before, that hash stayed, and stood for the KV of other tokens (vllm-project/vllm, issues 49377 and 49449).
    """
    try:
        from vllm.v1.core.sched.scheduler import Scheduler  # the engine that asks
    except ImportError:
        return True
    update = getattr(Scheduler, "_update_request_as_session", None)
    return update is None or "block_hashes" in update.__code__.co_names


def boundaries_of(prompt_tokens: int, chunk_tokens: int) -> set[int]:
    """Numbers of chunks before which windows are stored: where an equal prompt goes on, with a token left to be computed, and
    where a longer one does."""
    return {(prompt_tokens - 1) // chunk_tokens, prompt_tokens // chunk_tokens} - {0}


def is_looked_up(request: EngineRequest) -> bool:
    """Whether the pool is looked up for a request.

    Not where another engine sends its KV (prefill/decode disaggregation): the connector that fetches it clears the mark
    afterwards, and then the request is like any other.
    """
    params = getattr(request, "kv_transfer_params", None)
    is_filled_elsewhere = isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))
    return not is_filled_elsewhere and not getattr(request, "skip_reading_prefix_cache", False)
