"""A small real engine: a Llama with random weights, paged KV, chunked prefill and greedy decoding, with kvpool behind it.

Why cold and warm give the same bits and not merely close ones: prefill runs in steps of one chunk, counted from token 0.
A restored prefix is a whole number of chunks, so the steps that a warm engine still computes have the same tokens, the
same shapes and the same KV in front of them as in a cold one, and every kernel sums in the same order. For the same
reason only KV that was computed by such steps is stored, never that of decoding, which runs token by token. An engine
without the need for equal bits may store both. One thread.
"""

import hashlib
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo.paged_kv import PagedKV, PagedSequence
from kvpool_client.torch import PagedPrefixCache, announced, gated

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Geometry of the model. The default is large enough for a prefill of 2,000 tokens to take seconds on a core."""

    vocabulary: int
    layers: int = 8
    hidden: int = 768
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 64
    feed_forward: int = 2048
    positions: int = 8192


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one prompt. `logits_digest` is taken over the bits of the first token's logits."""

    tokens: list[int]
    prompt_tokens: int
    reused_tokens: int
    stored_chunks: int
    ttft_s: float
    logits_digest: str


def build_model(shape: Shape, seed: int, *, device: str = "cpu", dtype: str = "float32") -> LlamaForCausalLM:
    """The model, its weights drawn on the spot: the same seed gives the same weights in every process.

    The weights are wider than at the start of a training: queries and keys get a deviation of 1.7 (a guess), attention
    is then peaked, so that an answer depends on single tokens of the prompt and wrong KV changes it.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        initializer_range=1.7 / math.sqrt(shape.hidden),
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).eval()
    return model


class Engine:
    """Answers prompts one after the other."""

    def __init__(self, model: LlamaForCausalLM, kv: PagedKV, prefix: PagedPrefixCache, *, step_tokens: int) -> None:
        """`step_tokens`: tokens in a prefill step, the Pool's chunk_tokens for equal bits."""
        self._model = model
        self._kv = kv
        self._prefix = prefix
        self._step_tokens = step_tokens
        # transformers has renamed it in one of the releases that are supported.
        names = inspect.signature(LlamaForCausalLM.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._attention = [layer.self_attn for layer in model.model.layers]

    @torch.inference_mode()
    def answer(self, prompt: list[int], count: int, on_step: Callable[[int], None] = lambda _done: None) -> Answer:
        """`count` greedy tokens after the prompt. `on_step(done)` is called as the prompt's KV gets ready."""
        started = time.perf_counter()
        with self._kv.borrow(len(prompt) + count) as blocks:
            with self._prefix.restore(prompt, blocks) as restored, gated(restored, self._attention):
                logits, stored = restored.prefill(lambda start: self._prefill(prompt, start, blocks, on_step))
                tokens = [int(logits.argmax())]
                ttft_s = time.perf_counter() - started
            sequence = PagedSequence(self._kv, blocks, len(prompt))
            while len(tokens) < count:
                tokens.append(int(self._forward(tokens[-1:], sequence).argmax()))
        digest = hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()
        return Answer(tokens, len(prompt), restored.tokens, stored, ttft_s, digest)

    def _prefill(
        self, prompt: list[int], start: int, blocks: list[int], on_step: Callable[[int], None]
    ) -> tuple[torch.Tensor, int]:
        """Compute the prompt from token `start` on; each step hands its layers to a save once they are written, and publishes
        its chunk. The logits of the last token, and how many chunks were stored."""
        sequence, stored = PagedSequence(self._kv, blocks, start), 0
        for first in range(start, len(prompt), self._step_tokens):
            on_step(first)
            end = min(len(prompt), first + self._step_tokens)
            save = self._prefix.store(prompt[:end], blocks)
            with announced(save, self._attention, end):
                logits = self._forward(prompt[first:end], sequence)
            stored += save.commit().stored
        on_step(len(prompt))
        return logits, stored

    def _forward(self, tokens: list[int], sequence: PagedSequence) -> torch.Tensor:
        """One forward pass over new tokens of a sequence; the logits of the last."""
        device = self._model.device
        positions = torch.arange(sequence.length, sequence.length + len(tokens), device=device)
        output = self._model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: sequence.cache},
        )
        sequence.length += len(tokens)
        logits: torch.Tensor = output.logits[0, -1]
        return logits
