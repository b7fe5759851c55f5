"""KV cache manager: the interface of TensorRT-LLM's resource manager over a block pool.

    prepare_resources ─► forward ─► update_resources        each step, for its batch
      context, first chunk: the whole prompt's blocks, reused prefix first     its chunk is computed: full blocks are reusable
      generation: room for the next token and its drafts                       rejected drafts are taken back, the rest too

A block becomes reusable in `update_resources`, or when a request that is complete is freed before that; never for a request
that is freed in the middle of a step. Prompts that the node's pool has are loaded when they are prepared, because an
LlmRequest's position must be final then: bounded by the Pool's timeout without progress. A request without room is left out
and returned, never raised: an executor whose capacity scheduler counts with `get_needed_resource_to_completion` meets that
only while blocks are being offloaded. One that cannot be served (a beam, a retention, a length that is none) is returned too,
and `refusals` has the reason: it never keeps the others of its batch from their step. Requests, batches and settings are
duck-typed. Engine's thread.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch

from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.states import DEFAULT_PRIORITY
from kvpool_blocks.block_memory import BlockShape, checked_device
from kvpool_blocks.block_pool import BlockPool
from kvpool_blocks.executor import cache_settings
from kvpool_blocks.executor.dummy_request import DummyRequest, state_of
from kvpool_blocks.executor.request_terms import RequestTerms
from kvpool_blocks.executor.resource_manager import BaseResourceManager
from kvpool_client.pool import Pool

log = logging.getLogger(__name__)

# What a duck-typed request raises that lacks a field, or has another value in it than any executor gives it.
ODD_REQUEST = (
    KVPoolError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(slots=True)
class _Served:
    """A request's positions in the cache.

    `positions`: those that are computed or prepared; `computed`: those that a step has confirmed; `step_end`: where the
    prepared step ends, None in between; `is_reusable`: False for dummies. `fault`: why its last step could not be confirmed,
    which leaves its positions unknown.
    """

    positions: int
    computed: int
    is_reusable: bool
    step_end: int | None = None
    is_generating: bool = False
    fault: str = ""


class KVCacheManager(BaseResourceManager):
    """TensorRT-LLM's resource manager of this name over a `BlockPool`, for an executor that is written against it.

        manager = KVCacheManager(KvCacheConfig(...), CacheType.SELF, num_layers=32, num_kv_heads=8, head_dim=128,
                                 tokens_per_block=16, max_seq_len=8192, max_batch_size=16, mapping=mapping, pool=pool)
        manager.prepare_resources(batch)     # each step; what it returns must not run in it
        manager.update_resources(batch)
        manager.free_resources(request)

    TensorRT-LLM need not be there: settings, batches and requests are any objects with its fields. A request that cannot be
    served is returned by `prepare_resources`, with its reason in `refusals`, and nothing raises; a wrong argument raises
    InvalidArgument. `blocks` is the block pool. Threads: the engine's one.
    """

    # Invariant: the pool has a request for each entry of `_served`, with room for its positions.

    def __init__(
        self,
        kv_cache_config: Any,
        kv_cache_type: Any,
        *,
        num_layers: int,
        num_kv_heads: int | Sequence[int | None],
        head_dim: int,
        tokens_per_block: int,
        max_seq_len: int,
        max_batch_size: int,
        mapping: Any,
        dtype: object = "float16",
        max_beam_width: int = 1,
        pool: Pool | None = None,
        device: str | torch.device | None = None,
        **others: object,
    ) -> None:
        """TensorRT-LLM's arguments, and `pool`: the node's pool, whose layout is that of this rank; `device`: None: CUDA, or
        the CPU where there is none.

        `kv_cache_config`: its `max_tokens`, `free_gpu_memory_fraction` and `enable_block_reuse` are read. `kv_cache_type`:
        SELF. `num_layers` and `num_kv_heads` are the model's, of which `mapping` has this rank's; `head_dim`,
        `tokens_per_block` and `dtype` (torch's, or a name) are those of blocks. `max_seq_len` (tokens) and `max_batch_size`
        (requests) bound what is served; `max_beam_width` is 1.

        `others`: its further arguments. `max_num_tokens` and `model_config` size what a block pool has not; any other must
        be absent, None or False. Raises InvalidArgument, LayoutMismatch.
        """
        cache_settings.check_cache_type(kv_cache_type)
        cache_settings.check_counts(max_seq_len=max_seq_len, max_batch_size=max_batch_size)
        cache_settings.check_config(kv_cache_config, max_seq_len)
        _check_beams(max_beam_width)
        _refuse({name: value for name, value in others.items() if name not in ("max_num_tokens", "model_config")})
        self.mapping, self.dtype, self.kv_cache_type = mapping, dtype, kv_cache_type
        self.tokens_per_block, self.head_dim, self.num_kv_heads = tokens_per_block, head_dim, num_kv_heads
        self.max_seq_len, self.max_batch_size = max_seq_len, max_batch_size
        self.pp_layers = cache_settings.local_layers(num_layers, mapping)
        self.layer_offsets = {layer: offset for offset, layer in enumerate(self.pp_layers)}
        self.enable_block_reuse = bool(getattr(kv_cache_config, "enable_block_reuse", True))
        heads = cache_settings.local_heads(num_kv_heads, mapping)
        name = cache_settings.layout_dtype(dtype)
        shape = BlockShape(len(self.pp_layers), 1, tokens_per_block, heads, head_dim, name)
        place = checked_device(device)
        shape = replace(shape, num_blocks=cache_settings.block_count(kv_cache_config, shape, place))
        self.blocks = BlockPool(
            layers=shape.layers,
            num_blocks=shape.num_blocks,
            tokens_per_block=tokens_per_block,
            kv_heads=heads,
            head_dim=head_dim,
            dtype=name,
            device=place,
            pool=pool if self.enable_block_reuse else None,
        )
        self.refusals: dict[Hashable, str] = {}
        self._terms = RequestTerms()
        self._served: dict[int, _Served] = {}

    def __repr__(self) -> str:
        return f"<KVCacheManager {self.blocks!r}>"

    def shutdown(self) -> None:
        """End all requests and finish what is being offloaded."""
        self._served.clear()
        self.blocks.close()

    def verify(self) -> list[str]:
        """Problems found by recounting; empty if all is well."""
        problems = self.blocks.verify()
        for request_id, served in self._served.items():
            room = len(self.blocks.block_ids(request_id)) * self.tokens_per_block
            if not served.computed <= served.positions <= room:
                problems.append(f"request {request_id} has {served.positions} positions in room for {room}")
        return problems

    def get_max_resource_count(self) -> int:
        """All blocks."""
        return self.blocks.shape.num_blocks

    def get_num_free_blocks(self) -> int:
        """Blocks that no request uses, with those that are kept for reuse."""
        return self.blocks.num_free_blocks

    def get_num_kv_blocks(self, num_tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def get_num_available_tokens(self, max_num_draft_tokens: int = 0, **others: object) -> int:
        """Tokens of one request that there is room for."""
        _refuse(others)
        return self.get_num_free_blocks() * self.tokens_per_block - max_num_draft_tokens

    def get_needed_resource_to_completion(self, request: Any) -> int:
        """Blocks of the request's prompt, its output and its drafts, from its beginning on: those it has are counted, once."""
        context = max(request.orig_prompt_len, request.prompt_len)
        return self.get_num_kv_blocks(context + request.max_new_tokens + len(_drafts(request)))

    def prepare_resources(self, scheduled_batch: Any) -> list[Any]:
        """Room for the batch's next step. Returns the requests that must not run in it.

        `refusals` has those of them that cannot be served as they are, each by its id with the reason; for the others there
        is no room now. A generating request that is prepared again before its update gets room for one more token: an
        executor may be a step ahead.
        """
        before, self.refusals = self.refusals, {}
        steps = [(request, self._prepare_context) for request in scheduled_batch.context_requests]
        steps += [(request, self._prepare_generation) for request in scheduled_batch.generation_requests]
        left_out: list[Any] = []
        for number, (request, prepare) in enumerate(steps):
            request_id = _id_of(request)
            is_new = request_id not in self._served
            try:
                if number - len(left_out) == self.max_batch_size:
                    raise InvalidArgument(f"it is one more than max_batch_size {self.max_batch_size}")
                if not prepare(request):
                    left_out.append(request)
            except ODD_REQUEST as error:
                left_out.append(request)
                self.refusals[request_id] = reason = self._fault(error)
                if is_new:
                    self._end(request_id)
                if before.get(request_id) != reason:
                    log.warning("kvpool: request %s is refused: %s", request_id, reason)
        return left_out

    def update_resources(
        self,
        scheduled_batch: Any,
        attn_metadata: object = None,  # noqa: ARG002 - the interface: for draft trees, which are refused
        kv_cache_dtype_byte_size: float | None = None,  # noqa: ARG002 - as the one before
    ) -> None:
        """The batch's step has run: rejected drafts are taken back, and what was computed is reusable.

        Requests that were freed since, or refused, are passed over. One whose step cannot be confirmed (more drafts are taken
        back than it has) is refused from then on.
        """
        for request in scheduled_batch.generation_requests:
            if state_of(request) != "CONTEXT_INIT":
                self._confirm(request)
        for request in scheduled_batch.context_requests:
            self._confirm(request)

    def free_resources(self, request: Any, pin_on_release: bool = False) -> None:
        """End a request, or pause it. Nothing where it is not served. Raises InvalidArgument for `pin_on_release`."""
        if pin_on_release:
            raise InvalidArgument("pin_on_release is True, expected False: blocks for reuse are not pinned")
        if state_of(request) == "GENERATION_COMPLETE":
            self._confirm(request)
        self._end(_id_of(request))

    def rewind_kv_cache(self, request: Any, rewind_len: int) -> None:
        """Take the last positions of a request back."""
        self._rewind(request.py_request_id, self._served_as(request), rewind_len)

    def get_cache_indices(self, request: Any, window_size: int | None = None) -> list[int]:
        """A request's block ids, in the order of its tokens. Raises InvalidArgument for one without blocks."""
        self._check_window(window_size)
        return list(self.blocks.block_ids(request.py_request_id))

    def get_batch_cache_indices(
        self, request_ids: Sequence[Any], layer_idx: int | None = None
    ) -> list[list[int]] | dict[int, list[int]]:
        """The block ids of each request, in the order of its tokens; the same in every layer.

        For ids, as TensorRT-LLM's code has it, a list in the order asked for; for requests, as its documentation has it, a
        dict by their ids. Raises InvalidArgument for a request without blocks, and where both are mixed.
        """
        if layer_idx is not None:
            self._offset(layer_idx)
        are_requests = [hasattr(entry, "py_request_id") for entry in request_ids]
        if not any(are_requests):
            return [list(self.blocks.block_ids(request_id)) for request_id in request_ids]
        if not all(are_requests):
            raise InvalidArgument(f"request_ids has ids and requests, expected one of both: {request_ids!r:.200}")
        return {request.py_request_id: self.get_cache_indices(request) for request in request_ids}

    def get_block_ids_per_seq(self, request_ids: Sequence[int]) -> torch.Tensor:
        """The block ids of each request as one int32 tensor, [requests, longest], padded with 0."""
        rows = [torch.tensor(self.blocks.block_ids(request_id), dtype=torch.int32) for request_id in request_ids]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)

    def get_last_block_id(self, request_id: int) -> int:
        """The block of a request's last position."""
        return self.blocks.block_ids(request_id)[-1]

    def get_priority_by_block_id(self, block_id: int, window_size: int | None = None) -> int:
        """The retention priority of a block that is kept for reuse, 0 to 100, the default for any other. Raises
        InvalidArgument for a window that is shorter than `max_seq_len`."""
        self._check_window(window_size)
        priority = self.blocks.priority_of(block_id)
        return DEFAULT_PRIORITY if priority is None else priority

    def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> torch.Tensor:
        """A layer's KV in `dtype`, [num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]; with HND a view with heads before
        tokens. Raises InvalidArgument."""
        buffer = self.blocks.buffers(self._offset(layer_idx))
        if kv_layout not in ("NHD", "HND"):
            raise InvalidArgument(f"kv_layout is {kv_layout!r}, expected NHD or HND")
        return buffer if kv_layout == "NHD" else buffer.transpose(2, 3)

    def add_dummy_requests(
        self,
        request_ids: list[int],
        token_nums: list[int] | None = None,
        is_gen: bool = False,
        prepare_resource: bool = True,
        *,
        max_num_draft_tokens: int = 0,
        max_beam_width: int = 1,
        num_extra_decoding_steps: int = 0,
        **others: object,
    ) -> list[DummyRequest] | None:
        """Requests that warm up captured graphs; None, and no block is taken, where there is no room for all of them.

        Raises InvalidArgument, and no block is taken, for more requests than a batch has, or longer ones than a request may be.
        """
        _refuse(others)
        _check_beams(max_beam_width)
        if self.get_num_free_blocks() < 1:
            return None
        counts = [1 + max_num_draft_tokens] * len(request_ids) if token_nums is None else token_nums
        if len(counts) != len(request_ids) or len(request_ids) > self.max_batch_size:
            raise InvalidArgument(
                f"request_ids and token_nums have {len(request_ids)} and {len(counts)} entries, "
                f"expected the same, at most max_batch_size {self.max_batch_size}"
            )
        requests = [
            DummyRequest.of(request_id, tokens, is_generating=is_gen, draft_tokens=max_num_draft_tokens)
            for request_id, tokens in zip(request_ids, counts, strict=True)
        ]
        with ExitStack() as unless_all:
            for request in requests if prepare_resource else ():
                extra = num_extra_decoding_steps + len(_drafts(request))
                self._check_length(len(request.tokens) + extra)
                if self.get_num_kv_blocks(len(request.tokens) + extra) > self.get_max_resource_count():
                    return None
                if not self._allocate(request, request.tokens, extra):
                    return None
                unless_all.callback(self._end, request.py_request_id)
            unless_all.pop_all()
        return requests

    def add_padding_request(self, request_id: int, *, max_num_draft_tokens: int = 0) -> DummyRequest | None:
        """A generating request of one token that fills a batch up to a captured size; None where there is no room."""
        added = self.add_dummy_requests([request_id], is_gen=True, max_num_draft_tokens=max_num_draft_tokens)
        return added[0] if added else None

    def _check_window(self, window_size: int | None) -> None:
        if window_size is not None and window_size < self.max_seq_len:
            raise InvalidArgument(f"window_size is {window_size!r}, expected None or max_seq_len {self.max_seq_len}")

    def _offset(self, layer: int) -> int:
        offset = self.layer_offsets.get(layer)
        if offset is None:
            raise InvalidArgument(f"layer_idx is {layer!r}, expected one of this rank's {self.pp_layers}")
        return offset

    def _prepare_context(self, request: Any) -> bool:
        for name in ("prompt_len", "context_current_position", "context_chunk_size"):
            _check_count(request, name)
        if request.is_first_context_chunk and request.py_request_id not in self._served:
            beams = getattr(getattr(request, "sampling_config", None), "beam_width", 1)
            if beams != 1:
                raise InvalidArgument(f"the beam width is {beams!r}, expected 1")
            tokens = request.get_tokens(0)[: request.prompt_len]
            if len(tokens) < request.prompt_len:
                raise InvalidArgument(f"prompt_len is {request.prompt_len} with {len(tokens)} tokens, expected no more")
            if not self._allocate(request, tokens, len(_drafts(request))):
                return False
        served = self._served_as(request)
        served.step_end = min(request.prompt_len, request.context_current_position + request.context_chunk_size)
        return True

    def _served_as(self, request: Any) -> _Served:
        served = self._served.get(_id_of(request))
        if served is None:
            raise InvalidArgument(
                f"py_request_id is {request.py_request_id!r}, expected a request with blocks: after its first context chunk"
            )
        if served.fault:
            raise InvalidArgument(served.fault)
        return served

    def _end(self, request_id: Any) -> None:
        if self._served.pop(request_id, None) is not None:
            self.blocks.free(request_id)

    def _check_length(self, positions: int) -> None:
        if positions > self.max_seq_len:
            raise InvalidArgument(f"positions are {positions}, expected at most max_seq_len {self.max_seq_len}")

    def _allocate(self, request: Any, tokens: Sequence[int], extra: int) -> bool:
        request_id, scope, retention = request.py_request_id, self._terms.scope(request), self._terms.retention(request)
        self._check_length(len(tokens) + extra)
        allocation = self.blocks.allocate(
            request_id,
            tokens,
            retention=retention.ranges,
            decode_priority=retention.decode_priority,
            decode_duration_s=retention.decode_duration_s,
            salt=scope.salt,
            adapter=scope.adapter,
        )
        if allocation is None:
            return False
        with ExitStack() as unless_served:
            unless_served.callback(self.blocks.free, request_id)
            if extra and not self.blocks.reserve(request_id, extra):
                return False
            reused = allocation.settle()
            request.set_prepopulated_prompt_len(reused, self.tokens_per_block)
            is_reusable = self.enable_block_reuse and not getattr(request, "is_dummy_request", False)
            self._served[request_id] = _Served(len(tokens), reused, is_reusable)
            unless_served.pop_all()
        return True

    def _prepare_generation(self, request: Any) -> bool:
        """Room for the token that is computed next, and its drafts. Nothing is taken while the last block has it."""
        request_id = request.py_request_id
        served = self._served_as(request)
        positions = served.positions + 1 + len(_drafts(request))
        self._check_length(positions)
        if not self.blocks.reserve(request_id, positions - self.blocks.length(request_id)):
            return False
        served.positions = served.step_end = positions
        served.is_generating = True
        return True

    def _confirm(self, request: Any) -> None:
        """The prepared step of a request has run."""
        served = self._served.get(_id_of(request))
        if served is None or served.step_end is None:
            return
        try:
            self._take_step(request, served, served.step_end)
        except ODD_REQUEST as error:
            served.fault = f"its last step was not confirmed: {self._fault(error)}"
        served.step_end = None

    def _take_step(self, request: Any, served: _Served, end: int) -> None:
        request_id = request.py_request_id
        if served.is_generating and (rewound := getattr(request, "py_rewind_len", 0)):
            self._rewind(request_id, served, rewound)
            end = min(end, served.positions)
        if not served.is_reusable:
            return
        known = self.blocks.length(request_id)
        if served.is_generating:
            end = min(end, len(request.get_tokens(0)) - 1)  # the newest token is sampled, and computed by the next step
        if known < end:
            self.blocks.append(request_id, request.get_tokens(0)[known:end])
        end = min(end, self.blocks.length(request_id))
        if end > served.computed and self.blocks.computed(request_id, served.computed, end):
            served.computed = end

    def _fault(self, error: Exception) -> str:
        """What an error says; its kind too where it was not meant to be read. An assertion of this pool is raised again: after
        one that a request has made the recount is right."""
        if isinstance(error, AssertionError) and self.verify():
            raise error
        return str(error) if isinstance(error, KVPoolError) else f"{type(error).__name__}: {error}"

    def _rewind(self, request_id: int, served: _Served, rewind_len: int) -> None:
        if not 0 <= rewind_len <= served.positions:
            raise InvalidArgument(f"rewind_len is {rewind_len!r}, expected 0..{served.positions}")
        positions, known = served.positions - rewind_len, self.blocks.length(request_id)
        if positions > known:
            self.blocks.keep_room(request_id, positions - known)
        else:
            self.blocks.rewind(request_id, known - positions)
        served.positions, served.computed = positions, min(served.computed, positions)
        if served.step_end is not None:
            served.step_end = min(served.step_end, positions)


def _drafts(request: Any) -> Sequence[int]:
    """The draft tokens that the request's next step verifies."""
    return getattr(request, "py_draft_tokens", None) or ()


def _id_of(request: Any) -> Any:
    """A request's id; the repr of one that is no key, by which nothing is served."""
    request_id = getattr(request, "py_request_id", None)
    try:
        hash(request_id)
    except TypeError:
        return repr(request_id)
    return request_id


def _check_count(request: Any, name: str) -> None:
    """A request's field that counts tokens."""
    value = getattr(request, name)
    if not isinstance(value, Integral) or value < 0:
        raise InvalidArgument(f"{name} is {value!r}, expected a number of tokens from 0")


def _check_beams(max_beam_width: int) -> None:
    if max_beam_width != 1:
        raise InvalidArgument(f"max_beam_width is {max_beam_width!r}, expected 1")


def _refuse(others: Mapping[str, object]) -> None:
    """TensorRT-LLM's arguments that a block pool has no use for must be absent, None or False."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise InvalidArgument(f"{name} is {value!r}, expected None: a block pool does not serve it")
