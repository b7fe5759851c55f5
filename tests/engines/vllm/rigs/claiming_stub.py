"""A connector that claims every prompt and loads nothing: the worst neighbour in a MultiConnector that follows the rules.

Its loads are asynchronous, each once for a request; the step after it was ordered a load is reported as ended with every block
failed, so that vLLM computes the tokens and they stay right. Imported by vLLM alone.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


@dataclass
class Orders(KVConnectorMetadata):
    """Blocks to load, by request."""

    loads: dict[str, list[int]] = field(default_factory=dict)


class ClaimingStub(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._claimed: dict[str, int] = {}
        self._ordered: dict[str, list[int]] = {}
        self._failed: dict[str, list[int]] = {}
        self._bad: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = (request.num_tokens - 1) // self._block_tokens * self._block_tokens - num_computed_tokens
        if self._claimed.setdefault(request.request_id, num_computed_tokens) < 0 or tokens <= 0:
            return 0, False
        return tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._claimed[request.request_id] // self._block_tokens
            end = first + num_external_tokens // self._block_tokens
            self._ordered[request.request_id] = blocks.get_block_ids()[0][first:end]
            self._claimed[request.request_id] = -1

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders, self._ordered = Orders(self._ordered), {}
        return orders

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._claimed.pop(request.request_id, None)
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._failed.update(self._get_connector_metadata().loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        failed, self._failed = self._failed, {}
        self._bad.update(block for blocks in failed.values() for block in blocks)
        return None, set(failed) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
