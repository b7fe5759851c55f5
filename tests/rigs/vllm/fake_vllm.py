"""A stand-in for the few vLLM modules that the connector imports, so that its class can be made without vLLM.

The base class has vLLM's abstract methods and the attributes that vLLM's own base sets; nothing else of it is imitated.
"""

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, ClassVar


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - as in vLLM
    pass


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other: Any) -> Any: ...


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def requires_kv_delivery(self) -> bool:
        return True

    def has_pending_push_work(self) -> bool:
        return False

    def has_pending_block_frees(self) -> bool:
        return False

    def get_handshake_metadata(self) -> Any:
        return None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        raise AssertionError("a connector of several stages has its own")

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        assert isinstance(connector_metadata, KVConnectorMetadata)
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self) -> None: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...


def event_record(record: type) -> Any:
    """An event names its fields as a struct of vLLM's does: what it does not know is left out."""
    made: Any = dataclass(frozen=True)(record)
    made.__struct_fields__ = tuple(of.name for of in fields(made))
    return made


@event_record
class BlockStored:
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Any = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@event_record
class BlockRemoved:
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@event_record
class AllBlocksCleared:
    pass


class KVConnectorFactory:
    """vLLM's registry: a name is taken once."""

    registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.registry[name] = (module_path, class_name)


class CacheHitSource(str, enum.Enum):
    DEVICE = "device"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


_CONTENTS: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.distributed": {},
    "vllm.distributed.kv_events": {
        "BlockStored": BlockStored,
        "BlockRemoved": BlockRemoved,
        "AllBlocksCleared": AllBlocksCleared,
    },
    "vllm.distributed.kv_transfer": {},
    "vllm.distributed.kv_transfer.kv_connector": {},
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": KVConnectorFactory},
    "vllm.distributed.kv_transfer.kv_connector.v1": {},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorMetadata": KVConnectorMetadata,
        "KVConnectorWorkerMetadata": KVConnectorWorkerMetadata,
        "KVConnectorTransferResults": KVConnectorTransferResults,
        "SupportsHMA": SupportsHMA,
        "KVConnectorBase_V1": KVConnectorBase_V1,
    },
    "vllm.envs": {"VLLM_ENABLE_V1_MULTIPROCESSING": True},
    "vllm.v1": {},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
}


@contextmanager
def installed() -> Iterator[None]:
    """Within the context `import vllm` finds the stand-in. Requires: no vLLM has been imported."""
    from kvpool_client.vllm import connector

    assert "vllm" not in sys.modules
    connector.connector_class.cache_clear()
    KVConnectorFactory.registry.clear()
    for name, contents in _CONTENTS.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        connector.connector_class.cache_clear()
        for name in _CONTENTS:
            del sys.modules[name]
