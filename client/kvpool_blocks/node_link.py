"""Link to the node's pool: loads what the block pool lacks, and offloads idle blocks before they are evicted.

Chunks are saved with their ancestors first, because the daemon stores no chunk without its parent. An offload reserves and
announces on the engine's thread (its copies are behind the work queued on that thread's stream) and copies and commits on a
thread of its own; meanwhile its blocks are pinned: readable, not evictable. Bounds: OFFLOADS_MAX under way, CHUNKS_MAX
chunks each, PATHS_MAX paths waiting, beyond which the oldest is forgotten and offloaded only when it is to be evicted. A
round trip is bounded by the Pool's timeout, and a daemon that is away costs nothing. A chunk that was declined is dropped
like one that is stored. A save that failed is a try, of which a chunk has TRIES_MAX.

Without a Pool nothing is found and nothing is worth an offload. Engine's thread, but for `_commit`.
"""

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from kvpool.clock import Deadline
from kvpool_blocks.block_memory import BlockMemory
from kvpool_blocks.restoring import Restoring
from kvpool_blocks.sequence import Sequence, ranges_of
from kvpool_blocks.tree.prefix_tree import Node, PrefixTree
from kvpool_blocks.tree_reporter import TreeReporter
from kvpool_client.arguments import check_no_groups
from kvpool_client.copying.cache import SKIP_BLOCK
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.key_chain import KeyChain
from kvpool_client.pool import Pool
from kvpool_client.torch.restored import Restored
from kvpool_client.verbs.results import SaveResult
from kvpool_client.verbs.save import Save

log = logging.getLogger(__name__)

# Guesses: enough to keep a copying thread busy, few enough that the blocks pinned are a small part of any pool.
OFFLOADS_MAX = 4
CHUNKS_MAX = 8
PATHS_MAX = 256
TRIES_MAX = 2
# Reasons of chunks that were not declined for what they are: another try may store them.
FAILED = frozenset(("no-parent", "disconnected", "timeout", "expired"))


class _Begun(Enum):
    """Outcome of an attempt to begin a path's next offload."""

    STARTED = auto()
    UNDER_WAY = auto()  # these chunks are being saved already
    NOTHING = auto()  # none is left, or they cannot be saved


@dataclass(frozen=True, slots=True, eq=False)
class _Offload:
    """Chunks being saved: `nodes` are all of their blocks, in order."""

    nodes: list[Node]
    epoch: bytes
    commit: "Future[SaveResult | None]"


@dataclass(frozen=True, slots=True)
class _Path:
    """A path to be offloaded, by the node of its last block and that block then; `keys` are those of at least its chunks."""

    last: Node
    block: int
    keys: KeyChain


class NodeLink:
    """See the module. Invariant: a node has a pin for each offload under way that it is part of."""

    def __init__(
        self,
        pool: Pool | None,
        memory: BlockMemory,
        tree: PrefixTree,
        *,
        tokens_per_block: int,
        on_unpinned: Callable[[], None],
    ) -> None:
        """`on_unpinned` is called when pins have ended. Raises LayoutMismatch for blocks that do not fit the Pool's layout,
        InvalidArgument for a Pool with groups."""
        self._pool = pool
        self._tree = tree
        self._on_unpinned = on_unpinned
        self._guard = FailureGuard(log)
        self._under_way: list[_Offload] = []
        self._waiting: deque[_Path] = deque(maxlen=PATHS_MAX)
        self._has_news = False  # a path waits, or an offload has ended, since waiting ones were last tried
        self._counts = {"loaded_tokens": 0, "offloaded_chunks": 0, "declined_chunks": 0}
        if pool is not None:
            check_no_groups(pool.layout)
            self._cache = pool.register(memory.layers, block_tokens=tokens_per_block, form="block_first")
            self._chunk_tokens = pool.layout.chunk_tokens
            self._chunk_blocks = self._chunk_tokens // tokens_per_block
            self._threads = ThreadPoolExecutor(OFFLOADS_MAX, thread_name_prefix="kvpool-offload")
            self._reporter = TreeReporter(pool.engine_reports(), tree, self._chunk_blocks)

    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        reported = self._reporter.stats() if self._pool is not None else {}
        now = {"offloads_under_way": len(self._under_way), "failures": self._guard.failures}
        return {**self._counts, **now, **reported}

    @property
    def pins(self) -> list[Node]:
        """Nodes being offloaded, once for each offload; for verification."""
        return [node for offload in self._under_way for node in offload.nodes]

    def restore(self, sequence: Sequence, limit: int, *, held: int, least: int) -> Restoring | None:
        """Begin to load what the node has of the first `limit` tokens into the blocks behind the first `held` tokens.

        None where that is no more than `least` tokens. One round trip where there is more.
        """
        if self._pool is None or not self._pool.connected:
            return None
        return self._guard.call("restore", None, lambda: self._restore(sequence, limit, held=held, least=least))

    def note_loaded(self, sequence: Sequence, restoring: Restoring, tokens: int) -> None:
        """The path's chunks that came from the node are stored there."""
        self._counts["loaded_tokens"] += tokens
        for number in range(self._chunk_blocks, len(sequence.path) + 1, self._chunk_blocks):
            if number * self._tokens_per_chunk_block <= tokens:
                sequence.path[number - 1].saved_epoch = restoring.epoch

    @property
    def _tokens_per_chunk_block(self) -> int:
        return self._chunk_tokens // self._chunk_blocks

    def offload_later(self, sequence: Sequence) -> None:
        """Offload the path of a request that ends, when there is a turn."""
        if self._pool is None or not self._pool.connected:
            return
        blocks = len(sequence.path) // self._chunk_blocks * self._chunk_blocks
        if blocks and any(self.is_worth_saving(node) for node in sequence.path[:blocks]):
            last, tokens = sequence.path[blocks - 1], blocks * self._tokens_per_chunk_block
            # The path's last block may have tokens that the request has taken back.
            keys = self._keys_of(sequence, tokens) if tokens <= sequence.length else self._keys_of_path(last)
            self._waiting.append(_Path(last, last.block, keys))
            self._has_news = True
            self.advance()

    def is_worth_saving(self, node: Node) -> bool:
        """Whether a chunk ends with this block that the node's pool may lack and has not declined."""
        pool = self._pool
        if pool is None or not node.key or node.depth % self._chunk_blocks or not pool.connected:
            return False
        epoch = pool.epoch
        return node.saved_epoch != epoch and (node.tried_epoch != epoch or node.tries < TRIES_MAX)

    def offload(self, node: Node) -> bool:
        """Begin to save the chunk that ends with this block, ancestors first. False: as many as may be are under way."""
        if self._pool is None or len(self._under_way) >= OFFLOADS_MAX:
            return False
        return self._begin(node, self._keys_of_path(node)) == _Begun.STARTED

    def advance(self) -> None:
        """Take the results of ended offloads, and begin waiting ones. Never waits, but for the round trips that begin them."""
        self._collect()
        tries = len(self._waiting) if self._has_news else 0
        self._has_news = False
        while tries > 0 and len(self._under_way) < OFFLOADS_MAX:
            path = self._waiting.popleft()
            begun = self._begin(path.last, path.keys) if path.last.block == path.block else _Begun.NOTHING
            if begun != _Begun.NOTHING:
                self._waiting.append(path)  # it may have more chunks
            tries -= 1

    def wait(self, deadline: Deadline) -> bool:
        """Wait until an offload under way has ended; False if none has by the deadline, or none is under way."""
        before = len(self._under_way)
        wait([offload.commit for offload in self._under_way], deadline.remaining_s(), FIRST_COMPLETED)
        self._collect()
        return len(self._under_way) < before

    def close(self, timeout_s: float) -> None:
        """Begin the waiting offloads until the time is over, and finish those under way, each bounded by the Pool's timeout."""
        if self._pool is None:
            return
        deadline = Deadline(timeout_s)
        self.advance()
        while self._under_way and self._waiting and not deadline.has_passed():
            self.wait(deadline)
            self.advance()
        self._waiting.clear()
        self._threads.shutdown(wait=True)
        self._collect()
        self._reporter.close(deadline.remaining_s())

    def _restore(self, sequence: Sequence, limit: int, *, held: int, least: int) -> Restoring | None:
        pool = self._pool
        assert pool is not None
        epoch = pool.epoch
        hit = pool.lookup(self._keys_of(sequence, limit))
        if hit.tokens <= least:
            return None
        lease = pool.acquire(hit)
        try:
            if lease.tokens <= least:
                lease.release()
                return None
            first, held_blocks = held // self._chunk_tokens, held // self._tokens_per_chunk_block
            ids = np.array(sequence.blocks[: lease.chunks * self._chunk_blocks], dtype=np.int64)
            ids[:held_blocks] = SKIP_BLOCK
            load = pool.load(lease, self._cache, ids[first * self._chunk_blocks :], first_chunk=first)
        except BaseException:
            lease.release()
            raise
        restored = Restored(lease.tokens, layers=len(self._cache.layers), held_tokens=held, lease=lease, load=load)
        return Restoring(restored, lease, load, epoch)

    def _keys_of(self, sequence: Sequence, tokens: int) -> KeyChain:
        """The chunk keys of at least the sequence's first tokens, of no more the first time; hashes only new ones."""
        assert self._pool is not None
        if sequence.chain is None:
            sequence.chain = self._pool.keys([], salt=sequence.scope.salt, adapter=sequence.scope.adapter)
        if sequence.chain_tokens < tokens:
            sequence.chain.extend(sequence.token_ids(sequence.chain_tokens, tokens))
            sequence.chain_tokens = tokens
        return sequence.chain

    def _keys_of_path(self, last: Node) -> KeyChain:
        """The chunk keys of a path's own tokens; hashes all of them."""
        assert self._pool is not None
        tokens = np.frombuffer(b"".join(node.tokens for node in last.path()), dtype="<i4")
        return self._pool.keys(tokens, salt=last.scope.salt, adapter=last.scope.adapter)

    def _begin(self, last: Node, keys: KeyChain) -> _Begun:
        """Save the path's next chunks. A chunk can be committed when its ancestors are, so one part follows another."""
        path, size = last.path(), self._chunk_blocks
        ends = path[size - 1 :: size]
        first = next((i for i, node in enumerate(ends) if self.is_worth_saving(node)), None)
        if first is None:
            return _Begun.NOTHING
        if ends[first].pins:
            return _Begun.UNDER_WAY
        count = min(CHUNKS_MAX, len(ends) - first)
        nodes = path[first * size : (first + count) * size]
        assert self._pool is not None
        epoch = self._pool.epoch
        save = self._guard.call("offload", None, lambda: self._reserve(nodes, keys, first))
        if save is None:
            for node in nodes[size - 1 :: size]:
                _note_declined(node, epoch, 1)
            return _Begun.NOTHING
        for node in nodes:
            self._tree.pin(node)
        self._under_way.append(_Offload(nodes, epoch, self._threads.submit(self._commit, save)))
        return _Begun.STARTED

    def _reserve(self, nodes: Items[Node], keys: KeyChain, first: int) -> Save:
        assert self._pool is not None
        save = self._pool.save(
            keys,
            self._cache,
            [node.block for node in nodes],
            first_chunk=first,
            chunks=len(nodes) // self._chunk_blocks,
            retention=ranges_of(nodes, self._chunk_blocks, first=first, chunk_tokens=self._chunk_tokens),
        )
        try:
            for layer in range(self._pool.shares[0].layers):
                save.layer(layer)
        except BaseException:
            save.abort()
            raise
        return save

    def _commit(self, save: Save) -> SaveResult | None:
        def commit() -> SaveResult:
            with save:  # one that raises keeps no slots
                return save.commit()

        return self._guard.call("commit", None, commit)

    def _collect(self) -> None:
        ended = [offload for offload in self._under_way if offload.commit.done()]
        if not ended:
            return
        self._has_news = True
        self._under_way = [offload for offload in self._under_way if offload not in ended]
        for offload in ended:
            self._settle(offload, offload.commit.result())
            for node in offload.nodes:
                self._tree.unpin(node)
        self._on_unpinned()

    def _settle(self, offload: _Offload, result: SaveResult | None) -> None:
        ends = offload.nodes[self._chunk_blocks - 1 :: self._chunk_blocks]
        states = result.states if result is not None else ("declined",) * len(ends)
        has_failed = result is None or not FAILED.isdisjoint(result.reasons)
        for node, state in zip(ends, states, strict=True):
            if state in ("stored", "present", "part"):
                node.saved_epoch = offload.epoch
                self._counts["offloaded_chunks"] += state != "present"
            else:
                _note_declined(node, offload.epoch, 1 if has_failed else TRIES_MAX)
                self._counts["declined_chunks"] += 1
        if result is not None and "no-parent" in result.reasons:
            # The pool has dropped an ancestor that it had: the next try begins at the root.
            for node in offload.nodes[0].path()[self._chunk_blocks - 1 :: self._chunk_blocks]:
                if node not in ends:
                    node.saved_epoch = b""


def _note_declined(node: Node, epoch: bytes, tries: int) -> None:
    """This life of the daemon has declined the chunk; the next one is asked again."""
    node.tries = tries + (node.tries if node.tried_epoch == epoch else 0)
    node.tried_epoch = epoch
