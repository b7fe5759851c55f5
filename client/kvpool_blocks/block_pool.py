"""Block pool: paged KV of a home-made engine in device tensors, with prefix reuse and the node's pool behind it.

    allocate ─► the engine computes, `append` for each generated token ─► computed ─► free
       │ leading blocks shared with the tree; the head of one more block copied; or chunks loaded from the node's pool
       └ None: no room now

A block is *free*, *private* (in block tables, not in the tree), or *in the tree* (computed; in any number of tables). Rules:

1. A block is in the tree only after `computed` was called for its tokens: then its KV is in place, or queued on the device.
2. A block in the tree, or in two tables, is never written. Whoever appends to one gets a copy of its computed head and
   drops its reference (copy-on-write); the last one with a private block writes in place. A fork shares what is computed
   and nothing else.
3. A full pool evicts idle leaves (`eviction_order`), each saved to the node's pool before, if it is not there yet:
   asynchronously and bounded (`node_link`). One call waits for that at most `offload_wait_s`, then drops what is not saved
   yet.
4. No room is a result (None, False), and then nothing has changed but idle blocks that were evicted. Only a caller's
   mistake raises: tokens that no empty pool has blocks for are one.

`num_free_blocks` counts free and idle blocks; the few that are just being offloaded are among them, so an allocation that
fits may still be refused until they are saved, and succeeds at one of the next steps. The cost of a call depends on its own
request's blocks, not on the pool's. The engine's thread; `Allocation.wait_layer` may run on another one meanwhile.
"""

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.clock import Clock, MonotonicClock
from kvpool.errors import InvalidArgument
from kvpool.states import TokenRange
from kvpool_blocks.allocation import Allocation
from kvpool_blocks.block_memory import BlockMemory, BlockShape, dtype_name
from kvpool_blocks.node_link import NodeLink
from kvpool_blocks.paths import Paths
from kvpool_blocks.recount import recount
from kvpool_blocks.references import References
from kvpool_blocks.room import Room
from kvpool_blocks.sequence import Retention, Sequence
from kvpool_blocks.tree.prefix_tree import PrefixTree
from kvpool_blocks.tree.scope import Scope
from kvpool_client.arguments import as_index, check_no_groups, check_scope
from kvpool_client.key_chain import as_tokens
from kvpool_client.pool import Pool
from kvpool_client.retention import check_retention
from kvpool_client.torch.restored import Restored

if TYPE_CHECKING:
    import torch


# The longest wait of one call for offloads. A guess: an engine's step takes a hundredth of it.
WAIT_S_MAX = 10.0


class BlockPool:
    """Blocks of KV for an engine's requests, in tensors of its own: block tables, shared prefixes, copy-on-write, room.

        blocks = BlockPool(num_blocks=4096, tokens_per_block=16, device="cuda", pool=pool)
        allocation = blocks.allocate(request_id, prompt)      # None: no room now
        …the engine computes from allocation.reused_tokens on, into blocks.buffers(layer)…
        blocks.computed(request_id, allocation.reused_tokens, len(prompt))
        blocks.append(request_id, [token])                    # for each generated token, then `computed` again
        blocks.free(request_id)

    A layer's tensor is [num_blocks, 2, tokens_per_block, kv_heads, head_dim], zeroed at the start; a block table has indices
    into its first dimension. Where there is no room now, `allocate` and `fork` answer None, `append` and `reserve` False,
    and nothing has changed. Raises InvalidArgument for what can never be: an unknown request, tokens that the whole pool has
    no blocks for, any verb after `close`.

    Threads: the engine's one. `Allocation.wait_layer` may run on another one meanwhile.

    Invariant: `verify` recounts it.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        tokens_per_block: int,
        device: "str | torch.device",
        pool: Pool | None = None,
        layers: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dtype: object = None,
        clock: Clock | None = None,
        offload_wait_s: float = 0.02,
    ) -> None:
        """`num_blocks` blocks of `tokens_per_block` tokens each, in torch tensors on `device`.

        `pool`: the node's pool (`kvpool_client.connect`), whose chunks are loaded and saved: its layout has no groups, and a
        multiple of `tokens_per_block` as `chunk_tokens`. `layers`, `kv_heads`, `head_dim` and `dtype` (torch's, or its name)
        are those of its layout, or of this rank's share of it, and need not be named; without a pool all four must be.
        `offload_wait_s`: the longest time, in seconds from 0 to 10, that one call waits for blocks to be saved before it drops
        them. `clock`: for tests.

        Raises InvalidArgument for a value that cannot be, LayoutMismatch for a geometry that is not that of the pool.
        """
        if (
            isinstance(offload_wait_s, bool)
            or not isinstance(offload_wait_s, (int, float))
            or not 0 <= offload_wait_s <= WAIT_S_MAX
        ):
            raise InvalidArgument(f"offload_wait_s is {offload_wait_s!r}, expected seconds from 0 to {WAIT_S_MAX:g}")
        named = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
        shape = BlockShape(num_blocks=num_blocks, tokens_per_block=tokens_per_block, **_geometry(named, pool))
        self.shape = shape
        self._size = shape.tokens_per_block
        self._clock = clock or MonotonicClock()
        self._memory = BlockMemory(shape, device)
        self._references = References(shape.num_blocks)
        self._tree = PrefixTree()
        self._paths = Paths(self._tree, self._references, self._clock)
        self._link = NodeLink(
            pool, self._memory, self._tree, tokens_per_block=self._size, on_unpinned=self._paths.settle_nodes
        )
        self._room = Room(self._references, self._tree, self._link, clock=self._clock, wait_s=offload_wait_s)
        self._sequences: dict[Hashable, Sequence] = {}
        self._counts = {"reused_tokens": 0, "copied_blocks": 0}
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._sequences)} requests"
        return f"<BlockPool {self.num_free_blocks}/{self.shape.num_blocks} blocks free, {state}>"

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses: free ones, and idle ones of the prefix tree."""
        return self._room.blocks

    def buffers(self, layer: int) -> "torch.Tensor":
        """A layer's KV in `dtype`, [num_blocks, 2, tokens_per_block, kv_heads, head_dim], K before V: the same tensor every
        time. Raises InvalidArgument for a layer that is not there."""
        layer = as_index("layer", layer, self.shape.layers - 1)
        return self._memory.layers[layer]

    def allocate(
        self,
        request_id: Hashable,
        tokens: object,
        *,
        retention: Items[TokenRange] = (),
        decode_priority: int | None = None,
        decode_duration_s: float | None = None,
        salt: bytes | None = None,
        adapter: str = "",
        has_logits: bool = False,
    ) -> Allocation | None:
        """Blocks for a whole prompt, with the longest prefix that is reusable; None where there is no room now.

        `request_id`: any hashable name that no request has; `tokens`: at least one token id, a list or an int32 or int64 array.
        `retention`, `decode_priority`, `decode_duration_s`: as `Pool.save` takes them. `salt`, `adapter`: prefixes with
        different ones are never shared. `has_logits`: the engine has the logits of this very prompt, so that its last token
        may be reused too; without them it is left to compute. Raises InvalidArgument, and for a prompt that needs more blocks
        than the whole pool has.
        """
        self._check_open()
        ids = as_tokens(tokens)
        if request_id in self._sequences:
            raise InvalidArgument(f"request {request_id!r} is allocated already")
        if not len(ids):
            raise InvalidArgument(f"request {request_id!r} has no tokens, expected at least one")
        check_retention(retention, len(ids), decode_priority, decode_duration_s)
        check_scope(b"" if salt is None else salt, adapter)
        self._check_fits(request_id, len(ids))
        wanted = Retention(tuple(retention), decode_priority, decode_duration_s)
        sequence = Sequence(Scope(None if salt is None else bytes(salt), adapter), wanted, self._size)
        sequence.extend(ids)
        sequence.prompt_tokens = len(ids)
        self._link.advance()
        restored = self._begin(sequence, len(ids) if has_logits else len(ids) - 1)
        if restored is None:
            return None
        self._sequences[request_id] = sequence
        sequence.load = restored
        self._counts["reused_tokens"] += restored.tokens
        return Allocation(sequence, restored)

    def append(self, request_id: Hashable, tokens: object) -> bool:
        """Append tokens, whose KV the engine computes next. False where there is no room now: nothing was appended. Raises
        InvalidArgument for more tokens than the whole pool has blocks for."""
        sequence = self._sequence(request_id)
        ids = as_tokens(tokens)
        if not self._make_slots(request_id, sequence, sequence.length + len(ids)):
            return False
        sequence.extend(ids)
        return True

    def reserve(self, request_id: Hashable, tokens: int) -> bool:
        """Room for `tokens` positions behind the known tokens, for drafts or tokens not sampled yet. False: no room now. Raises
        InvalidArgument for more positions than the whole pool has blocks for."""
        sequence = self._sequence(request_id)
        _check_tokens(tokens, None)
        return self._make_slots(request_id, sequence, sequence.length + tokens)

    def keep_room(self, request_id: Hashable, tokens: int) -> None:
        """Of the room behind the known tokens, keep that of the first `tokens` positions and give the rest back.

        The blocks that are kept stay where they are, with the KV of drafts that is in them. Raises InvalidArgument for more
        than there is.
        """
        sequence = self._sequence(request_id)
        _check_tokens(tokens, sequence.slots - sequence.length)
        sequence.slots = sequence.length + tokens
        self._drop_blocks(sequence, -(-sequence.slots // self._size))

    def computed(self, request_id: Hashable, start: int, end: int) -> bool:
        """The engine has computed the KV of tokens `start` up to `end`: their full blocks are reusable from now on.

        False, and nothing is taken, where `start` is behind the KV that is in place: a load came shorter than it was promised,
        and prefill has to begin again at `Allocation.reused_tokens`. Waits for a load that still runs. Raises InvalidArgument
        for a range that is not within the request's tokens.
        """
        sequence = self._sequence(request_id)
        are_counts = isinstance(start, (int, np.integer)) and isinstance(end, (int, np.integer))
        if not are_counts or not 0 <= start <= end <= sequence.length:
            raise InvalidArgument(
                f"computed tokens are {start!r} to {end!r} of request {request_id!r}, expected a range within {sequence.length}"
            )
        self._settle(sequence)
        if start > sequence.computed:
            return False
        sequence.computed = max(sequence.computed, end)
        self._publish(sequence)
        return True

    def rewind(self, request_id: Hashable, tokens: int) -> None:
        """Take the last `tokens` tokens back, and all room behind them, with what is computed there (`keep_room` keeps it).
        Raises InvalidArgument for more than there are."""
        sequence = self._sequence(request_id)
        _check_tokens(tokens, sequence.length)
        self._settle(sequence)
        length = sequence.length - tokens
        blocks, rest = divmod(length, self._size)
        blocks += rest > 0
        is_own = len(sequence.path) >= blocks > 0 and sequence.path[blocks - 1].block == sequence.blocks[blocks - 1]
        # A part block that the tree has keeps its node, until `append` copies it.
        self._paths.cut(sequence, blocks if not rest or is_own else blocks - 1)
        sequence.truncate(length)
        if sequence.load is not None:
            sequence.load.drop_tokens(length)
        self._drop_blocks(sequence, blocks)

    def fork(self, request_id: Hashable, new_id: Hashable) -> Allocation | None:
        """A second request with the same tokens, which shares the computed blocks; None where there is no room now.

        What is allocated and not computed gets blocks of its own. A load that still runs is not waited for, and not shared.
        Raises InvalidArgument for a request that is not there, or a new one that is.
        """
        sequence = self._sequence(request_id)
        if new_id in self._sequences:
            raise InvalidArgument(f"request {new_id!r} is allocated already")
        if sequence.restoring is not None and sequence.restoring.has_ended:
            self._settle(sequence)
        fork = Sequence(sequence.scope, sequence.retention, self._size)
        fork.extend(sequence.token_ids(0, sequence.length))
        fork.prompt_tokens = sequence.prompt_tokens
        full, rest = divmod(sequence.computed, self._size)
        # The tail may be shared only if its owner has nothing more to write into it.
        shared = full + (rest > 0 and sequence.slots == sequence.computed)
        fresh = self._room.take_blocks(-(-fork.length // self._size) - shared)
        if fresh is None:
            return None
        for block in sequence.blocks[:shared]:
            self._references.add_reference(block)
        fork.blocks = sequence.blocks[:shared] + fresh
        for node in sequence.path[:shared]:
            self._paths.extend(fork, node)
        if shared == full and rest:
            self._copy_head(sequence.blocks[full], fork.blocks[full], tokens=rest)
        fork.computed = sequence.computed
        self._sequences[new_id] = fork
        fork.load = Restored(min(fork.computed, fork.length), layers=self.shape.layers)
        return Allocation(fork, fork.load)

    def free(self, request_id: Hashable) -> None:
        """End a request. What it has computed stays reusable while there is room, its last part block too."""
        sequence = self._sequence(request_id)
        restoring = sequence.restoring
        if restoring is not None and not restoring.has_ended:
            sequence.restoring = None
            restoring.cancel()
        else:
            self._settle(sequence)
        self._publish_tail(sequence)
        self._link.offload_later(sequence)
        del self._sequences[request_id]
        self._end(sequence)
        if sequence.load is not None:
            sequence.load.end_use()

    def block_ids(self, request_id: Hashable) -> tuple[int, ...]:
        """A request's block table, in the order of its tokens."""
        return tuple(self._sequence(request_id).blocks)

    def length(self, request_id: Hashable) -> int:
        """A request's known tokens."""
        return self._sequence(request_id).length

    def priority_of(self, block: int) -> int | None:
        """The retention priority, 0 to 100, of a block in the prefix tree; None for any other. Raises InvalidArgument after
        `close`."""
        self._check_open()
        node = self._tree.node_of(block)
        return node.priority if node is not None else None

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the requests and tree nodes now."""
        now = {"requests": len(self._sequences), "tree_blocks": len(self._tree)}
        return {**self._counts, **self._room.counts, **self._link.stats(), **now}

    def verify(self) -> list[str]:
        """Problems found by recounting everything from the block tables and the tree; empty if all is well."""
        return recount(self._sequences, self._tree, self._references, pins=self._link.pins, size=self._size)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all requests, and offload what they leave for at most `timeout_s` seconds, beside the offloads under way. The
        tensors stay. Idempotent: after it every verb on requests raises InvalidArgument."""
        for request_id in list(self._sequences):
            self.free(request_id)
        self._is_closed = True
        self._link.close(timeout_s)

    def _sequence(self, request_id: Hashable) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            self._check_open()
            raise InvalidArgument(f"request {request_id!r} is not allocated")
        return sequence

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidArgument(f"the block pool is {self!r}, expected an open one: make another BlockPool")

    def _check_fits(self, request_id: Hashable, positions: int) -> None:
        """Raises InvalidArgument for positions that even an empty pool has no room for: waiting would not help."""
        needed = -(-positions // self._size)
        if needed > self.shape.num_blocks:
            raise InvalidArgument(
                f"request {request_id!r} needs {needed} blocks for {positions} tokens, expected at most num_blocks "
                f"{self.shape.num_blocks}, which are all: make the BlockPool larger, or the request shorter"
            )

    def _begin(self, sequence: Sequence, limit: int) -> Restored | None:
        """Give a new sequence its blocks and what can be reused of its first `limit` tokens; None, and no block is taken,
        where there is no room."""
        size = self._size
        matched = self._tree.match(sequence.keys(limit // size))
        self._paths.share(sequence, matched)
        held = len(matched) * size
        parent = self._paths.parent_of(sequence)
        source, head = self._tree.head(parent, sequence.token_bytes(held, min(limit, held + size)))
        if source is not None:
            self._tree.use(source)
        needed = -(-sequence.length // size) - len(matched)
        fresh = self._room.take_blocks(needed)
        if source is not None:
            self._tree.leave(source, self._clock.now_ns())
        if fresh is None and source is not None:
            source, head = None, 0  # the block whose head would be copied may be the room that is missing
            fresh = self._room.take_blocks(needed)
        if fresh is None:
            self._end(sequence)
            return None
        sequence.blocks += fresh
        sequence.computed = held
        self._retain(sequence, 0)
        sequence.restoring = self._link.restore(sequence, limit, held=held, least=held + head)
        if sequence.restoring is not None:
            return sequence.restoring.restored
        if source is not None and head:
            self._copy_head(source.block, fresh[0], tokens=head)
            sequence.computed += head
        return Restored(sequence.computed, layers=self.shape.layers)

    def _end(self, sequence: Sequence) -> None:
        self._paths.cut(sequence, 0)
        for block in reversed(sequence.blocks):
            self._paths.drop_reference(block)

    def _settle(self, sequence: Sequence) -> None:
        """Wait for a load, and take what came of it."""
        restoring = sequence.restoring
        if restoring is not None:
            sequence.restoring = None
            sequence.computed = max(sequence.computed, restoring.finish())
            self._publish(sequence)
            self._link.note_loaded(sequence, restoring, sequence.computed)

    def _publish(self, sequence: Sequence) -> None:
        """Put the full computed blocks into the tree, or have the path protect those of others that are equal."""
        first, size = len(sequence.path), self._size
        for number in range(first, sequence.computed // size):
            key = sequence.key(number)
            node = self._tree.get(key)
            if node is None:
                tokens = sequence.token_bytes(number * size, (number + 1) * size)
                node = self._tree.insert(self._paths.parent_of(sequence), sequence.blocks[number], tokens, key)
            self._paths.extend(sequence, node)
        if len(sequence.path) > first:
            self._retain(sequence, first)

    def _publish_tail(self, sequence: Sequence) -> None:
        """Keep the last part block of a request that ends, if it alone has it and the tree lacks its tokens."""
        full, rest = divmod(sequence.computed, self._size)
        if not rest or len(sequence.path) != full:
            return
        block = sequence.blocks[full]
        if self._references.count(block) > 1 or self._tree.node_of(block) is not None:
            return
        parent = self._paths.parent_of(sequence)
        tokens = sequence.token_bytes(full * self._size, sequence.computed)
        if self._tree.head(parent, tokens)[1] < rest:
            node = self._tree.insert(parent, block, tokens)
            (wanted,) = sequence.retention_of(full, full + 1)
            if wanted is not None:
                self._tree.retain(node, *wanted)
            self._tree.use_node(node, self._clock.now_ns())

    def _retain(self, sequence: Sequence, first: int) -> None:
        if sequence.retention:
            wanted = sequence.retention_of(first, len(sequence.path))
            for node, entry in zip(sequence.path[first:], wanted, strict=True):
                if entry is not None:
                    self._tree.retain(node, *entry)

    def _make_slots(self, request_id: Hashable, sequence: Sequence, slots: int) -> bool:
        """Room for positions up to `slots` that this sequence alone may write."""
        if slots <= sequence.slots:
            return True
        self._check_fits(request_id, slots)
        self._link.advance()
        tail, rest = divmod(sequence.length, self._size)
        block = sequence.blocks[tail] if rest else None
        is_shared = block is not None and not self._may_write(block)
        fresh = self._room.take_blocks(max(0, -(-slots // self._size) - len(sequence.blocks)) + is_shared)
        if fresh is None:
            return False
        if is_shared and block is not None:
            # A shared block has no tokens that are not computed: see `fork`.
            self._copy_head(block, fresh[0], tokens=rest)
            self._paths.cut(sequence, tail)
            sequence.blocks[tail] = fresh.pop(0)
            self._paths.drop_reference(block)
        sequence.blocks += fresh
        sequence.slots = slots
        return True

    def _drop_blocks(self, sequence: Sequence, first: int) -> None:
        for block in sequence.blocks[first:]:
            self._paths.drop_reference(block)
        del sequence.blocks[first:]

    def _may_write(self, block: int) -> bool:
        return self._references.count(block) == 1 and self._tree.node_of(block) is None

    def _copy_head(self, source: int, target: int, *, tokens: int) -> None:
        self._memory.copy_head(source, target, tokens=tokens)
        self._counts["copied_blocks"] += 1


def _geometry(named: Mapping[str, object], pool: Pool | None) -> dict[str, Any]:
    """The geometry of blocks: what is named, and the rest from the layout of this rank's part of the pool's chunks."""
    absent = [name for name, value in named.items() if value is None]
    found: dict[str, Any] = {**named}
    if absent and pool is None:
        none = ", ".join(f"{name}=None" for name in absent)
        raise InvalidArgument(f"geometry is {none} without a pool, expected values, or a pool whose layout has them")
    if absent and pool is not None:
        check_no_groups(pool.layout)
        own = pool.shares[0].of_layout(pool.layout)
        found.update({name: getattr(own, name) for name in absent})
    found["dtype"] = dtype_name(found["dtype"])
    return found


def _check_tokens(tokens: int, most: int | None) -> None:
    is_count = isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool) and tokens >= 0
    if not is_count or (most is not None and tokens > most):
        raise InvalidArgument(f"tokens is {tokens!r}, expected {'a number from 0' if most is None else f'0..{most}'}")
