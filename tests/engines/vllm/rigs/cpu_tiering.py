"""vLLM's tiered offloading on a CPU: its `TieringOffloadingSpec` with a worker that copies between KV in host memory and
the region of rows.

vLLM's own worker asserts that KV lies on a GPU; all else of the path is vLLM's, the region, its manager, its scheduler and the
tiers. Only an engine's process imports this module, by `spec_module_path`. The worker copies at once, on the thread that asks.
"""

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """The spec of an engine whose KV is in host memory."""

    _worker: "CopyingWorker | None"

    def get_worker(self, kv_caches: Any) -> "CopyingWorker":
        """The only one of this process."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CopyingWorker(base.OffloadingWorker):
    """Copies between the blocks of an engine and the region's rows, each of `blocks_per_chunk` blocks of one group."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._blocks, self._rows = [], []
        for cache in kv_caches.tensors:
            shape = blocks_per_chunk, cache.page_size_bytes
            rows = region.create_next_worker_view(blocks_per_chunk * cache.page_size_bytes)
            self._blocks.append(cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes).numpy())
            self._rows.append(rows.unflatten(1, shape).numpy())
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks into rows."""
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Rows into blocks."""
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[Any]:
        """What has ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every job has ended when it was given."""

    def shutdown(self) -> None:
        """Let the region go."""
        self._blocks.clear()
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, engine: Any, host: Any, *, is_store: bool) -> bool:
        begun, copied, block_at, row_at = time.perf_counter(), 0, 0, 0
        block_ids, row_ids = engine.block_ids, host.block_ids
        for refs, count, first in zip(self._groups, engine.group_sizes, engine.block_indices, strict=True):
            places = np.arange(count) + first % self._blocks_per_chunk
            blocks = block_ids[block_at : block_at + count]
            rows = row_ids[row_at + places // self._blocks_per_chunk]
            parts = places % self._blocks_per_chunk
            for ref in refs:
                held, kept = self._blocks[ref.tensor_idx], self._rows[ref.tensor_idx]
                if is_store:
                    kept[rows, parts, : ref.page_size_bytes] = held[blocks, : ref.page_size_bytes]
                else:
                    held[blocks, : ref.page_size_bytes] = kept[rows, parts, : ref.page_size_bytes]
                copied += count * ref.page_size_bytes
            block_at += count
            row_at += -(-(count + first % self._blocks_per_chunk) // self._blocks_per_chunk) if count else 0
        assert (block_at, row_at) == (len(block_ids), len(row_ids))
        self._finished.append(base.TransferResult(job_id, True, copied, time.perf_counter() - begun))
        return True
