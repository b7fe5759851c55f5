"""vLLM's whole scheduler with its OffloadingConnector, and a script in the worker's place. Imports vLLM's files (engine_files).

The script computes: a block of a request has bytes of its hash from the step that fills it on. It copies between its blocks and
the region as vLLM's worker does: stores of a step at the start of the next one. A block that was loaded must have its bytes.
"""

import hashlib
import os
import pickle
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

BLOCK_TOKENS = 16
BLOCK_BYTES = 1 << 16
STEPS_MAX = 100_000
STEP_S = 0.001


def hash_of(value: Any) -> bytes:
    """vLLM's default hash of blocks."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def content_of(block_hash: bytes) -> Any:
    """The bytes of a block."""
    return np.random.default_rng(list(block_hash)).integers(-128, 128, BLOCK_BYTES, np.int8)


class Off(int):
    """What is not configured: 0, and so is all of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class Facts:
    """A part of vLLM's configuration: what is not named is off."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Off()


def configuration(model: str, *, blocks: int, region_rows: int, tier: dict[str, Any]) -> tuple[Any, Any]:
    """vLLM's configuration, and that of its caches."""
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=512, dtype=torch.float16)
    caches = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=blocks * BLOCK_BYTES, layers=["a"], layer_stride=0, block_stride=BLOCK_BYTES)
        ],
        kv_cache_groups=[KVCacheGroupSpec(["a"], spec)],
    )
    assert spec.page_size_bytes == BLOCK_BYTES
    entry = {"type": "KVPoolTier", "module_path": "kvpool_client.vllm.tier", **tier}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": region_rows * BLOCK_BYTES,
        "secondary_tiers": [entry],
    }
    config = Facts(
        model_config=Facts(
            model=model,
            dtype=torch.float16,
            max_model_len=8192,
            get_total_num_kv_heads=lambda: 2,
            runner_type="generate",
            hf_config=None,
            multimodal_config=None,
        ),
        cache_config=Facts(
            num_gpu_blocks=blocks,
            enable_prefix_caching=True,
            cache_dtype="auto",
            block_size=BLOCK_TOKENS,
            prefix_cache_retention_interval=None,
            prefix_match_unit=None,
            kv_cache_layout=None,
            prefix_caching_hash_algo="sha256",
        ),
        scheduler_config=Facts(
            max_num_seqs=16,
            max_num_active_seqs=None,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=512,
            long_prefill_token_threshold=0,
            policy="fcfs",
            enable_chunked_prefill=True,
            watermark=0.0,
        ),
        parallel_config=Facts(
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
            nnodes_within_dp=1,
            distributed_executor_backend="uni",
            data_parallel_rank_local=None,
        ),
        kv_transfer_config=Facts(
            kv_connector="OffloadingConnector",
            kv_connector_extra_config=extra,
            kv_load_failure_policy="recompute",
            engine_id=f"kvpool-test-{os.getpid()}-{time.monotonic_ns()}",
            is_kv_consumer=True,
            kv_connector_module_path=None,
        ),
        load_config=Facts(load_format="auto", model_loader_extra_config=None),
        observability_config=Facts(),
        kv_events_config=None,
        lora_config=None,
        weight_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        max_concurrent_batches=1,
        max_in_flight_tokens=512,
        ec_manager_config=Facts(
            get_encoder_cache_manager_obj=lambda: SimpleNamespace(create_manager=lambda **_: Facts())
        ),
        device_config=Facts(device_type="cuda"),
    )
    return config, caches


class ScriptedEngine:
    """See the module."""

    def __init__(self, model: str = "/models/tiny", *, blocks: int = 128, region_rows: int = 64, **tier: Any) -> None:
        init_none_hash(hash_of)
        config, caches = configuration(model, blocks=blocks, region_rows=region_rows, tier=tier)
        self.scheduler = Scheduler(config, caches, Facts(accept_tokens=lambda *_: True), BLOCK_TOKENS)
        self.manager = self.scheduler.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        self.blocks = np.zeros((blocks, BLOCK_BYTES), np.int8)
        self._region = self.manager.primary_tier.get_kv_memoryview()
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_of)
        self._late: dict[int, Any] = {}
        self._count = 0
        self.loaded: dict[str, int] = {}  # blocks that were loaded for a request
        self.preempted = 0
        self.levels: dict[str, int] = {}

    def add(self, prompt: list[int], tokens: int = 1, **params: Any) -> Any:
        """A request arrives."""
        self._count += 1
        sampling = Facts(
            max_tokens=tokens,
            extra_args={"kv_transfer_params": params} if params else None,
            stop_token_ids=[],
            eos_token_id=None,
            repetition_detection=None,
        )
        request = Request(f"r{self._count}", prompt, sampling, None, block_hasher=self._hasher)
        request.structured_output_request = None
        request.status = RequestStatus.WAITING
        self.loaded[request.request_id] = 0
        self.scheduler.add_request(request)
        return request

    def collective_rpc(self, method: str) -> list[str]:
        """What vLLM's core has its workers do, of which there are none."""
        return [method]

    def step(self) -> None:
        """One step of the engine."""
        plan = self.scheduler.schedule()
        self.preempted += len(plan.preempted_req_ids or ())
        meta = plan.kv_connector_metadata
        done, received = OffloadingWorkerMetadata(), set[str]()
        region = np.asarray(self._region)
        for number, job in self._late.items():
            region[job.dst_spec.chunk_ids] = self.blocks[job.src_spec.block_ids]
            done.mark_completed(number)
        self._late = dict(meta.store_jobs)
        for number, job in meta.load_jobs.items():
            self.blocks[job.dst_spec.block_ids] = region[job.src_spec.chunk_ids]
            self._check(job)
            done.mark_completed(number)
            received.add(job.req_id)
        for number in sorted(meta.jobs_to_flush or ()):
            job = self._late.pop(number, None)
            if job is not None:
                region[job.dst_spec.chunk_ids] = self.blocks[job.src_spec.block_ids]
                done.mark_completed(number)
        sampled = [self._compute(name, count) for name, count in plan.num_scheduled_tokens.items()]
        names = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(
            names,
            {name: place for place, name in enumerate(names)},
            sampled,
            kv_connector_output=KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=done),
        )
        self.scheduler.update_from_output(plan, output)
        stats = self.scheduler.connector.get_kv_connector_stats()
        assert stats is None or stats.reduce() is not None

    def run(self, *requests: Any) -> None:
        """Until these have ended, and all that they left."""
        for _ in range(STEPS_MAX):
            if all(request.is_finished() for request in requests) and not self.is_busy():
                return
            self.step()
            time.sleep(STEP_S)
        raise AssertionError("the engine does not come to an end")

    def is_busy(self) -> bool:
        """Whether vLLM would step on."""
        return bool(self._late) or self.scheduler.has_requests() or self.scheduler.connector.has_pending_push_work()

    def serve(self, prompt: list[int], tokens: int = 1, **params: Any) -> int:
        """A request from its arrival to its end; how many blocks were loaded for it."""
        request = self.add(prompt, tokens, **params)
        self.run(request)
        self.step()  # vLLM reports a request's end with the next step
        self.run()
        return self.loaded[request.request_id]

    def forget(self) -> None:
        """vLLM's own prefix cache is emptied, and the region is not."""
        assert self.scheduler.reset_prefix_cache()

    def reset(self) -> None:
        """Prefix cache and region are emptied."""
        assert self.scheduler.reset_prefix_cache(reset_connector=True)

    def close(self) -> None:
        """The engine ends."""
        self._region = None
        self.scheduler.shutdown()

    def _blocks_of(self, name: str) -> tuple[Any, list[int]]:
        return self.scheduler.requests[name], self.scheduler.kv_cache_manager.get_block_ids(name)[0]

    def _check(self, job: Any) -> None:
        request, blocks = self._blocks_of(job.req_id)
        for block in job.dst_spec.block_ids.tolist():
            place = blocks.index(block)
            assert np.array_equal(self.blocks[block], content_of(request.block_hashes[place])), "other bytes in a block"
            self.loaded[job.req_id] += 1

    def _compute(self, name: str, count: int) -> list[int]:
        request, blocks = self._blocks_of(name)
        # The scheduler has counted the step's tokens already.
        end = request.num_computed_tokens
        for place in range((end - count) // BLOCK_TOKENS, end // BLOCK_TOKENS):
            if place < len(request.block_hashes):
                self.blocks[blocks[place]] = content_of(request.block_hashes[place])
        return [end % 1000] if end >= request.num_tokens else []
