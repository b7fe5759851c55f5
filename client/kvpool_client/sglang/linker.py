"""Linker between SGLang's unified radix cache and kvpool, loaded by configuration with nothing patched.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KVPoolLinker", "linker_module_path": "kvpool_client.sglang.linker",
        "linker_extra_config": {"socket": "/run/kvpool/kvpool.sock"}}'

Pages move straight between the device pools and the arena: no host pool lies between. Imports sglang; nothing else in
`kvpool_client` imports this module. Nothing raises into SGLang: what fails is a miss, or an offload that stored nothing,
counted and logged once. Only a load of pages that were promised can fail a request, and does so where their bytes are not what
was stored. Threads: SGLang's scheduler thread; offloads have one of their own.
"""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvpool.clock import Deadline
from kvpool.errors import InvalidArgument
from kvpool.states import DRAM
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.job_line import JobLine
from kvpool_client.engines.weights import Revision
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.sglang.device_pages import MAMBA, describe_device_pools
from kvpool_client.sglang.hit_policy import ALL_PAGES, prefixes_of
from kvpool_client.sglang.host_pages import KV, Shard
from kvpool_client.sglang.layer_loads import LayerLoads, QueuedLoad
from kvpool_client.sglang.names import named, weights_update, weights_version
from kvpool_client.sglang.offloads import Offloads
from kvpool_client.sglang.page_store import PageStore
from kvpool_client.sglang.promises import Promise, Promises
from kvpool_client.sglang.settings import LINKER, Settings

_log = logging.getLogger(__name__)
EVENT_PAUSE_S = 0.0005
# More than there are pools, each of which connects once at a time.
CONNECTS_MAX = 64
_STAGES = "pp: stages of a pipeline do not agree on what they restore: run with --pp-size 1, or with HiCache's backend"
_SPLIT_PAGES = (
    "dcp: decode context parallelism gives each rank a part of every page: run with --dcp-size 1, or without the linker"
)

Levels = npt.NDArray[np.uint8]


class KVPoolLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang's class is untyped here
    """See the module. Raises ConfigError where its configuration is wrong."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any = (),
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        name = getattr(server_args, "served_model_name", None) or getattr(server_args, "model_path", None)
        self._settings = Settings.read(extra_config, name, LINKER)
        self.forward_stream = forward_stream
        self._guard = FailureGuard(_log)
        self._shard = _shard_of(params)
        # Of this engine's own names: all ranks make the same ones, since SGLang resets them in the same step.
        self._engine = self._guard.call("agree", uuid4().hex, _drawn_word, params, self._shard.tp_size)
        self._resets = self._changes = 0  # of versions, since the last reset
        self._reader = WeightsReader(DigestMemory.of_user(os.environ), _log)
        self._first_revision, refusal = named(self._settings, name, server_args, os.environ)
        self._revision = self._first_revision
        # The version of the weights when it was last looked at, and at the last reset.
        self._seen_version = self._reset_version = weights_version()
        self._is_alone = False  # the name is this engine's own
        self._connecting = JobLine("kvpool-connect", self._guard, jobs_max=CONNECTS_MAX)
        if self._revision is not None:
            self._revision.begin_reading(self._reader)
        refusal = refusal or (_STAGES if self._shard.pp_size > 1 else "")
        refusal = refusal or (_SPLIT_PAGES if int(getattr(server_args, "dcp_size", 1) or 1) > 1 else "")
        self._stores = self._described(params, refusal)
        # SGLang asks whether windows are among them. Of a model that shares nothing, no prefix is ever restored.
        self.pools: dict[Any, Any] = {PoolName(each): store for each, store in self._stores.items()}
        self._loads = self.layer_done_counter = LayerLoads(self._guard)
        if MAMBA in self._stores:
            params.req_to_token_pool.register_layer_transfer_counter(self._loads)
        self._promises = Promises(self._settings.promise_s)
        self._offloads = Offloads(self._guard)
        self._is_ending = threading.Event()  # no offload waits for the engine any more
        self._counts = dict.fromkeys(
            ("promised", "unpromised", "late_promises", "renewed_loads", "refused_offloads"), 0
        )

    def __repr__(self) -> str:
        return f"<KVPoolLinker {list(self._stores.values())}>"

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Every prefix, in pages, that is in DRAM and leased now for this request."""
        lengths = self._guard.call("lookup", None, self._lookup, rid, transfers)
        if lengths is None:
            self._guard.call("lookup", None, self._promises.drop, rid)
        return lengths or []

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load of what the request was promised. True, on every rank, for pages that SGLang's allocator gave."""
        self._guard.call("load", None, self._look_at_version)
        pools = self._guard.call("load", None, self._numbered, transfers)
        if not pools:
            self._promises.drop(rid)
            return False
        promise = self._guard.call("load", None, self._redeemed, rid, pools)
        if promise is None and self._shard.tp_size == 1 and self._shard.cp_size == 1:
            return False  # no other rank counts on it: the request computes
        self._loads.queue(rid, QueuedLoad(promise, pools))
        return True

    def start_layer_wise_loading(self) -> int:
        """Begin what is queued; the number for the counter of layers, −1 where nothing is."""
        return self._loads.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until these loads have ended. Whether every page is in place."""
        return self._loads.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """Whether a load was queued that does not begin now."""
        return self._loads.cancel(rid)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Have a node's pages stored. True, on every rank: what cannot be stored is reported as such in its turn."""
        given = [each for each in transfers if each.keys and each.device_indices is not None]
        if not given:
            return False
        self._guard.call("offload", None, self._look_at_version)
        stores = [self._stores.get(_name_of(each)) for each in given]
        if any(store is None or store.refusal for store in stores):
            self._offloads.add_ended(False)
            return True
        events = self._guard.call("offload", None, self.record_offload_ready)
        if events is None:
            self._offloads.add_ended(False)
        elif not self._offloads.add(partial(self._store_pages, given, events, self._revision)):
            self._counts["refused_offloads"] += 1
        return True

    def num_completed_offloads(self) -> int:
        """How many offloads, from the oldest on, have ended. SGLang asks in each step: promises end here, too."""
        self._counts["late_promises"] += self._guard.call("lookup", 0, self._promises.end_late)
        return self._offloads.count_ended()

    def pop_completed_offload(self) -> bool:
        """Whether the oldest offload has stored everything."""
        return self._offloads.take_ended()

    def reset(self) -> None:
        """End everything that moves. Where SGLang's weights may have changed, nothing stored before is found any more."""
        self._loads.cancel_all()
        self._promises.clear()
        self._is_ending.set()
        self._offloads.end_all()
        self._is_ending.clear()
        self._guard.call("reset", None, self._rename_behind_reset)

    def close(self) -> None:
        """End everything, and the connections. Idempotent."""
        self._loads.cancel_all()
        self._promises.clear()
        self._is_ending.set()
        self._offloads.close()
        self._reader.stop()
        for store in self._stores.values():
            store.close()
        self._connecting.close()

    def counters(self) -> dict[str, int | float | str]:
        """Requests promised and what became of it, failures by call, and the Pools' own counters behind their pools' names."""
        found: dict[str, int | float | str] = {**self._counts, "promises": len(self._promises), **self._guard.counts()}
        if self._revision is not None:
            found |= self._revision.counts()
        for name, store in self._stores.items():
            found[f"{name}.connected"] = 0  # while none of its connections is open
            found |= {f"{name}.{counter}": value for counter, value in store.stats().items()}
        return found

    def _described(self, params: Any, refusal: str) -> dict[str, PageStore]:
        described = {}
        try:
            described = describe_device_pools(params, self._shard)
        except ENGINE_FAILURES as error:
            refusal = refusal or f"layout: {error}"
        stores = {}
        for name, pages in (described or {KV: ()}).items():
            is_replicated = self._shard.tp_size > 1 and all(part.layout.world == 1 for part in pages)
            shard = replace(self._shard, is_replicated=is_replicated)
            stores[name] = PageStore(
                self._settings, shard, self._revision, refusal=refusal, name=name, line=self._connecting
            )
            stores[name].register_pages(pages, params)
        return stores

    def _lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        keys = next(list(each.keys or ()) for each in transfers if _name_of(each) == KV)
        _check_named_once(keys)
        self._look_at_version()
        before = self._promises.find(rid)
        levels: dict[str, Levels] = {}
        for each in transfers:
            store = self._stores.get(_name_of(each))
            if store is None:
                self._promises.drop(rid)
                return []
            levels[_name_of(each)] = store.levels(keys, is_counted=before is None)
        if before is not None and before.stands_for(keys, levels):
            self._promises.keep(rid, before)
            return before.lengths
        reach = _lengths(transfers, {name: found > 0 for name, found in levels.items()})
        if not reach or not self._promises.has_room(rid):
            self._counts["unpromised"] += bool(reach)
            self._promises.drop(rid)
            return []
        promise = self._promised(keys, reach[-1], levels)
        promise.lengths = _lengths(transfers, _in_dram(promise, keys))
        self._counts["promised"] += bool(promise.lengths)
        self._promises.keep(rid, promise)
        return promise.lengths

    def _promised(self, keys: Sequence[str], pages: int, levels: dict[str, Levels]) -> Promise:
        """Lease so many leading pages, of each pool those that DRAM has, and have others fetched up meanwhile."""
        pools = {}
        for name, found in levels.items():
            store, known = self._stores[name], list(zip(keys[:pages], found.tolist(), strict=False))
            pools[name] = store.promise([key for key, level in known if level == DRAM])
            store.fetch_up([key for key, level in known if level > DRAM])
        return Promise(keys, levels, pools)

    def _numbered(self, transfers: Sequence[Any]) -> dict[str, tuple[list[str], list[int]]]:
        """The pages to load by pool, and the engine's pages for them."""
        found = {}
        for each in transfers:
            if each.keys:
                keys, name = list(each.keys), _name_of(each)
                _check_named_once(keys)
                found[name] = keys, self._stores[name].page_numbers(each.device_indices, len(keys))
        return found

    def _redeemed(self, rid: str, pools: dict[str, tuple[list[str], list[int]]]) -> Promise | None:
        """The promise that has all of these pages; a new one where the old one has ended, or its connection has."""
        promise = self._promises.take(rid)
        if promise is not None and promise.is_live and _has_all(promise, pools):
            return promise
        levels = {name: np.full(len(keys), DRAM, np.uint8) for name, (keys, _) in pools.items()}
        renewed = Promise([], levels, {name: self._stores[name].promise(keys) for name, (keys, _) in pools.items()})
        if _has_all(renewed, pools):
            self._counts["renewed_loads"] += 1
            promise, renewed = renewed, promise if promise is not None else Promise([], {}, {})
        renewed.release()
        # Else what was promised, whose memory is there still: generations and checksums decide.
        return promise if promise is not None and _has_all(promise, pools) else None

    def _store_pages(self, transfers: Sequence[Any], events: Sequence[Any], revision: Revision | None) -> bool:
        """On the offloads' thread: store pages once the engine has written them, under the name that the weights had then.
        Whether all of them are in the pool now."""
        deadline = Deadline(self._settings.batch_timeout_s)
        while not all(event.query() for event in events):
            if deadline.has_passed():
                self._guard.miss("offload", "the engine has not written the pages in batch_timeout_s")
                return False
            if self._is_ending.wait(EVENT_PAUSE_S):
                return False
        stored = [
            self._stores[_name_of(each)].save(list(each.keys), each.device_indices, revision=revision)
            for each in transfers
        ]
        return all(all(of_pool) for of_pool in stored)

    def _look_at_version(self) -> None:
        """Where SGLang has recorded another version since: what was promised ends, and this engine shares with itself alone,
        because its own tree may have KV of both. Nothing is waited for."""
        version = weights_version()
        if version != self._seen_version:
            self._seen_version = version
            self._changes += 1
            self._promises.clear()
            self._rename_as("")

    def _rename_behind_reset(self) -> None:
        """Take another name where the weights may have changed, which SGLang does not show of every update: it shows a version
        that an update names. So without `updates_are_named` each reset may be behind one."""
        version, is_within = weights_update()
        is_named = self._settings.updates_are_named and version != self._reset_version
        self._seen_version = self._reset_version = version
        self._resets, self._changes = self._resets + 1, 0
        if is_named:
            self._rename_as(version)
        elif is_within or self._is_alone or not self._settings.updates_are_named:
            self._rename_as("")

    def _rename_as(self, version: str) -> None:
        """The name of a version, which engines share; empty: one of this engine's own, that nobody had before: each rank has it
        once it has come as far, and where ranks differ they find nothing of one another's."""
        if self._first_revision is None:
            return
        self._is_alone = not version
        own = f"{self._engine} {self._resets} {self._changes} {self._seen_version}"
        self._revision = Revision({"updated": version or own, "alone": not version}, origin=self._first_revision)
        for store in self._stores.values():
            store.rename(self._revision)


def _group_of(params: Any) -> Any:
    """The ranks that have the same requests in the same steps."""
    return getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None)


def _drawn_word(params: Any, ranks: int) -> str:
    """A word that nobody had before, drawn by the first rank of the group. All of them wait for it, as they start."""
    import torch  # optional heavy dependency: SGLang brings it

    drawn = torch.tensor(list(uuid4().bytes), dtype=torch.uint8)
    if ranks > 1:
        torch.distributed.broadcast(drawn, group=_group_of(params), group_src=0)
    return bytes(drawn.tolist()).hex()


def _shard_of(params: Any) -> Shard:
    """The part of the KV that this rank has."""
    import torch  # optional heavy dependency: SGLang brings it

    group = _group_of(params)
    rank, size = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    return Shard(
        tp_rank=rank,
        tp_size=size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        cp_rank=params.attn_cp_rank,
        cp_size=params.attn_cp_size,
    )


def _name_of(transfer: Any) -> str:
    return str(getattr(transfer.name, "value", transfer.name))


def _check_named_once(keys: Sequence[str]) -> None:
    """A page goes into one of the engine's. Raises InvalidArgument."""
    if len(set(keys)) < len(keys):
        raise InvalidArgument(f"{len(keys)} pages have {len(set(keys))} keys, expected each once")


def _lengths(transfers: Sequence[Any], present: dict[str, npt.NDArray[np.bool_]]) -> list[int]:
    """The prefixes that all pools can serve, ascending, by their policies."""
    lengths: set[int] | None = None
    for each in transfers:
        name = _name_of(each)
        policy = ALL_PAGES if name == KV else str(getattr(each.hit_policy, "value", each.hit_policy))
        own = prefixes_of(policy, present[name].tolist(), len(each.keys or ()))
        lengths = set(own) if lengths is None else lengths.intersection(own)
    return sorted(lengths or ())


def _in_dram(promise: Promise, keys: Sequence[str]) -> dict[str, npt.NDArray[np.bool_]]:
    return {name: np.array([pool.has([key]) for key in keys], np.bool_) for name, pool in promise.pools.items()}


def _has_all(promise: Promise, pools: dict[str, tuple[list[str], list[int]]]) -> bool:
    return all(name in promise.pools and promise.pools[name].has(keys) for name, (keys, _) in pools.items())
