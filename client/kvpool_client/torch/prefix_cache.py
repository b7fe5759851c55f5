"""Prefix cache over an engine's paged KV tensors: restores what the pool has of a prompt, stores what was computed.

Not an engine and not an allocator: block tables are the caller's. Invariant: at least one token of a prompt is always
left to compute, because the engine needs its logits. Copies per byte: one in each direction, by the Pool's native threads. Any
thread, as the Pool; what `restore` and `store` answer, one thread at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layout import Layout
from kvpool_client.arguments import check_no_groups
from kvpool_client.copying.cache import as_ids
from kvpool_client.key_chain import Extra, as_tokens
from kvpool_client.pool import Pool
from kvpool_client.save import Save, publish_each
from kvpool_client.torch.hooks import announced, gated
from kvpool_client.torch.restored import Restored, prefill_batch

Integers = Sequence[int] | torch.Tensor | npt.NDArray[np.int32] | npt.NDArray[np.int64]
T = TypeVar("T")
SKIP_BLOCK = -1


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt for `PagedPrefixCache.prefill`.

    `tokens`: integers [n]. `block_ids`: its block table, integers, a block of its own for each `block_tokens` tokens.
    `held_tokens`: leading tokens whose KV the engine's own cache holds in those blocks already, whole blocks. `salt`, `adapter`
    and `extra` keep prefixes of tenants, LoRA adapters and images apart (see `Pool.keys`).
    """

    tokens: Integers
    block_ids: Integers
    held_tokens: int = 0
    salt: bytes | None = None
    adapter: str = ""
    extra: Sequence[Extra] = ()


def layout_of(layers: Sequence[torch.Tensor], chunk_tokens: int = 256, *, rank: int = 0, world: int = 1) -> Layout:
    """The Layout of an engine's paged KV, for `connect`.

    `layers`: a tensor for each layer of this rank, of one shape and of the layout's dtype: [2, blocks, block_tokens, kv_heads,
    head_dim], [blocks, 2, block_tokens, kv_heads, head_dim], or with one plane (MLA) [blocks, block_tokens, head_dim].
    `chunk_tokens`: tokens in a chunk, which the pool stores as a whole, a multiple of `block_tokens`. `rank` of `world`: each
    rank has chunks of its own. Raises LayoutMismatch for other shapes.
    """
    if not layers or layers[0].dim() not in (3, 5):
        shape = tuple(layers[0].shape) if layers else ()
        raise LayoutMismatch(f"layers have shape {shape}, expected [2, blocks, block_tokens, kv_heads, head_dim]")
    first = layers[0]
    return Layout(
        layers=len(layers),
        kv_heads=first.shape[-2] if first.dim() == 5 else 1,
        head_dim=first.shape[-1],
        dtype=str(first.dtype).removeprefix("torch."),
        chunk_tokens=chunk_tokens,
        planes=2 if first.dim() == 5 else 1,
        rank=rank,
        world=world,
    )


class PagedPrefixCache:
    """One engine's paged KV in torch tensors, and the pool behind it.

        prefix = PagedPrefixCache(pool, layers, block_tokens=16)
        logits = prefix.prefill([Prompt(tokens, block_ids)], attention_modules, forward)

    `prefill` does all of it for a batch; `restore` and `store` are its parts, for engines that compute a prompt in several
    passes. It keeps the tensors alive: after they are allocated again, a new one is needed. Threads: any, as the Pool; what
    `restore` and `store` answer is used by one thread at a time.
    """

    def __init__(self, pool: Pool, layers: Sequence[torch.Tensor], block_tokens: int, form: str = "auto") -> None:
        """`pool`: with the layout of these tensors (`layout_of`). `layers`: a tensor for each layer, of the layout's dtype, on
        the host or a CUDA device: [2, blocks, block_tokens, kv_heads, head_dim], [blocks, 2, block_tokens, kv_heads, head_dim],
        or with one plane [blocks, block_tokens, head_dim]. `block_tokens`: tokens in a block. `form`: "kv_first" or
        "block_first", the first two shapes; "auto" takes the one that fits.

        Raises LayoutMismatch for tensors that do not fit the Pool's layout or fit both forms, InvalidArgument for a Pool with
        groups.
        """
        check_no_groups(pool.layout)
        self._pool = pool
        self._cache = pool.register(layers, block_tokens=block_tokens, form=form)
        self._layers = len(self._cache.layers)
        self._block_tokens = block_tokens
        self._chunk_tokens = pool.layout.chunk_tokens
        self._chunk_blocks = self._chunk_tokens // block_tokens

    def __repr__(self) -> str:
        return f"<PagedPrefixCache {self._cache!r} on {self._pool!r}>"

    def restore(
        self,
        tokens: Integers,
        block_ids: Integers,
        held_tokens: int = 0,
        *,
        salt: bytes | None = None,
        adapter: str = "",
        extra: Sequence[Extra] = (),
    ) -> Restored:
        """Look the prompt up, lease the hit and start loading it into the blocks of `block_ids`; returns at once.

        `tokens` [n], of one prompt, and `block_ids` [blocks], its block table, are integers: lists, arrays of int32 or int64,
        or tensors on any device.
        The table has a block of its own for each `block_tokens` tokens, at least for the full chunks; what is behind them,
        as −1 that fills a row, is not looked at.
        `held_tokens`: leading tokens that the engine's own cache holds in those blocks already; their blocks are not
        written. Use the result as a context around the prefill and the save that follows it. Raises InvalidArgument for
        tokens of a batch, [1, n], for a block table that is too short or has −1 or a block twice, and for held tokens that end
        inside a block.
        """
        prompt = as_tokens(_host_array(tokens))
        is_count = isinstance(held_tokens, (int, np.integer)) and held_tokens % self._block_tokens == 0
        if not is_count or not 0 <= held_tokens < max(1, len(prompt)):
            raise InvalidArgument(
                f"held_tokens is {held_tokens!r}, expected a multiple of {self._block_tokens} below {len(prompt)} tokens"
            )
        keys = self._pool.keys(prompt[: max(0, len(prompt) - 1)], salt=salt, adapter=adapter, extra=extra)
        ids = self._block_table(block_ids, len(keys))
        self._cache.checked_block_ids(
            ids, len(keys), may_skip=False
        )  # held ones are blocks too, and a miss shows no fault
        hit = self._pool.lookup(keys)
        if hit.tokens <= held_tokens:
            return Restored(held_tokens, layers=self._layers, held_tokens=held_tokens)
        lease = self._pool.acquire(hit)
        if lease.tokens <= held_tokens:
            lease.release()
            return Restored(held_tokens, layers=self._layers, held_tokens=held_tokens)
        ids[: held_tokens // self._block_tokens] = SKIP_BLOCK
        first_chunk = held_tokens // self._chunk_tokens
        target = ids[first_chunk * self._chunk_blocks : lease.chunks * self._chunk_blocks]
        load = self._pool.load(lease, self._cache, target, first_chunk=first_chunk)
        return Restored(lease.tokens, layers=self._layers, held_tokens=held_tokens, lease=lease, load=load)

    def store(
        self,
        tokens: Integers,
        block_ids: Integers,
        *,
        salt: bytes | None = None,
        adapter: str = "",
        extra: Sequence[Extra] = (),
    ) -> Save:
        """Reserve slots for every full chunk of `tokens` that the pool lacks; copies nothing before it is announced.

        Announce layers as they are written (`Save.layer`, or `announced`) and commit, or commit at once when all KV is
        in place. Blocks must not change between announcement and commit. `tokens` [n] and `block_ids` [blocks] are integers
        (int32, int64), as for `restore`: in a pass that does not reach the prompt's end, the tokens up to where the pass ends.
        Raises InvalidArgument for a batch, [1, n], and for a block table that is too short or has −1 or a block twice.
        """
        keys = self._pool.keys(_host_array(tokens), salt=salt, adapter=adapter, extra=extra)
        return self._pool.save(keys, self._cache, self._block_table(block_ids, len(keys)))

    def prefill(
        self, prompts: Sequence[Prompt], modules: Iterable[torch.nn.Module], forward: Callable[[list[int]], T]
    ) -> T:
        """Prefill a batch of prompts in one forward pass: load what the pool has of each, compute the rest, save what is new.
        Returns what `forward` returned.

        `forward(starts)` computes each prompt from its token number `starts[i]` on, in one forward pass, in which each of
        `modules` (one for each layer, in their order) reads and writes its layer's KV. It is called a second time, with lower
        numbers, where a load brought less than was promised; what the first call computed is not saved then.

        Raises InvalidArgument as `restore`, `store`, `gated` and `announced` do, and what `forward` raises: nothing is saved
        then. Never because of the daemon. One thread.
        """
        listed = list(modules)
        ends = [len(prompt.tokens) for prompt in prompts]
        with ExitStack() as stack:
            batch = [stack.enter_context(self._restored(prompt)) for prompt in prompts]
            stack.enter_context(gated(batch, listed))

            def compute(starts: list[int]) -> tuple[T, list[Save]]:
                saves = [stack.enter_context(self._saved(prompt)) for prompt in prompts]
                with announced(saves, listed, ends):
                    return forward(starts), saves

            answer, saves = prefill_batch(batch, compute)
            publish_each(saves)
        return answer

    def _restored(self, prompt: Prompt) -> Restored:
        return self.restore(
            prompt.tokens,
            prompt.block_ids,
            prompt.held_tokens,
            salt=prompt.salt,
            adapter=prompt.adapter,
            extra=prompt.extra,
        )

    def _saved(self, prompt: Prompt) -> Save:
        return self.store(prompt.tokens, prompt.block_ids, salt=prompt.salt, adapter=prompt.adapter, extra=prompt.extra)

    def _block_table(self, block_ids: Integers, chunks: int) -> npt.NDArray[np.int64]:
        """The blocks of the leading chunks, as an array of its own; what is behind them is padding."""
        ids = as_ids(_host_array(block_ids))
        needed = chunks * self._chunk_blocks
        if len(ids) < needed:
            raise InvalidArgument(f"block_ids has {len(ids)} ids, expected at least {needed} for {chunks} chunks")
        return ids[:needed].copy()


def _host_array(values: Integers) -> object:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values
