"""Surface of vLLM that this adapter reads: structural types, so that nothing here imports vLLM.

Not a copy of vLLM's interface: only the attributes that are used, each as vLLM 0.32 has it. Types alone; any thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class LoraRequest(Protocol):
    """An adapter that a request asks for."""

    lora_name: str
    lora_path: str


class EngineRequest(Protocol):
    """A request in vLLM's scheduler. `block_hashes`: one chained hash for each full block of known tokens."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    all_token_ids: Sequence[int]
    block_hashes: Sequence[bytes]


class EngineBlocks(Protocol):
    """Blocks allocated to a request, by KV cache group."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The block ids of each group."""
        ...


class BlockPool(Protocol):
    """vLLM's blocks and its own prefix cache of them. `blocks`: by block id."""

    blocks: Sequence[object]

    def touch(self, blocks: Sequence[object]) -> None:
        """Take one more reference to each of these blocks."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[object]) -> None:
        """Release one reference to each; the first ones are evicted first."""
        ...

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove blocks from the prefix cache; requests retain those that they have."""
        ...


class NewRequest(Protocol):
    """A request scheduled for the first time, or again with all its blocks."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class RunningRequests(Protocol):
    """Requests that were scheduled before, as columns."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


class EngineStep(Protocol):
    """The scheduler's decisions for one step."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: RunningRequests
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int


class EngineOutput(Protocol):
    """Reports of the workers' connectors about one step."""

    kv_connector_worker_meta: object
    finished_recving: set[str] | None
    invalid_block_ids: set[int]


class TransferConfig(Protocol):
    """vLLM's `--kv-transfer-config`."""

    kv_connector_extra_config: Mapping[str, object]
    kv_load_failure_policy: str
    kv_role: str | None


class ParallelConfig(Protocol):
    """The distribution of a model over workers; `rank` is this worker's."""

    rank: int
    tensor_parallel_size: int


class EngineConfig(Protocol):
    """vLLM's whole configuration, as far as it is read with certainty; the rest is read attribute by attribute."""

    kv_transfer_config: TransferConfig
    parallel_config: ParallelConfig
    model_config: object
    cache_config: object


class CacheSpec(Protocol):
    """The KV layout of one group of layers."""

    block_size: int
    page_size_bytes: int


class CacheGroup(Protocol):
    """Layers that share a block table."""

    layer_names: list[str]
    kv_cache_spec: CacheSpec


class CacheConfig(Protocol):
    """vLLM's `KVCacheConfig`. Later releases have `kv_cache_tensors` too: where each layer's blocks lie."""

    num_blocks: int
    kv_cache_groups: list[CacheGroup]


class Tensor(Protocol):
    """The part of a torch tensor that describes its memory; `as_strided` makes a view and copies nothing."""

    shape: Sequence[int]

    def stride(self) -> Sequence[int]:
        """Steps of each dimension, in items."""
        ...

    def element_size(self) -> int:
        """Bytes of an item."""
        ...

    def storage_offset(self) -> int:
        """Where the view begins in its storage, in items."""
        ...

    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int) -> "Tensor":
        """A view of the same storage."""
        ...
