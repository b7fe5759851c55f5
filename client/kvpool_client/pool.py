"""Pool: an engine's connection to the daemon on its node, with a method for each verb.

`lookup` reads shared memory and sends no request, unless there is a shared store to ask; `acquire`, `save` and `claim` are one
round trip each; the Pool's native threads copy the bytes. Nothing here raises because of the daemon: away, late, full or
restarted, it is a miss or a declined chunk, and the engine computes. Only a caller's mistake raises, at the call.

Any thread. Holds no lock of its own.
"""

import logging
import os
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidArgument
from kvpool.key_column import KeyColumn
from kvpool.keys import namespace_name, pack_scope
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.socket_path import find_socket
from kvpool.states import TokenRange
from kvpool_client.arguments import (
    REVISION_SEPARATOR,
    as_entries,
    as_index,
    by_group,
    check_chain_lease,
    check_connect,
    check_hit,
    check_keys,
    check_name,
    check_no_groups,
    check_owner,
    check_promises,
    check_scope,
    checked_shares,
    is_text,
)
from kvpool_client.chunk_sets import ChunkSets
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.engine_reports import EngineReports
from kvpool_client.connection.link import Link
from kvpool_client.connection.promise_line import PromiseLine
from kvpool_client.connection.roots import Roots, ScopedRoots
from kvpool_client.connection.session import SessionPlan
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.copies import Copies, EngineBlocks
from kvpool_client.copying.leased_memory import LeasedMemory
from kvpool_client.events import BEGINNING, EventBatch, EventMark, SnapshotPart, read_events, read_snapshot
from kvpool_client.given_numbers import is_index
from kvpool_client.hint_envelope import HintReport, parse_hints
from kvpool_client.key_chain import Extra, KeyChain, Namespace
from kvpool_client.retention import plan_retention
from kvpool_client.verbs.chosen_chunks import checked_chunks, chunks_to_save
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.hint_client import HintClient
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.lease_bound import chunks_held
from kvpool_client.verbs.lease_fetcher import LeaseFetcher
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.load_starter import LoadStarter
from kvpool_client.verbs.results import AnnounceResult, Hit, RetainResult
from kvpool_client.verbs.save import Save
from kvpool_client.verbs.save_starter import SaveStarter
from kvpool_client.verbs.set_load import SetLoad

log = logging.getLogger(__name__)


def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    model: str,
    layout: Layout,
    revision: str = "",
    salt: bytes = b"",
    timeout_s: float = 1.0,
    copy_threads: int = 1,
    share: Share | Sequence[Share] | None = None,
    name: str = "",
) -> "Pool":
    """A Pool on the daemon at `path`. Never raises because the daemon is away: then the Pool misses and keeps reconnecting.

    `path`: of the daemon's socket; None: the one that KVPOOL_SOCKET names, else the service's if this user may use it, else the
    user's own. `model` and `revision` name the weights: chunks are shared only where both are equal, and `layout` (what one
    chunk has) and `salt` (a tenant's bytes, part of every key) too; a new checkpoint needs a new revision, and a model without
    one is a warning in the log. `timeout_s`, in seconds, bounds one round trip with the wait for this Pool's other threads, and
    for a load or save the longest time without progress. `copy_threads` native threads copy for this Pool, loads before saves,
    in turns. `share`: the part of every chunk that this rank's engine has, in a layout of the whole model, with groups one for
    each; None: all of it. Only that is loaded and saved. `name`: what operators see of this connection, at most 128 bytes.
    Raises InvalidArgument, or LayoutMismatch when the daemon cannot store such chunks.
    """
    pool = Pool(
        find_socket() if path is None else path,
        model=model,
        revision=revision,
        layout=layout,
        salt=salt,
        timeout_s=timeout_s,
        copy_threads=copy_threads,
        share=share,
        name=name,
    )
    if REVISION_SEPARATOR not in pool.model:
        _warn_of_no_revision(pool.model)
    return pool


@cache
def _warn_of_no_revision(model: str) -> None:
    """One line of a process for each model."""
    log.warning(
        "model %r is connected without a revision: a new checkpoint of this name would get the KV of the old one, expected "
        "connect(revision=…), such as a commit, a step or a digest of the weights",
        model,
    )


class Pool:
    """An engine's connection to the daemon on its node, with a method for each verb: what `connect` answers.

        cache = pool.register(layers, block_tokens=16)
        per_chunk, keys = cache.blocks_per_chunk, pool.keys(prompt)
        with pool.acquire(pool.lookup(keys)) as lease:
            loaded = pool.load(lease, cache, block_table[: lease.chunks * per_chunk]).wait()
        …the engine computes from token loaded.tokens on…
        pool.save(keys, cache, block_table[: len(keys) * per_chunk]).commit()

    Nothing raises because of the daemon: away, late, full or restarted, it is a miss or a declined chunk. A caller's mistake
    raises InvalidArgument or LayoutMismatch, at the call. It reconnects by itself; registered caches stay, older leases are
    empty. Leaving it as a context closes it. In a forked child every call is a miss or declined. Threads: any, each call
    bounded by 1.2 × `timeout_s` + 50 ms, waits for other threads included.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str,
        layout: Layout,
        salt: bytes,
        timeout_s: float,
        copy_threads: int,
        revision: str = "",
        share: Share | Sequence[Share] | None = None,
        name: str = "",
    ) -> None:
        check_connect(path, model, layout, revision=revision, salt=salt, timeout_s=timeout_s, copy_threads=copy_threads)
        check_name(name)
        self.shares = checked_shares(share, layout)
        self.layout = layout
        self.model = namespace_name(model, revision)
        self._namespace = Namespace(self.model, layout, os.fspath(path))
        self._salt = bytes(salt)
        self._timeout_s = timeout_s = float(timeout_s)
        self._pid = os.getpid()
        self._roots = Roots(self.model, layout)
        self._counters = counters = Counters(counts_chunks=self.shares[0].has_first_extent)
        self._plan = plan = SessionPlan(os.fspath(path), self.model, layout, timeout_s, name=name)
        self._link = link = Link(plan, counters)
        self._plain_scope = self._scope_of(None, "", None)
        self._copies = copies = Copies(self._namespace, copy_threads, self.shares)
        self._sides = sides = copies.by_group()
        self._chunks_held = chunks_held(layout, layout.world)  # by a scheduler's lease, which is of all ranks
        self._finder = finder = Finder(layout, link, counters, timeout_s=timeout_s)
        self._load_starter = LoadStarter(layout, link, sides, counters, timeout_s=timeout_s)
        self._save_starter = SaveStarter(layout.group_layouts, link, sides, counters, timeout_s=timeout_s)
        self._lease_fetcher = LeaseFetcher(
            self._namespace,
            link,
            counters,
            finder=finder,
            estimate_s=self._load_starter.estimate_s,
            timeout_s=timeout_s,
        )
        self._sets = ChunkSets(
            self._namespace,
            link,
            counters,
            roots=self._plain_scope[0],
            sides=sides,
            load_starter=self._load_starter,
            save_starter=self._save_starter,
            timeout_s=timeout_s,
        )
        self._hint_client = HintClient(layout, link, counters, timeout_s, finder=finder)

    def __repr__(self) -> str:
        return f"<Pool {self.model} {self._link.state}>"

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether a daemon serves this Pool now."""
        return self._link.session is not None

    @property
    def has_store(self) -> bool:
        """Whether there is a store that nodes share, which is asked for what is not known to be anywhere: a request."""
        session = self._link.session
        return session is not None and session.welcome.has_store

    @property
    def epoch(self) -> bytes:
        """Id of the daemon process: 16 bytes, empty while it is away."""
        session = self._link.session
        return session.epoch if session is not None else b""

    def stats(self) -> dict[str, int | float | str]:
        """This client's counters since it was made."""
        counts: dict[str, int | float | str] = {**self._counters.totals()}
        counts["connected"] = int(self.connected)
        counts["reconnects"] = self._link.reconnects
        counts.update(self._copies.stats())
        counts["last_error"] = self._link.last_error
        return counts

    def close(self) -> None:
        """End the connection, and with it every lease and reservation. Idempotent."""
        if os.getpid() == self._pid:
            self._link.close()
            self._copies.stop()

    def register(self, layers: Sequence[object], block_tokens: int, form: str = "auto", group: int = 0) -> Cache:
        """Describe an engine's paged KV, for `load` and `save`: once, and before the first of them. Nothing is copied.

        `layers`: one array for each layer, of the layout's dtype, in host memory or on a CUDA device (torch, numpy, DLPack, the
        buffer protocol, `__cuda_array_interface__`). A block has `block_tokens` tokens, of which a chunk has a whole number.
        `form`:

            kv_first       [2, blocks, block_tokens, kv_heads, head_dim]
            block_first    [blocks, 2, block_tokens, kv_heads, head_dim]
            packed         [blocks, …] opaque bytes, of a layout with a `format`
            auto           whichever of them the shapes are; what could be two raises

        With one plane (MLA) [blocks, block_tokens, …]. Strides are free where one block's K or V is in a row. `group`: whose
        layers these are, in a layout with groups. Raises LayoutMismatch where an array is not what the layout says, naming it,
        and InvalidArgument.
        """
        group = as_index("group", group, max(0, len(self.layout.groups) - 1))
        if self.layout.rank is None:
            raise InvalidArgument("a Pool with rank=None looks up and acquires, it has no KV to register")
        layout, share = self.layout.of_group(group), self.shares[group]
        arrays = as_entries("layers", layers)
        return Cache(arrays, layout, block_tokens=block_tokens, form=form, share=share, namespace=self._namespace)

    def keys(
        self, tokens: object, salt: bytes | None = None, adapter: str = "", extra: Sequence[Extra] = ()
    ) -> KeyChain:
        """The chunk keys of a prompt: `tokens` [n], integers (an array of int32 or int64, a tensor in host memory, a list).
        Hashes them; asks nobody.

        Prompts with another `salt` (bytes; None: the Pool's) or `adapter` (a name) share nothing. `extra`: content that is in
        no token, such as images, as `(start, end, bytes)` for tokens `start` up to `end`. Raises InvalidArgument for other
        tokens, as a batch, [1, n].
        """
        chain = self._empty_chain(salt, adapter, extra)
        chain.extend(tokens)
        return chain

    def keys_from_hashes(
        self,
        block_hashes: Sequence[bytes],
        block_tokens: int,
        salt: bytes | None = None,
        adapter: str = "",
        tokens: object = None,
        adapter_name: str | None = None,
    ) -> KeyChain:
        """Keys from an engine's chained block hashes: the last hash of each chunk stands for the chunk's tokens.

        `tokens`: the token ids themselves, and `adapter_name`: the adapter's name (None: `adapter`), both for readers of
        events; they are no part of the keys. Raises InvalidArgument.
        """
        chunk_tokens = self.layout.chunk_tokens
        if not is_index(block_tokens, chunk_tokens) or not block_tokens or chunk_tokens % block_tokens:
            raise InvalidArgument(
                f"block_tokens is {block_tokens!r}, expected a divisor of chunk_tokens {chunk_tokens}"
            )
        hashes = as_entries("block_hashes", block_hashes)
        if not all(isinstance(value, (bytes, bytearray, memoryview)) for value in hashes):
            raise InvalidArgument(
                "block_hashes holds something that is no bytes, expected one hash for each full block"
            )
        per_chunk = chunk_tokens // block_tokens
        chain = self._empty_chain(salt, adapter, (), adapter_name)
        chain.append_hashes(hashes[per_chunk - 1 :: per_chunk], tokens)
        return chain

    def lookup(self, keys: KeyChain, owner: str = "", *, chunks_max: int | None = None, is_counted: bool = True) -> Hit:
        """The longest run of present chunks, `chunks_max` at most. Reads shared memory: no round trip, no effect. A miss while
        the daemon is away.

        With windows and states in the layout a hit ends where they were stored for: an engine that computes the last token
        again looks up what is before it. `owner`: the name of another node that has, or is asked for, those that are not known
        to be present anywhere; not with groups. Where the daemon has a shared store, a hit that is shorter than `keys` costs
        one round trip, two with groups (`verbs/finder.py`). `is_counted`: whether hit rates have it; not where an engine looks
        up again what it is about to acquire. Raises InvalidArgument, also for keys of another model or layout.
        """
        check_keys(keys, self._namespace)
        if owner != "":
            check_owner(owner, self.layout)
        if chunks_max is not None:
            chunks_max = as_index("chunks_max", chunks_max, len(keys))
        return self._finder.lookup(keys, owner, chunks_max=chunks_max, is_counted=is_counted)

    @property
    def chunks_max(self) -> int:
        """The most chunks that a hit has: those that one request names and one lease holds."""
        return self._finder.chunks_max

    def is_being_saved(self, keys: KeyChain, chunk: int) -> bool:
        """Whether a writer is just saving this chunk, or it is on its way here from another tier, on some rank. Reads shared
        memory as `lookup` does. Raises InvalidArgument."""
        check_keys(keys, self._namespace)
        chunk = as_index("chunk", chunk, len(keys) - 1)
        session = self._link.session
        columns = keys.columns() if session is not None else ()
        return session is not None and any(
            session.index.is_being_written(KeyColumn(column)[chunk]) for column in columns
        )

    def acquire(self, hit: Hit) -> Lease:
        """Lease a hit's chunks, or the longest prefix of them that is still there; of windows and states what is a hit now.

        One round trip; none for an empty hit; more where some of it was evicted since and half of the time is left. Raises
        InvalidArgument, also for a hit of another model or layout.
        """
        check_hit(hit, self._namespace)
        return self._lease_fetcher.acquire(hit)

    def claim(self, ticket: bytes) -> Lease:
        """The lease that a ticket stands for, once on each rank. A used, expired or forged ticket gives an empty lease.

        A scheduler's Pool, which has no rank, ends the ticket with this and gets an empty lease. Raises InvalidArgument for
        what is no bytes.
        """
        if not isinstance(ticket, (bytes, bytearray, memoryview)):
            raise InvalidArgument(f"ticket is {type(ticket).__name__}, expected bytes")
        return self._lease_fetcher.claim(bytes(ticket))

    def open_promise_line(self, tickets: int, claims: int | None = None) -> PromiseLine:
        """A connection for promises of hits, of 1 to 1024 `tickets` each that may be claimed `claims` times (see
        `Lease.ticket`); the caller closes it. For a scheduler: a Pool that stands for all ranks. Raises LayoutMismatch, and
        InvalidArgument for other numbers, or a rank among others."""
        check_promises(self.layout, tickets, claims)
        whole = replace(self.layout, rank=None)  # given-back tickets are ended by a claim of no rank
        plan = replace(self._plan, layout=whole)
        line = self._hint_client.line = PromiseLine(
            Link(plan, Counters(), logs_ends=False),
            self._lease_fetcher,
            self._counters,
            tickets=tickets,
            claims=claims,
            timeout_s=self._timeout_s,
        )
        return line

    def load(
        self,
        lease: Lease,
        cache: Cache | Sequence[Cache] | None = None,
        block_ids: object = None,
        first_chunk: int = 0,
        *,
        into: object = None,
    ) -> Load:
        """Copy leased chunks from `first_chunk` on into engine memory; returns at once.

        Either `cache` and `block_ids` (exactly the blocks of those chunks, each once; −1 skips a block), or `into`:
        C-contiguous uint8 [chunks, chunk_bytes], of a share only its bytes, head group by head group (docs/layouts.md). Of a
        layout with groups each is a sequence with an entry for each: of full groups the chunks from `first_chunk` on, of
        windows and states all that `lease.ranges` names. Raises InvalidArgument for wrong lengths and for a lease or cache of
        another Pool, even if the lease has ended.
        """
        check_chain_lease(lease, self._namespace)
        first_chunk = as_index("first_chunk", first_chunk, lease.chunks)
        rows = lease.hold.rows_from(first_chunk)
        blocks = self._blocks(rows, cache, block_ids, into, is_load=True)
        return self._load_starter.begin_load(lease.hold, first_chunk, rows, blocks)

    def leased_memory(self, lease: Lease) -> LeasedMemory:
        """A lease's chunks where they lie in the pool, to be read there until it is closed: nothing is copied. Raises
        InvalidArgument, also for a layout whose layers are not whole there (head groups, a share)."""
        check_chain_lease(lease, self._namespace)
        check_no_groups(self.layout)
        if self.layout.head_groups != 1 or not self.shares[0].is_whole(self.layout):
            raise InvalidArgument("leased_memory has whole layers, expected a layout without head groups and no share")
        return LeasedMemory(self._link, lease.hold, self._load_starter.begin_check)

    def chunks_to_save(
        self, keys: KeyChain, first_chunk: int = 0, chunks: int | None = None, boundaries: Sequence[int] | None = None
    ) -> tuple[Sequence[int], ...]:
        """The chunks of each group of the layout that `save` stores with these arguments: those whose blocks it is to be given.
        Raises InvalidArgument."""
        check_keys(keys, self._namespace)
        first_chunk = as_index("first_chunk", first_chunk, len(keys))
        count = len(keys) - first_chunk if chunks is None else chunks
        count = as_index("chunks", count, len(keys) - first_chunk)
        return chunks_to_save(
            self.layout,
            keys,
            range(first_chunk, first_chunk + count),
            boundaries=boundaries,
            held=self._chunks_held,
        )

    def save(
        self,
        keys: KeyChain,
        cache: Cache | Sequence[Cache] | None = None,
        block_ids: object = None,
        first_chunk: int = 0,
        chunks: int | None = None,
        retention: Sequence[TokenRange] = (),
        *,
        from_: object = None,
        boundaries: Sequence[int] | None = None,
        chosen: Sequence[Sequence[int]] | None = None,
        prompt_tokens: int | None = None,
        decode_priority: int | None = None,
        decode_duration_s: float | None = None,
    ) -> Save:
        """Reserve slots for chunks `first_chunk` up to `first_chunk + chunks` (None: all further keys) and copy.

        Either `cache` and `block_ids`, or `from_`: C-contiguous uint8 [chunks, chunk_bytes], as `into` of a load. See
        `Save` for the next steps. `retention`: priorities of the chunks that its ranges touch (see `retention`);
        `decode_priority`, `decode_duration_s` (seconds): those of chunks behind the prompt's `prompt_tokens` tokens; without
        `prompt_tokens` all of `keys` is prompt.

        Of a layout with groups `cache`, `block_ids` and `from_` are sequences with an entry for each, and windows and states
        are stored before each of the `boundaries` alone, numbers of chunks: the blocks are those of `chunks_to_save`, in its
        order. `chosen`: the chunks of each group in place of `first_chunk`, `chunks` and `boundaries`, for an engine that
        stores each when it has computed it: of a full group numbers in a row, of others any ascending ones. Raises
        InvalidArgument for what does not fit: a wrong number of blocks, keys or a cache of another model or layout.
        """
        if chosen is None:
            named = self.chunks_to_save(keys, first_chunk, chunks, boundaries)
        else:
            check_keys(keys, self._namespace)
            if first_chunk or chunks is not None or boundaries is not None:
                raise InvalidArgument("expected chosen without first_chunk, chunks and boundaries")
            named = checked_chunks(chosen, self.layout, len(keys))
        retention_columns = plan_retention(
            retention,
            chunks=len(keys),
            chunk_tokens=self.layout.chunk_tokens,
            prompt_tokens=prompt_tokens,
            decode_priority=decode_priority,
            decode_duration_s=decode_duration_s,
        )
        blocks = self._blocks(named, cache, block_ids, from_, is_load=False)
        return self._save_starter.begin_save(self._save_starter.plan(keys, retention_columns, named, blocks))

    def probe(
        self, keys: npt.NDArray[np.uint8], group: int = 0, *, asks_store: bool = False, is_counted: bool = False
    ) -> npt.NDArray[np.uint8]:
        """The level of each chunk of a set, uint8 [keys], 0 for one that is not known to be anywhere: 1 DRAM, 2 SSD, 3 a peer.

        A set is of chunks of an engine that names each by a key of its own, in no order and without parents: `keys` are uint8
        [keys, 32], C-contiguous, of one group of the layout. They share nothing with chunks of `Pool.keys`; a key names the
        same chunk as `keys_from_hashes` of that hash alone. Reads shared memory: no request, no lease. `is_counted`: whether
        hit rates have it, as a lookup of so many chunks.
        `asks_store`: those that are absent are looked for in the store that nodes share, where there is one: level 4, in one
        round trip for each 4096. Raises InvalidArgument.
        """
        return self._sets.probe(keys, group, asks_store=asks_store, is_counted=is_counted)

    def acquire_set(self, keys: npt.NDArray[np.uint8], group: int = 0, *, timeout_s: float | None = None) -> Lease:
        """Lease what is there of a set, `keys` uint8 [keys, 32] (see `probe`): `lease.held` says of each key whether it is
        leased. Chunks in lower tiers and on other nodes are on their way then, each alone.

        One round trip; none where the daemon is away, or for no keys. 4096 keys at most. Of what is released together the first
        key counts as used last. `timeout_s`: bounds this round trip instead of the Pool's, for a caller that may not wait; a
        daemon that does not answer in it has its connection ended. Raises InvalidArgument.
        """
        return self._sets.acquire(keys, group, self._timeout_s if timeout_s is None else timeout_s)

    def load_set(
        self,
        lease: Lease,
        rows: object = None,
        *,
        cache: Cache | None = None,
        block_ids: object = None,
        may_outlive: bool = False,
    ) -> SetLoad:
        """Copy what is leased of a set into engine memory; returns at once. The result has a state for each key.

        `rows` are memory of the host, one for each key, leased or not, C-contiguous uint8 [keys, chunk_bytes], or addresses of
        as many bytes each (integers; they must stay), none of which overlap; or the blocks of each key in a `cache`, on the
        host or on a device. A key whose blocks are all −1 is left out: neither read nor verified. A row that is not loaded is
        undefined where its key was leased, and else untouched.
        `may_outlive`: chunks are loaded also after the daemon has gone, or has dropped the connection: this process has their
        memory still, and their generations and checksums decide what is good. Raises InvalidArgument as `load` does.
        """
        return self._sets.load(lease, rows, cache=cache, block_ids=block_ids, may_outlive=may_outlive)

    def save_set(
        self,
        keys: npt.NDArray[np.uint8],
        rows: object = None,
        parents: npt.NDArray[np.uint8] | None = None,
        retention: Sequence[TokenRange] = (),
        *,
        group: int = 0,
        cache: Cache | None = None,
        block_ids: object = None,
    ) -> Save:
        """Reserve slots for the chunks of a set and copy, as `save` does: its result has a state for each key, in their order.

        `rows`, or `cache` and `block_ids`: as of `load_set`, one for each key, of which several may be the same memory. A key
        that is named again is saved once, from its first row, and `present` where that is stored. `parents`: the key before
        each in its prompt, uint8 [keys, 32], zeros for none; they are no part of the keys and need not be stored, and have the
        chunks of a prompt that are in the set evicted from its end on. Without them the set is evicted from its last key on.
        `retention`: its ranges count tokens of the rows, one behind the other. Raises InvalidArgument.
        """
        return self._sets.save(keys, rows, parents, retention, group=group, cache=cache, block_ids=block_ids)

    def events(self, since: EventMark = BEGINNING) -> EventBatch:
        """Events of the chunks of this Pool's model and layout after a mark; a first part where there are many.

        One round trip; nothing new while the daemon is away. Raises InvalidArgument for an invalid mark.
        """
        return read_events(self._link.session, since, self._link.note_failure)

    def snapshot(self) -> Iterator[SnapshotPart]:
        """The chunks of this Pool's model and layout, part by part; nothing while the daemon is away.

        Raises KVPoolError when the daemon goes away in between: half a snapshot is of no use.
        """
        return read_snapshot(self._link.session, self._link.note_failure)

    def retain(
        self,
        keys: KeyChain,
        retention: Sequence[TokenRange],
        *,
        prompt_tokens: int | None = None,
        decode_priority: int | None = None,
        decode_duration_s: float | None = None,
    ) -> RetainResult:
        """Set the retention of stored chunks, on every rank this Pool stands for; see `save`.

        Chunks that no range covers are left as they are. One round trip for each 4096 chunks and rank. Raises InvalidArgument.
        """
        check_keys(keys, self._namespace)
        retention_columns = plan_retention(
            retention,
            chunks=len(keys),
            chunk_tokens=self.layout.chunk_tokens,
            prompt_tokens=prompt_tokens,
            decode_priority=decode_priority,
            decode_duration_s=decode_duration_s,
        )
        return self._hint_client.retain(keys, retention_columns)

    def announce(self, keys: KeyChain, chunks_max: int | None = None) -> AnnounceResult:
        """Announce chunks that will be requested soon: they stay in DRAM, or are promoted to it, until this Pool acquires them.

        `chunks_max`: of the first ones alone. Bounded in bytes (`dram.announced_quota`) and time (`dram.announced_ttl`).
        Raises InvalidArgument.
        """
        check_keys(keys, self._namespace)
        if chunks_max is not None:
            chunks_max = as_index("chunks_max", chunks_max, len(keys))
        return self._hint_client.announce(keys, chunks_max)

    def demote(self, keys: KeyChain) -> RetainResult:
        """Hint that these chunks will not be requested soon: write them to the SSD tier, and evict them first from DRAM.
        Raises InvalidArgument."""
        check_keys(keys, self._namespace)
        return self._hint_client.demote(keys)

    def hint(self, envelope: object, keys: KeyChain, *, prompt_tokens: int | None = None) -> HintReport:
        """Carry an orchestrator's KvHintsEnvelope out on these keys. Returns the outcome of each action; raises nothing for its
        content, InvalidArgument for keys of another model or layout.

        `prompt_tokens`: where decoding begins, for directives that cover the output. Hints that are parsed already (`hints`)
        are used as they are.
        """
        check_keys(keys, self._namespace)
        return self._hint_client.hint(parse_hints(envelope), keys, prompt_tokens)

    @property
    def counters(self) -> Counters:
        """This client's counters, to which its sparse sequences add."""
        return self._counters

    def engine_reports(self) -> EngineReports:
        """Reports of one more block pool over this Pool's connection."""
        return EngineReports(self._link, self.layout, self._salt, self._roots_of)

    def _blocks(
        self, chunks: Sequence[Sized], cache: Any, block_ids: object, array: object, *, is_load: bool
    ) -> list[EngineBlocks]:
        """The engine memory of the chunks of each group."""
        if not self.layout.groups and not isinstance(cache, (list, tuple)):
            return [self._copies.blocks(cache, block_ids, array, chunks=len(chunks[0]), is_load=is_load)]
        given = [
            by_group(name, each, self.layout)
            for name, each in (("cache", cache), ("block_ids", block_ids), ("the array", array))
        ]
        return [
            side.blocks(*of_group, chunks=len(named), is_load=is_load)
            for side, named, of_group in zip(self._sides, chunks, zip(*given, strict=True), strict=True)
        ]

    def _empty_chain(
        self, salt: bytes | None, adapter: str, extra: Sequence[Extra], adapter_name: str | None = None
    ) -> KeyChain:
        is_plain = salt is None and adapter == "" and adapter_name is None
        roots, scope = self._plain_scope if is_plain else self._scope_of(salt, adapter, adapter_name)
        entries = () if type(extra) is tuple and not extra else as_entries("extra", extra)
        return KeyChain(self.layout.chunk_tokens, roots, entries, scope, namespace=self._namespace)

    def _scope_of(self, salt: bytes | None, adapter: str, adapter_name: str | None) -> tuple[ScopedRoots, bytes]:
        """The roots of a salt and an adapter, and what events name them by."""
        chosen = self._salt if salt is None else salt
        check_scope(chosen, adapter)
        if adapter_name is not None and not is_text(adapter_name):
            raise InvalidArgument(f"adapter_name is {adapter_name!r:.80}, expected text")
        fixed = bytes(chosen)
        roots = ScopedRoots(self._roots, self._link, salt=fixed, adapter=adapter)
        return roots, pack_scope(adapter if adapter_name is None else adapter_name, fixed)

    def _roots_of(self, salt: bytes, adapter: str) -> tuple[bytes, ...]:
        return self._roots.of(self._link.domain, salt, adapter)
