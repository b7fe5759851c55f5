"""A process in which SGLang's own tree, allocators and device pools, out of its wheel, drive the linker on CPU tensors:
`DIRECTORY PACKAGES SOCKET CASE`.

For each kind of model: prompts are computed (their pages are filled by what they are), inserted, offloaded, forgotten by the
tree, matched again and loaded, layer by layer. CASE `kinds` does that; `flipped` has a bit turn over in
between; `rank` is one of two ranks. Prints a JSON object of what was seen; a wrong byte is an AssertionError.
"""

import array
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engines.sglang.wheel_stubs import install
from tests.rigs.daemon import wait_until

PAGE, SLOTS, LAYERS, PAGES = 4, 128, 3, 6
KINDS = ("mha", "mla", "uneven", "swa", "mamba")
LINKER = {"linker": "KVPoolLinker", "linker_module_path": "kvpool_client.sglang.linker"}


class RequestKv:
    """What SGLang's requests know of their KV, as far as the tree asks."""

    def __init__(self) -> None:
        self.evicted: dict[Any, int] = {}
        self.mamba_pool_idx: Any = None
        self.mamba_cow_src_index: Any = None
        self.mamba_needs_clear = True

    @property
    def holds_mamba(self) -> bool:
        return self.mamba_pool_idx is not None

    def get_evicted_seqlen(self, component: Any) -> int:
        return self.evicted.get(component, 0)

    def set_evicted_seqlen(self, component: Any, length: int) -> None:
        self.evicted[component] = length


class Engine:
    """SGLang's tree over pools of one kind, with the linker behind it."""

    def __init__(self, kind: str, socket: str, group: Any = None) -> None:
        """`group`: of torch's, where this is one rank of several."""
        from sglang.srt.mem_cache import memory_pool, unified_radix_cache
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_cache.components import mamba
        from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

        bare = types.SimpleNamespace
        mamba.mamba_cache_chunk_size = mamba.mamba_checkpoint_grid = lambda *_: PAGE
        mamba.get_exec = lambda: bare(mamba=bare(mamba_max_states_per_path=0))
        unified_radix_cache.get_disagg = lambda: types.SimpleNamespace(disaggregation_mode="null")
        memory_pool.UnquantizedKVCacheMethod = type("UnquantizedKVCacheMethod", (), {})
        self.kind = kind
        self.components = [ComponentType.FULL]
        common = {"page_size": PAGE, "dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}
        heads = {"head_num": 2, "head_dim": 16}
        self.requests: Any = types.SimpleNamespace(mamba_pool=None)
        window = None
        if kind == "swa":
            from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
            from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

            self.components.append(ComponentType.SWA)
            window = 2 * PAGE
            pool = SWAKVPool(
                size=SLOTS,
                size_swa=SLOTS // 2,
                page_size=PAGE,
                dtype=torch.bfloat16,
                device="cpu",
                swa_attention_layer_ids=[0, 2],
                full_attention_layer_ids=[1, 3],
                **heads,
            )
            allocator = SWATokenToKVPoolAllocator(SLOTS, SLOTS // 2, PAGE, torch.bfloat16, "cpu", pool, False)
        elif kind == "mamba":
            self.components.append(ComponentType.MAMBA)
            self.requests = self._mamba_requests(memory_pool)
            pool = memory_pool.HybridLinearKVPool(
                size=SLOTS,
                full_attention_layer_ids=[1, 3],
                mamba_pool=self.requests.mamba_pool,
                **heads,
                **common,
            )
            allocator = PagedTokenToKVPoolAllocator(SLOTS, PAGE, torch.bfloat16, "cpu", pool, False)
        else:
            if kind == "mla":
                pool = memory_pool.MLATokenToKVPool(
                    size=SLOTS, kv_lora_rank=32, qk_rope_head_dim=8, layer_num=LAYERS, **common
                )
            else:
                wide = {"v_head_dim": 8} if kind == "uneven" else {}
                pool = memory_pool.MHATokenToKVPool(size=SLOTS, layer_num=LAYERS, **heads, **wide, **common)
            allocator = PagedTokenToKVPoolAllocator(SLOTS, PAGE, torch.bfloat16, "cpu", pool, False)
        self.pool, self.allocator = pool, allocator
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            tree_components=tuple(self.components),
            sliding_window_size=window,
            tree_core_backend="python",
            tp_cache_group=group,
            enable_mamba_extra_buffer=kind == "mamba",  # else its pages have one token
        )
        self.cache = unified_radix_cache.UnifiedRadixCache(params)
        # The tree forgets by a reset, behind which the weights are the same.
        extra = {
            "socket": socket,
            "revision": "1",
            "model": kind,
            "updates_are_named": True,
            **dict.fromkeys(("timeout_s", "scheduler_timeout_s", "batch_timeout_s"), 20.0),
        }
        config = LINKER | {"linker_extra_config": extra}
        self.linker = create_unified_cache_linker(
            types.SimpleNamespace(model_path=kind),
            params,
            backend="dynamic",
            config=config,
            components=set(self.components),
        )
        self.cache.init_cache_linker(self.linker)
        pool.register_layer_transfer_counter(self.cache.linker.layer_done_counter)
        self.wait_connected()

    def wait_connected(self) -> None:
        """Until the pools are found, under whatever name."""
        wait_until(
            lambda: all(self.linker.counters()[f"{name}.connected"] for name in self.linker._stores), "connected"
        )

    @staticmethod
    def _mamba_requests(memory_pool: Any) -> Any:
        shape = types.SimpleNamespace(conv=[(12, 3)], temporal=(2, 4, 8), disable_conv_window_dedup=False)
        dtype = types.SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
        return memory_pool.HybridReqToTokenPool(
            size=8,
            mamba_size=16,
            mamba_spec_state_size=8,
            max_context_len=64,
            device="cpu",
            enable_memory_saver=False,
            cache_params=types.SimpleNamespace(shape=shape, dtype=dtype, layers=[0, 2]),
            mamba_layer_ids=[0, 2],
            enable_mamba_extra_buffer=False,
            enable_overlap_schedule=False,
        )

    def states(self) -> list[Any]:
        """The states of Mamba, [layers, slots, …]; none of other models."""
        if self.kind != "mamba":
            return []
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.temporal, *cache.conv]

    def buffers(self) -> list[tuple[bool, Any]]:
        """Each buffer [slots, …], and whether it has windows' slots."""
        if self.kind == "swa":
            parts = [(False, self.pool.full_kv_pool), (True, self.pool.swa_kv_pool)]
        else:
            parts = [(False, self.pool.full_kv_pool if self.kind == "mamba" else self.pool)]
        found = []
        for is_windowed, pool in parts:
            planes = [pool.kv_buffer] if hasattr(pool, "kv_buffer") else [pool.k_buffer, pool.v_buffer]
            found += [(is_windowed, buffer) for plane in planes for buffer in plane]
        return found

    def compute(self, tokens: list[int], slots: Any) -> None:
        """Fill the slots of a prompt with what these tokens give."""
        for number, (is_windowed, buffer) in enumerate(self.buffers()):
            places = self.allocator.translate_loc_from_full_to_swa(slots) if is_windowed else slots
            buffer[places] = self.content(number, tokens, buffer)

    @staticmethod
    def content(number: int, tokens: list[int], buffer: Any) -> Any:
        shape = (len(tokens), *buffer.shape[1:])
        made = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        ids = torch.tensor(tokens, dtype=torch.float32).reshape(-1, *([1] * (buffer.dim() - 1)))
        return ((made + 7 * ids + 31 * number) % 113).to(buffer.dtype)

    @staticmethod
    def state_of(number: int, tokens: list[int], buffer: Any) -> Any:
        """A state of each layer at the end of a prompt, [layers, 1, …]."""
        shape = (buffer.shape[0], 1, *buffer.shape[2:])
        made = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        return ((made + 5 * tokens[-1] + 17 * number) % 101).to(buffer.dtype)

    def insert(self, tokens: list[int]) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        if self.kind == "swa":
            slots = self.allocator.full_attn_allocator.alloc(len(tokens))
            self.allocator.set_full_to_swa_mapping(slots, self.allocator.swa_attn_allocator.alloc(len(tokens)))
        else:
            slots = self.allocator.alloc(len(tokens))
        self.compute(tokens, slots)
        state = None
        if self.kind == "mamba":
            state = self.requests.mamba_allocator.alloc(1)
            for number, buffer in enumerate(self.states()):
                buffer[:, state] = self.state_of(number, tokens, buffer)
        self.cache.insert(InsertParams(key=RadixKey(array.array("q", tokens)), value=slots, mamba_value=state))

    def settle_offloads(self) -> list[bool]:
        """Let the tree take every report; the offloads' results."""
        wrapper, found = self.cache.linker, list[bool]()
        take: Callable[[int], list[bool]] = wrapper.take_completed_offloads

        def taken(count: int) -> list[bool]:
            results = take(count)
            found.extend(results)
            return results

        wrapper.take_completed_offloads = taken

        def step() -> bool:
            self.cache.check_hicache_events()
            return not wrapper.pending_offloads

        wait_until(step, "every offload is reported")
        return found

    def forget(self) -> None:
        """The tree and the pools are emptied."""
        self.cache.reset()
        self.allocator.clear()
        for buffer in [*(buffer for _, buffer in self.buffers()), *self.states()]:
            buffer.fill_(-1)
        if self.kind == "mamba":
            self.requests.clear()

    def match(self, rid: str, tokens: list[int]) -> tuple[Any, Any]:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        req = types.SimpleNamespace(rid=rid, session=None, kv=RequestKv(), swa_branching_seqlen=None, last_node=None)
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array.array("q", tokens)), req=req))
        req.last_node = result.last_device_node
        return req, result

    def restore(self, req: Any, result: Any) -> Any:
        """Load what was matched; the slots."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        params = InitLoadBackParams(result.best_match_node, result.host_hit_length, req=req)
        count, _ = self.cache.init_load_back(params)
        return self.cache.linker.private_load_indices[req.rid] if count else None

    def forward(self, req: Any, tokens: list[int], slots: Any) -> None:
        """Wait for each layer as the forward does, and look at it."""
        index = self.cache.ready_to_load_host_cache()
        counter = self.cache.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS if self.kind in ("mha", "mla", "uneven") else 4):
            counter.wait_until(layer)
            if self.kind == "mamba" and layer % 2 == 0:
                for number, buffer in enumerate(self.states()):
                    expected = self.state_of(number, tokens, buffer)[layer // 2, 0]
                    assert torch.equal(buffer[layer // 2, req.kv.mamba_pool_idx], expected), (
                        f"other state in layer {layer}"
                    )
            for number, place in self._numbers_of(layer):
                is_windowed, buffer = self.buffers()[number]
                end = len(slots)
                first = max(0, end - 2 * PAGE) if is_windowed else 0
                places = slots[first:end]
                if is_windowed:
                    places = self.allocator.translate_loc_from_full_to_swa(places)
                expected = self.content(number, tokens, buffer)[first:end]
                assert torch.equal(buffer[places], expected), (
                    f"other bytes in layer {layer} of {self.kind}, plane {place}"
                )

    def _numbers_of(self, layer: int) -> list[tuple[int, int]]:
        """The buffers that the forward reads at a layer."""
        if self.kind == "mla":
            return [(layer, 0)]
        if self.kind == "swa":
            base = 0 if layer % 2 else 4
            return [(base + layer // 2, 0), (base + 2 + layer // 2, 1)]
        if self.kind == "mamba":
            return [(layer // 2, 0), (2 + layer // 2, 1)] if layer % 2 else []
        return [(layer, 0), (LAYERS + layer, 1)]

    def finish(self) -> list[str]:
        return list(self.cache.linker.finish_loads())

    def close(self) -> None:
        self.linker.close()


def _kinds(socket: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for kind in KINDS:
        engine = Engine(kind, socket)
        prompts = [[1000 * number + place for place in range(PAGES * PAGE)] for number in range(2)]
        for tokens in prompts:
            engine.insert(tokens)
        stored = engine.settle_offloads()
        engine.forget()
        loaded = 0
        for number, tokens in enumerate(prompts):
            req, result = engine.match(f"r{number}", [*tokens, 5])
            assert result.host_hit_length == PAGES * PAGE, (kind, result)
            slots = engine.restore(req, result)
            engine.forward(req, tokens, slots)
            assert engine.finish() == []
            loaded += len(slots)
        seen[kind] = {"stored": stored, "loaded": loaded}
        engine.close()
    return seen


def _flipped(socket: str) -> dict[str, Any]:
    """The second page of a prompt is other bytes once it is promised."""
    engine = Engine("mha", socket)
    tokens = list(range(PAGES * PAGE))
    engine.insert(tokens)
    engine.settle_offloads()
    engine.forget()
    req, result = engine.match("a", [*tokens, 5])
    (lease,) = engine.linker._promises.find("a").pools["kv"].leases
    lease.hold.session.arena.view()[int(lease.hold.held_rows.offsets[1]) + 3] ^= 1
    assert engine.restore(req, result) is not None
    index = engine.cache.ready_to_load_host_cache()
    engine.cache.linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        engine.cache.linker.layer_done_counter.wait_until(layer)
    aborted = engine.finish()
    _, again = engine.match("b", [*tokens, 5])
    in_tree = again.device_prefix_len
    engine.close()
    return {"aborted": aborted, "in_tree": in_tree, "found_again": again.host_hit_length}


def _rank(socket: str) -> dict[str, Any]:
    """One of two ranks with the same KV, behind an update that has no version: both of them load what the first one stored."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    number, place = int(os.environ["RANK"]), os.environ["RANKS_PLACE"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
    engine = Engine("mla", socket, torch.distributed.group.WORLD)

    def flush_cache_after_weight_update() -> None:
        engine.forget()

    flush_cache_after_weight_update()
    engine.wait_connected()
    tokens = list(range(PAGES * PAGE))
    engine.insert(tokens)
    engine.settle_offloads()
    engine.cache.evict(EvictParams(num_tokens=len(tokens)))
    for _, buffer in engine.buffers():
        buffer.fill_(-1)
    req, result = engine.match("a", [*tokens, 5])
    assert result.host_hit_length == len(tokens), result
    slots = engine.restore(req, result)
    engine.forward(req, tokens, slots)
    assert engine.finish() == []
    saved = engine.linker.counters()["kv.saved_pages"]
    engine.close()
    torch.distributed.destroy_process_group()
    return {"loaded": len(slots), "saved_pages": saved}


def main(directory: Path, packages: Path, socket: str, case: str) -> int:
    install(directory, packages)
    print(json.dumps({"kinds": _kinds, "flipped": _flipped, "rank": _rank}[case](socket)))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]))
