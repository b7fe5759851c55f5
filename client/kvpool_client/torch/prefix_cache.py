"""Prefix cache over an engine's paged KV tensors: restores what the pool has of a prompt, stores what was computed.

Not an engine and not an allocator: block tables are the caller's. Invariant: at least one token of a prompt is always
left to compute, because the engine needs its logits. Copies per byte: one in each direction, by the Pool's native threads. Any
thread, as the Pool; what `restore` and `store` answer, one thread at a time.
"""

import math
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
from kvpool_client.copying.cache import SKIP_BLOCK, as_ids
from kvpool_client.key_chain import Extra, as_tokens
from kvpool_client.pool import Pool
from kvpool_client.torch.hooks import announced, gated
from kvpool_client.torch.restored import PrefixShortened, Restored, prefill_batch
from kvpool_client.verbs.save import Save, publish_each

Integers = Sequence[int] | torch.Tensor | npt.NDArray[np.int32] | npt.NDArray[np.int64]
T = TypeVar("T")


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
    listed = list(layers)
    shapes = [tuple(getattr(layer, "shape", ())) for layer in listed] or [()]
    dimensions, wrong = len(shapes[0]), next((shape for shape in shapes if shape != shapes[0]), None)
    if dimensions not in (3, 5) or wrong is not None:
        found = f"layers have shape {shapes[0]}" if wrong is None else f"layers have shapes {shapes[0]} and {wrong}"
        raise LayoutMismatch(
            f"{found}, expected a tensor [2, blocks, block_tokens, kv_heads, head_dim] for each layer, with K and V in one: "
            "k, v = kv[0], kv[1] are views of it"
        )
    return Layout(
        layers=len(listed),
        kv_heads=shapes[0][-2] if dimensions == 5 else 1,
        head_dim=shapes[0][-1],
        dtype=str(listed[0].dtype).removeprefix("torch."),
        chunk_tokens=chunk_tokens,
        planes=2 if dimensions == 5 else 1,
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
        held_tokens = int(held_tokens)
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

        `forward(starts)` computes each prompt from its token number `starts[i]` on **up to its end**, in one forward pass, in
        which each of `modules` (one for each layer, in their order) reads and writes its layer's KV. At least one token of each
        prompt is left to it. What is saved is what the prompts name: of a prompt that is computed to `end` alone it is
        `Prompt(tokens[:end], …)`. It is called a second time, with lower numbers, where a load brought less than was promised;
        what the first call computed is not saved then.

        Raises InvalidArgument as `restore`, `store`, `gated` and `announced` do, and for a block that two prompts have though
        their tokens up to it differ; and what `forward` raises: nothing is saved then. Never because of the daemon. One thread.
        """
        if not isinstance(prompts, Iterable):
            raise InvalidArgument(f"prompts is {type(prompts).__name__}, expected a list of Prompt(tokens, block_ids)")
        asked = list(prompts)
        for number, prompt in enumerate(asked):
            if not isinstance(prompt, Prompt):
                raise InvalidArgument(
                    f"prompt {number} is {type(prompt).__name__}, expected a list of Prompt(tokens, block_ids)"
                )
        if not asked:
            return forward([])
        self._check_apart(asked)
        listed = list(modules)
        with ExitStack() as stack:
            batch = [stack.enter_context(self._restored(prompt)) for prompt in asked]
            stack.enter_context(gated(batch, listed))

            def compute(starts: list[int]) -> tuple[T, list[Save]]:
                saves = [stack.enter_context(self._saved(prompt)) for prompt in asked]
                with announced(saves, listed, [len(prompt.tokens) for prompt in asked]):
                    answer = forward(starts)
                    for restored, start in zip(batch, starts, strict=True):
                        if restored.tokens < start:  # it went on after a wait that was False
                            raise PrefixShortened(restored)
                    return answer, saves

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

    def _check_apart(self, prompts: Sequence[Prompt]) -> None:
        """Check that a block which two prompts have is one of a head that they share: else one would get the other's KV."""
        size = self._block_tokens
        ids = [as_ids(_host_array(prompt.block_ids))[: -(-len(prompt.tokens) // size)] for prompt in prompts]
        every = np.concatenate([np.empty(0, np.int64), *ids])
        if len(np.unique(every)) == len(every):
            return
        heads = _CommonHeads(prompts)
        owners: dict[int, tuple[int, int]] = {}
        for number, table in enumerate(ids):
            for place, block in enumerate(table.tolist()):
                other, first = owners.setdefault(block, (number, place))
                if other == number or block < 0:
                    continue
                end = (place + 1) * size
                if first != place or heads.tokens(other, number) < end:
                    raise InvalidArgument(
                        f"prompts {other} and {number} have block {block} at places {first} and {place} of their block_ids, "
                        f"expected blocks of their own where their first {end} tokens, or what separates them, differ"
                    )

    def _block_table(self, block_ids: Integers, chunks: int) -> npt.NDArray[np.int64]:
        """The blocks of the leading chunks, as an array of its own; what is behind them is padding."""
        ids = as_ids(_host_array(block_ids))
        needed = chunks * self._chunk_blocks
        if len(ids) < needed:
            raise InvalidArgument(f"block_ids has {len(ids)} ids, expected at least {needed} for {chunks} chunks")
        return ids[:needed].copy()


class _CommonHeads:
    """Leading tokens that two prompts have in common, with the same KV."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._tokens = [as_tokens(_host_array(prompt.tokens)) for prompt in prompts]
        self._scopes = [(prompt.salt, prompt.adapter) for prompt in prompts]
        self._extra = [set(prompt.extra) for prompt in prompts]
        self._known: dict[tuple[int, int], float] = {}

    def tokens(self, one: int, other: int) -> float:
        """Of these two prompts, by number; infinite where they are equal."""
        if (one, other) not in self._known:
            self._known[one, other] = self._count(one, other)
        return self._known[one, other]

    def _count(self, one: int, other: int) -> float:
        if self._scopes[one] != self._scopes[other]:
            return 0
        pair = self._tokens[one], self._tokens[other]
        length = min(map(len, pair))
        differing = np.flatnonzero(pair[0][:length] != pair[1][:length])
        ends = [first for first, _, _ in self._extra[one] ^ self._extra[other]]  # of content that only one has
        ends += differing[:1].tolist() or ([length] if len(pair[0]) != len(pair[1]) else [])
        return min(ends, default=math.inf)


def _host_array(values: Integers) -> object:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values
