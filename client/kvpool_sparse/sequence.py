"""SparseSequence: the KV of one long sequence, of which a step attends to the blocks that matter.

    | init | middle block 0 | middle block 1 | … | window, remainder included |
      always    summaries decide which of them are read            always

KV lies in pages of one chunk each. What has left the window is summarised, and from the offload boundary on saved and
read where it lies in the arena, under a lease. Summaries choose blocks and estimate the others, a native kernel attends
to first tokens, chosen blocks and window in their order, and both are merged in float32. Nothing is copied.

Bytes in the arena count only while their chunks have the generation under which they were verified, which is checked
after each step. A sequence whose chunks are gone, or whose lease has ended with the connection, leases them again, or
raises SequenceLost.

Invariant: block b of the middle has its summary for layer l exactly when b < `_summarised[l]`; pages before
`_offload.chunks` lie in the arena. One thread at a time; forks share pages and lease, and belong to the same thread.
"""

import os
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import numpy as np

import kvpool_native
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.layout import Layout
from kvpool_client.arguments import as_index, check_whole_chunks
from kvpool_client.pool import Pool
from kvpool_sparse.arrays import as_blocks, as_given, as_items, as_query, check_layout, is_tensor
from kvpool_sparse.config import SparseConfig
from kvpool_sparse.key_source import KeySource
from kvpool_sparse.offload import Offload, closing_aside
from kvpool_sparse.page_table import PageTable
from kvpool_sparse.pages import PageForm
from kvpool_sparse.results import LOOSE_SHARE, Floats, Recall, SequenceLost
from kvpool_sparse.tally import Tally, TallyReports
from kvpool_sparse.teams import team_of
from kvpool_sparse.turns import Turns, in_turn

DEFAULT_SUMMARIES = "clusters7"
WITH_TAIL = ("clusters7",)
# A block is loose where the spread of its keys makes half the variance of its logits more than this; measured
# (docs/performance.md).
LOOSE_BOUND = 4.0
# Full pages that may wait for their save before an append waits for it.
BACKLOG_PAGES_MAX = 8
# How often chunks may be lost and leased again while they are read.
READS_MAX = 4

Answer = TypeVar("Answer")


class SparseSequence:
    """The KV of one long sequence, of which a decoding step reads only the blocks that matter.

        with SparseSequence(pool, SparseConfig(), tokens=prompt) as sequence:
            sequence.append(layer, k, v)              # [tokens, kv_heads, head_dim], from token `prefix_tokens` on
            out = sequence.attend(layer, q)           # [heads, head_dim], for each layer of a step

    `prefix_tokens`: tokens at its start whose KV the pool had, which are not appended again. Results are numpy arrays; where
    keys and values came as torch tensors, `fetch` returns tensors. What was lost from the pool raises SequenceLost. Leaving it
    as a context closes it. Threads: one at a time; a sequence and its forks are one thread's.
    """

    def __init__(
        self,
        pool: Pool,
        config: SparseConfig | None = None,
        *,
        tokens: object = None,
        salt: bytes | None = None,
        adapter: str = "",
        threads: int | None = None,
    ) -> None:
        """`pool`: whose layout is that of the KV. `config`: None: the defaults. `salt`, `adapter`: as `Pool.keys` takes them.
        `tokens`: the prompt's token ids (int32 or int64). With them the sequence begins with what the pool has of
        the prompt, all but its last token at most, and what it saves is found by others, up to the token that is the
        newest one in its first step that estimates attention: KV from there on is approximate. Without them its chunks are
        its own. `threads`: native threads of each step, all of the process's processors by default.

        Raises InvalidArgument for a Pool with groups or a share, and for a layout whose KV cannot be attended to: packed,
        of one plane, of integers, or of a head_dim that is no multiple of 32.
        """
        self._config = config if config is not None else SparseConfig()
        check_whole_chunks(pool.layout, pool.shares)
        check_layout(pool.layout, self.config.block_tokens)
        self.pool = pool
        self._layout = pool.layout
        self.turns = Turns()
        form = PageForm(pool.layout, self.config.block_tokens, pool.layout.summaries or DEFAULT_SUMMARIES)
        self._team = team_of(pool, threads)
        self._table = PageTable(form)
        self._offload = Offload(pool, KeySource(pool, tokens, salt, adapter))
        self._tokens = [0] * self.layout.layers
        self._summarised = [0] * self.layout.layers
        self._recalls: dict[int, kvpool_native.Recall] = {}
        self._is_torch = False
        self._is_closed = False
        self._pid = os.getpid()
        self._end = closing_aside(self, self._offload)
        self.tally = Tally()
        self._reports = TallyReports(pool.counters, self.tally)
        self.prefix_tokens = 0 if tokens is None else self._begin_with_prefix(tokens)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.tokens} tokens, {self._offload.chunks} chunks in the arena"
        return f"<SparseSequence {state}>"

    def __enter__(self) -> "SparseSequence":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def config(self) -> SparseConfig:
        """Its settings: `fork` takes others."""
        return self._config

    @property
    def layout(self) -> Layout:
        """The layout of its Pool."""
        return self._layout

    @property
    def tokens(self) -> int:
        """Tokens whose KV every layer has."""
        return min(self._tokens)

    @property
    def is_shared(self) -> bool:
        """Whether others find what it saves, under the keys of its tokens."""
        return not self._offload.source.is_private

    @property
    def own_bytes(self) -> int:
        """Bytes of KV and summaries in this process's own memory, those shared with forks included."""
        return self._table.own_bytes

    @in_turn
    def extend(self, tokens: object) -> None:
        """Append ids of tokens whose KV comes by `append`; only of a sequence that was made with tokens. Raises
        InvalidArgument."""
        self._check_open()
        if self._offload.source.is_private:
            raise InvalidArgument("the sequence was made without tokens, expected none here")
        self._offload.source.extend(tokens)

    @in_turn
    def append(self, layer: int, k: object, v: object) -> None:
        """Append keys (after RoPE) and values of any number of tokens, [tokens, kv_heads, head_dim] in the layout's
        dtype.

        Copies them once. Blocks that leave the window are summarised. Raises SequenceLost, and InvalidArgument, as for the
        whole prompt where the pool had its first `prefix_tokens`.
        """
        self._check_open()
        self._check_layer(layer)
        keys, values = as_items("k", k, self.layout), as_items("v", v, self.layout)
        if keys.shape != values.shape:
            raise InvalidArgument(f"k has shape {keys.shape} and v {values.shape}, expected the same")
        given = self._offload.source.given
        if self.prefix_tokens and self._tokens[layer] == self.prefix_tokens and len(keys) >= given:
            raise InvalidArgument(
                f"k has {len(keys)} tokens, expected those behind the first {self.prefix_tokens} of {given} (prefix_tokens), "
                "whose KV the pool had"
            )
        self._is_torch = self._is_torch or is_tensor(k)
        self._table.write(layer, self._tokens[layer], keys, values)
        self._tokens[layer] += len(keys)
        self._summarise(layer)
        self._offload_full_pages(BACKLOG_PAGES_MAX)

    @in_turn
    def recall(self, layer: int, q: object) -> Recall:
        """The blocks that a query needs, and an estimate of the others: `q` [heads, head_dim] in the layout's dtype, after
        RoPE, unscaled. Below the dense boundary all blocks, without an estimate. Raises InvalidArgument, SequenceLost."""
        query = self._checked_query(layer, q)
        return self._steadily(lambda: self._recall(layer, query))

    @in_turn
    def fetch(self, layer: int, blocks: object) -> tuple[object, object]:
        """Keys and values of middle blocks, `blocks` [kv_heads, n]: each [kv_heads, n * block_tokens, head_dim], bit
        for bit what was appended. One copy. Raises InvalidArgument, SequenceLost."""
        self._check_open()
        self._check_layer(layer)
        chosen = as_blocks(blocks, self.layout, self.config.middle_blocks(self._tokens[layer]))
        runs = chosen + self._init_runs
        found = self._steadily(lambda: self._table.gather(layer, runs))
        self.tally.fetched_blocks += chosen.size
        keys, values = (as_given(part, self.layout, self._is_torch) for part in found)
        return keys, values

    @in_turn
    def dense(self, layer: int) -> tuple[object, object]:
        """Keys and values of all tokens of a layer, each [kv_heads, tokens, head_dim]. One copy. Raises
        InvalidArgument, SequenceLost."""
        self._check_open()
        self._check_layer(layer)
        found = self._steadily(lambda: self._table.gather_all(layer, self._tokens[layer]))
        keys, values = (as_given(part, self.layout, self._is_torch) for part in found)
        return keys, values

    @in_turn
    def attend(self, layer: int, q: object) -> Floats:
        """Attention of one query over the layer's tokens: float32 [heads, head_dim]; `q` [heads, head_dim] after
        RoPE, unscaled.

        Full attention below the dense boundary and at a budget of 100 %, with the same bits, and for heads whose
        estimate is unreliable and weighs much. Raises InvalidArgument, SequenceLost.
        """
        query = self._checked_query(layer, q)
        if not self._tokens[layer]:
            raise InvalidArgument(f"layer {layer} has no tokens, expected some to attend to")
        return self._steadily(lambda: self._attended(layer, query))

    @in_turn
    def settle(self) -> int:
        """Wait until all that has left the window is stored, or the pool has declined some of it. Returns the chunks
        in the arena.

        `append` saves in the background and waits only where much is left to save: after a prompt was appended at
        once, some of it is saved during later appends. Raises SequenceLost.
        """
        self._check_open()
        self._offload_full_pages(backlog=0)
        return self._offload.chunks

    @in_turn
    def fork(self, config: SparseConfig | None = None) -> "SparseSequence":
        """A sequence with the same tokens, which goes its own way from here: pages are shared until one of both
        writes them.

        `config`: its settings, those of this sequence by default; other ones have the same `init_tokens` and
        `block_tokens`. Raises InvalidArgument, SequenceLost.
        """
        self._check_open()
        chosen = self._checked_config(config)
        self._renew_lease()
        child = object.__new__(SparseSequence)
        child.__dict__.update(self.__dict__)
        child._config = chosen
        child.turns = Turns()
        child._table = self._table.fork()
        child._offload = self._offload.fork(self.tokens)
        child._end = closing_aside(child, child._offload)
        child._tokens = list(self._tokens)
        child.tally = Tally()
        child._reports = TallyReports(self.pool.counters, child.tally)
        middle = map(chosen.middle_blocks, self._tokens)
        child._summarised = [min(both) for both in zip(self._summarised, middle, strict=True)]
        for layer in range(self.layout.layers):
            child._summarise(layer)  # what has left a shorter window
        return child

    def stats(self) -> dict[str, int | float]:
        """Counters of this sequence's steps, and what it holds."""
        return {
            **self.tally.as_dict(),
            "tokens": self.tokens,
            "own_bytes": self.own_bytes,
            "chunks_in_arena": self._offload.chunks,
        }

    def close(self) -> None:
        """End the sequence: its lease, and its memory where no fork has it. Idempotent. Raises KVPoolError while
        another thread is in a call."""
        if not self._is_closed:
            self.turns.check_end()
            self._is_closed = True
            if os.getpid() == self._pid:
                self._end.detach()
                self._offload.close()
            self._table.close()
            self._reports.send()

    @property
    def _init_runs(self) -> int:
        return self.config.init_tokens // self.config.block_tokens

    def _is_sparse(self, layer: int) -> bool:
        return self._tokens[layer] >= self.config.dense_boundary

    def _begin_with_prefix(self, tokens: object) -> int:
        count = int(np.asarray(tokens).size)
        moved = self._offload.attach(max(0, count - 1) // self.layout.chunk_tokens)
        self._table.adopt(self._offload.lease, moved)
        found = self._offload.chunks * self.layout.chunk_tokens
        self._tokens = [found] * self.layout.layers
        self._steadily(self._summarise_arena)
        for layer in range(self.layout.layers):
            self._summarise(layer)
        return found

    def _summarise(self, layer: int) -> None:
        """Summarise the blocks of a layer that have left the window, where the pool has no summaries of them."""
        first, end = self._summarised[layer], self.config.middle_blocks(self._tokens[layer])
        if end > first:
            runs = range(first + self._init_runs, end + self._init_runs)
            self.tally.summaries_built += self._table.summarise(layer, runs)
            self._summarised[layer] = end

    def _recall(self, layer: int, query: Floats) -> Recall:
        blocks = self.config.middle_blocks(self._tokens[layer])
        heads, kv_heads = query.shape[0], self.layout.kv_heads
        if not self._is_sparse(layer) or not blocks:
            every = np.broadcast_to(np.arange(blocks, dtype=np.int32), (kv_heads, blocks))
            none = np.zeros(kv_heads, np.bool_)
            return Recall(every, None, np.ones(heads, np.float32), none, none)
        take = self._blocks_to_take(layer, blocks)
        records = self._table.records(layer, self._init_runs, blocks)
        has_tail = self._table.form.summary_form in WITH_TAIL
        chosen, is_dense, kept_mass, loose, logits, values = self._native_recall(heads // kv_heads).run(
            self._team, query, records, take=take, wants_tail=has_tail
        )
        tail = (logits, values) if logits is not None and values is not None else None
        is_doubtful = np.any((loose > LOOSE_SHARE).reshape(kv_heads, -1), axis=1)
        recall = Recall(chosen, tail, kept_mass, is_dense, is_doubtful)
        self.tally.note_recall(recall, blocks)
        return recall

    def _blocks_to_take(self, layer: int, blocks: int) -> int:
        """How many of so many middle blocks a step reads. Where that is not all, later layers have approximate KV of the newest
        token from now on, and so have all tokens behind."""
        take = self.config.blocks_to_take(blocks)
        if take < blocks:
            self._offload.end_exact(self._tokens[layer] - 1)
        return take

    def _attended(self, layer: int, query: Floats) -> Floats:
        blocks, kv_heads, tokens = self._summarised[layer], self.layout.kv_heads, self._tokens[layer]
        if not self._is_sparse(layer) or not blocks:
            every = np.ones((self._table.runs_of(tokens), kv_heads), np.uint8)
            return self._table.attend(layer, query, every, tokens=tokens, team=self._team)[1]
        take = self._blocks_to_take(layer, blocks)
        value, mass, masses, dense_heads = self._table.attend_by_lookup(
            layer,
            query,
            self._native_recall(query.shape[0] // kv_heads),
            team=self._team,
            tokens=tokens,
            first=self._init_runs,
            blocks=blocks,
            take=take,
        )
        self.tally.note_taken(kv_heads, take, blocks, dense_heads=dense_heads)
        self.tally.note_kept(mass, masses)
        return value

    def _native_recall(self, group: int) -> "kvpool_native.Recall":
        if group not in self._recalls:
            self._recalls[group] = kvpool_native.Recall(
                form=self._table.form.summary_form,
                head_dim=self.layout.head_dim,
                kv_heads=self.layout.kv_heads,
                group=group,
                loose_bound=LOOSE_BOUND,
                loose_share=1.0,  # what is loose is judged here, by what its estimate weighs
            )
        return self._recalls[group]

    def _offload_full_pages(self, backlog: int) -> None:
        """Save pages that have left the window, and read those that are stored in the arena from now on. Waits while
        more than `backlog` of them are not stored."""
        self._renew_lease()
        tokens, offload = self.tokens, self._offload
        blocks = self.config.middle_blocks(tokens)
        if tokens < self.config.offload_boundary or not blocks:
            return
        due = (self.config.init_tokens + blocks * self.config.block_tokens) // self.layout.chunk_tokens
        has_ended = False
        for _ in range(due + 1):  # each turn one save more; a pool that evicts as fast as it stores ends the turns
            must_wait = due - max(offload.stored, offload.chunks) > backlog
            has_ended |= offload.end_save(due, wait=must_wait)
            if (chunk := offload.wants(due)) is None:
                break
            page = self._table.page_to_save(chunk)
            if not offload.are_current():  # what is saved again must still be what it was
                self._lease_again()
                break
            offload.begin_save(chunk, page)
        if has_ended and offload.stored > offload.chunks:
            moved = offload.attach(offload.stored)
            self._table.adopt(offload.lease, moved)
            self._steadily(self._summarise_arena)

    def _summarise_arena(self) -> None:
        """Summarise the pages in the arena of which the pool has no good summaries."""
        for number in self._table.missing_summaries(self._offload.chunks):
            self.tally.summaries_built += self._table.summarise_page(number)

    def _steadily(self, read: Callable[[], Answer]) -> Answer:
        """What `read` returns, where all that it read from the arena is what was verified. Raises SequenceLost."""
        for _ in range(READS_MAX):
            self._renew_lease()
            found = read()
            if self._offload.are_current():
                if self._reports.are_due:
                    self._reports.send()
                return found
            self._lease_again()
        raise self._lost(0)

    def _renew_lease(self) -> None:
        """Lease the chunks anew where their lease has ended with its session and there is another. Raises SequenceLost."""
        if self._offload.must_renew:
            self._lease_again()

    def _lease_again(self) -> None:
        """Lease the chunks anew that this sequence has lost. Raises SequenceLost."""
        needed, before = self._offload.chunks, self._offload.lease
        found = self._offload.reattach()
        if found < needed:
            raise self._lost(found)
        if self._offload.lease is before:
            return
        self.tally.reattached += 1
        self._table.adopt(self._offload.lease, range(needed))
        self._summarise_arena()

    def _lost(self, chunks: int) -> SequenceLost:
        self.tally.lost += 1
        self.close()
        return SequenceLost(chunks * self.layout.chunk_tokens)

    def _checked_query(self, layer: int, q: object) -> Floats:
        self._check_open()
        self._check_layer(layer)
        return as_query(q, self.layout)

    def _check_open(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            raise KVPoolError(
                "the sequence is closed" if self._is_closed else "the sequence is that of the parent process"
            )

    def _checked_config(self, config: SparseConfig | None) -> SparseConfig:
        """The settings of a fork: the summaries that there are fit them. Raises InvalidArgument."""
        if config is None:
            return self._config
        if not isinstance(config, SparseConfig):
            raise InvalidArgument(f"config is {type(config).__name__}, expected a SparseConfig")
        for name in ("init_tokens", "block_tokens"):
            own, wanted = getattr(self._config, name), getattr(config, name)
            if wanted != own:
                raise InvalidArgument(f"config {name} is {wanted}, expected that of the sequence to fork, {own}")
        return config

    def _check_layer(self, layer: int) -> None:
        as_index("layer", layer, self.layout.layers - 1)
