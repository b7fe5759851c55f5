"""DeviceSequence: a SparseSequence that attends on a device, which has a bounded part of its KV.

    device   first tokens and window of every layer │ staging: the middle blocks that were used last
    arena    everything that has left the window, with its summaries

The sequence stays what it is: pages, summaries, saves and leases are on the host, and recall is native. A step sends
its query there, stages the chosen blocks that are missing, attends on the device, and merges the estimate of the others.
Behind each step the next layer's blocks are staged by that layer's last query, on a thread and a stream of their own,
while the layer computes.

Imports torch, so nothing else in `kvpool_sparse` imports it, but for the attention of transformers. One thread at
a time; a prefetch has the sequence while it works, and each method waits for it first.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from types import TracebackType

import numpy as np
import torch

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool_sparse.arrays import as_blocks, as_items
from kvpool_sparse.config import SparseConfig
from kvpool_sparse.device.block_reader import BlockReader, Mask
from kvpool_sparse.device.partial_attention import (
    Part,
    attend_blocks,
    attend_tokens,
    merged,
    no_part,
    scaled_query,
)
from kvpool_sparse.device.prefetch import Prefetch
from kvpool_sparse.device.resident_tokens import ResidentTokens
from kvpool_sparse.device.slot_table import Numbers
from kvpool_sparse.device.staging import Staging
from kvpool_sparse.device.staging_area import StagingArea
from kvpool_sparse.device.tensors import plain_tensor_of, tensor_of, torch_dtype
from kvpool_sparse.results import TAIL_WEIGHT_MAX, Floats, Recall, SequenceLost
from kvpool_sparse.sequence import SparseSequence
from kvpool_sparse.turns import Turns, in_turn

STAGING_BLOCKS_MIN = 64


class DeviceSequence:
    """One sequence, whose results are tensors on its device. `sequence`: what it wraps; only its `stats` and properties
    are for others."""

    def __init__(
        self, sequence: SparseSequence, *, device: torch.device | str, staging_blocks: int | None = None
    ) -> None:
        """Takes the sequence over, with the tokens that it has. `staging_blocks`: blocks of one KV head, with keys and
        values, that the device has room for beside the first tokens and the window, for all layers together; as many
        as those take by default. A device "cpu" is served like any other, for tests: use the sequence itself there.

        Raises InvalidArgument, SequenceLost.
        """
        self._reader = BlockReader(sequence)
        self._reader.check_open()
        self.turns = Turns()
        self.sequence = sequence
        config = sequence.config
        self.device = _checked_device(device)
        if staging_blocks is None:
            resident = (config.init_tokens + config.local_tokens) // config.block_tokens
            staging_blocks = max(STAGING_BLOCKS_MIN, resident * self.layout.kv_heads * self.layout.layers)
        self.staging_blocks = staging_blocks
        self._resident = ResidentTokens(self.layout, config, self.device)
        area = StagingArea(self.layout, config.block_tokens, staging_blocks, self.device)
        self._staging = Staging(self._reader, area, self.layout, sequence.tally)
        self._prefetch = Prefetch()
        self._queries: dict[int, Floats] = {}  # the last one of each layer
        self._pid = os.getpid()
        for layer in range(self.layout.layers):
            self._restore(layer)

    def __repr__(self) -> str:
        return f"<DeviceSequence on {self.device}, {self._staging.table.used} blocks staged, of {self.sequence!r}>"

    def __enter__(self) -> "DeviceSequence":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def config(self) -> SparseConfig:
        """As `SparseSequence.config`."""
        return self.sequence.config

    @property
    def layout(self) -> Layout:
        """As `SparseSequence.layout`."""
        return self.sequence.layout

    @property
    def tokens(self) -> int:
        """Tokens whose KV every layer has."""
        return self.sequence.tokens

    @property
    def prefix_tokens(self) -> int:
        """As `SparseSequence.prefix_tokens`."""
        return self.sequence.prefix_tokens

    @property
    def is_shared(self) -> bool:
        """As `SparseSequence.is_shared`."""
        return self.sequence.is_shared

    @property
    def own_bytes(self) -> int:
        """As `SparseSequence.own_bytes`: memory of the host."""
        return self.sequence.own_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory that it holds: first tokens, window and one block for every layer, and staging.
        They do not change with the length; a step's workspace is bounded too, and comes and goes."""
        return self._resident.device_bytes + self._staging.area.device_bytes

    @in_turn
    def extend(self, tokens: object) -> None:
        """As `SparseSequence.extend`."""
        self._ready()
        self.sequence.extend(tokens)

    @in_turn
    def append(self, layer: int, k: object, v: object) -> None:
        """Append keys (after RoPE) and values, as `SparseSequence.append`: tensors of any device, or arrays.

        Copies them to the host, and what stays resident to the device. Raises InvalidArgument, SequenceLost.
        """
        keys, values = _on_host(k), _on_host(v)  # may wait for the device: a prefetch goes on meanwhile
        self._ready()
        self._reader.check_layer(layer)
        begin = self._reader.tokens(layer)
        new = self._tensor("k", k), self._tensor("v", v)
        with self._closed_where_lost():
            self.sequence.append(layer, keys, values)
        self._resident.write(layer, begin, *new)  # the host has them: an error here ends the sequence

    @in_turn
    def recall(self, layer: int, q: object) -> Recall:
        """As `SparseSequence.recall`: arrays on the host."""
        self._ready()
        with self._closed_where_lost():
            return self.sequence.recall(layer, q)

    @in_turn
    def fetch(self, layer: int, blocks: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of middle blocks by way of the staging area, `blocks` [kv_heads, n]: each [kv_heads, n *
        block_tokens, head_dim] on the device, a copy that is the caller's. Raises InvalidArgument, SequenceLost."""
        self._ready()
        self._reader.check_layer(layer)
        chosen = as_blocks(blocks, self.layout, self._reader.middle_blocks(layer))
        kv_heads, count = chosen.shape
        pairs, places = np.unique(chosen * kv_heads + np.arange(kv_heads)[:, None], return_inverse=True)
        block = (self.config.block_tokens, self.layout.head_dim)
        found = torch.empty((len(pairs), 2, *block), dtype=torch_dtype(self.layout), device=self.device)
        area = self._staging.area
        with torch.no_grad(), self._closed_where_lost():
            for piece in self._staging.pieces(layer, pairs // kv_heads, pairs % kv_heads):
                found[area.numbers(piece.places)] = area.read(piece.slots)
            self.sequence.tally.fetched_blocks += chosen.size
            both = found[area.numbers(places.reshape(-1))].reshape(kv_heads, count, 2, *block)
        keys, values = (both[:, :, plane].reshape(kv_heads, -1, block[1]) for plane in range(2))
        return keys, values

    @in_turn
    def dense(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens of a layer, each [kv_heads, tokens, head_dim] on the device: not bounded, for
        prompts. Raises InvalidArgument, SequenceLost."""
        self._ready()
        with self._closed_where_lost():
            keys, values = (_as_tensor(part, self.layout) for part in self.sequence.dense(layer))
        return keys.to(self.device), values.to(self.device)

    @in_turn
    def attend(self, layer: int, q: object) -> torch.Tensor:
        """Attention of one query over the layer's tokens: float32 [heads, head_dim] on the device; `q` [heads,
        head_dim] after RoPE, unscaled, a tensor of any device or an array.

        What `SparseSequence.attend` returns, but for rounding: full attention below the dense boundary and at a
        budget of 100 %, for which all blocks pass through the staging area. Raises InvalidArgument, SequenceLost.
        """
        host_q = _on_host(q)
        self._ready()
        query = self._reader.checked_query(layer, host_q)
        if not self._reader.tokens(layer):
            raise InvalidArgument(f"layer {layer} has no tokens, expected some to attend to")
        with torch.no_grad(), self._closed_where_lost():
            out = self._attended(layer, query)
        self._queries[layer] = query
        following = (layer + 1) % self.layout.layers
        if following != layer and following in self._queries:
            self._staging.area.begin_aside()
            self._prefetch.begin_job(functools.partial(self._foresee, following))
        return out

    @in_turn
    def settle(self) -> int:
        """As `SparseSequence.settle`."""
        self._ready()
        with self._closed_where_lost():
            return self.sequence.settle()

    @in_turn
    def fork(self, config: SparseConfig | None = None) -> "DeviceSequence":
        """A sequence with the same tokens, which goes its own way from here: pages on the host are shared as
        `SparseSequence.fork` says, which takes `config`, nothing on the device. Raises InvalidArgument, SequenceLost."""
        self._ready()
        with self._closed_where_lost():
            child = self.sequence.fork(config)
        try:
            return DeviceSequence(child, device=self.device, staging_blocks=self.staging_blocks)
        except BaseException:
            child.close()
            raise

    @in_turn
    def stats(self) -> dict[str, int | float]:
        """Counters of the sequence's steps, and what it holds. `staging_hit_rate`: of the blocks that steps wanted,
        the share that was staged; `overlap`: the share that the layer's step before wanted as well; both 1 where there
        were none."""
        if self._reader.is_open:
            self._ready()
        found = self.sequence.stats()
        return {
            **found,
            "device_bytes": self.device_bytes,
            "staging_slots": self._staging.table.slots,
            "staged_blocks": self._staging.table.used,
            "staging_hit_rate": _share(found["staging_hits"], found["staging_wanted"]),
            "overlap": _share(found["repeated_blocks"], found["compared_blocks"]),
        }

    def close(self) -> None:
        """End the sequence, its prefetch thread, and its memory on the device. Idempotent. Raises KVPoolError while
        another thread is in a call."""
        self.turns.check_end()
        if os.getpid() == self._pid:
            self._prefetch.close()
            self._staging.close()
            self._resident.close()
        self.sequence.close()

    def _ready(self) -> None:
        """Have the sequence and its staging area back from a prefetch. Raises KVPoolError where it is closed."""
        self._reader.check_open()
        self._prefetch.finish()
        self._staging.area.end_aside()

    def _foresee(self, layer: int) -> None:
        """The prefetch of a layer, on its thread."""
        with self._staging.area.aside():
            self._staging.foresee(layer, self._queries[layer], lambda: self._prefetch.is_stopping)

    @contextlib.contextmanager
    def _closed_where_lost(self) -> Iterator[None]:
        try:
            yield
        except SequenceLost:
            self.close()
            raise

    def _restore(self, layer: int) -> None:
        """Have the resident tokens that the sequence has already."""
        for span in self._resident.spans(0, self._reader.tokens(layer)):
            items = self._reader.steadily(functools.partial(self._reader.read_span, layer, span))
            keys, values = tensor_of(items, self.layout)
            self._resident.write(layer, span.start, keys, values)

    def _attended(self, layer: int, host_query: Floats) -> torch.Tensor:
        query = scaled_query(plain_tensor_of(host_query).to(self.device), self.layout.kv_heads)
        resident = [no_part(query)]
        for keys, values in self._resident.parts(layer, self._reader.window(layer)):
            resident += attend_tokens(query, keys, values)
        found = self._reader.steadily(lambda: self._reader.recall(layer, host_query))
        wanted = self._reader.wanted(layer, found)
        self._staging.note_step(layer, wanted)
        part = self._over(layer, query, wanted, resident)
        if found is not None and found.tail is not None:
            return self._with_tail(layer, query, found, part, resident=resident).reshape(host_query.shape)
        return part[1].reshape(host_query.shape)

    def _over(self, layer: int, query: torch.Tensor, wanted: Mask, resident: list[Part]) -> Part:
        """Attention over resident tokens and the wanted blocks."""
        blocks, heads = np.nonzero(wanted)
        parts, area = list(resident), self._staging.area
        for piece in self._staging.pieces(layer, blocks, heads):
            of_head = heads[piece.places]
            parts.append(
                attend_blocks(query, area.read(piece.slots), area.numbers(of_head), area.numbers(_ranks(of_head)))
            )
        return merged(parts)

    def _with_tail(
        self, layer: int, query: torch.Tensor, found: Recall, part: Part, *, resident: list[Part]
    ) -> torch.Tensor:
        """The value of a part merged with the estimate of what was not read, or read whole where that is unreliable
        and weighs much."""
        assert found.tail is not None
        shape = query.shape[:2]
        logits = np.where(found.is_dense[:, None], np.float32(-np.inf), found.tail[0].reshape(shape))
        if np.isneginf(logits).all():
            return part[1]
        tail = plain_tensor_of(logits).to(self.device)
        logit, value = merged([part, (tail, plain_tensor_of(found.tail[1]).to(self.device).reshape(query.shape))])
        if found.is_doubtful.any():
            weighs = (torch.exp(tail - logit) > TAIL_WEIGHT_MAX).any(dim=1).cpu().numpy()
            is_heavy = weighs & found.is_doubtful
            if is_heavy.any():
                every = self._reader.wanted(layer, None) & is_heavy
                _, whole = self._over(layer, query, every, resident)
                heavy = plain_tensor_of(is_heavy).to(self.device)
                value[heavy] = whole[heavy]
                self.sequence.tally.dense_heads += int(is_heavy.sum())
        return value

    def _tensor(self, name: str, items: object) -> torch.Tensor:
        if isinstance(items, torch.Tensor):
            return items
        return tensor_of(as_items(name, items, self.layout), self.layout)


def _on_host(array: object) -> object:
    return array.detach().cpu() if isinstance(array, torch.Tensor) else array


def _as_tensor(array: object, layout: Layout) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else tensor_of(np.asarray(array), layout)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _checked_device(device: torch.device | str) -> torch.device:
    """A device that is there, by its number, so that it stays the same whatever is current later. Raises InvalidArgument."""
    try:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.type == "meta":
            raise RuntimeError("it has no memory")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument(f"device is {str(device)!r}, expected one that torch has here: {reason}") from None
    return device


def _ranks(heads: Numbers) -> Numbers:
    """The number of each entry among those of its head."""
    order = np.argsort(heads, kind="stable")
    in_order = heads[order]
    ranks = np.empty(len(heads), np.int64)
    ranks[order] = np.arange(len(heads)) - np.searchsorted(in_order, in_order)
    return ranks
