"""LMCache as a plug-in of its L2 storage sees it, for tests without LMCache: base class, keys, memory objects, controllers.

Written after the interface of the lmcache 0.5.7rc2 wheel (`v1/distributed/l2_adapters/base.py`, `v1/distributed/api.py`,
`v1/memory_management.py`, `v1/distributed/storage_controllers`); tests/engines/lmcache/test_wheel.py runs LMCache's own storage
manager and benchmark on the wheel itself.
"""

import hashlib
import os
import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.rigs.payload import chunk_bytes_of
from tests.rigs.stand_in_modules import stand_in

WAIT_S = 120.0
ADAPTER = "kvpool_client.lmcache.adapter"


class Shape(tuple[int, ...]):
    """torch.Size."""

    def numel(self) -> int:
        return int(np.prod(self))


@dataclass(frozen=True)
class DType:
    """torch.dtype."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BFLOAT16, UINT8 = DType("bfloat16", 2), DType("uint8", 1)


@dataclass(frozen=True)
class Key:
    """ObjectKey."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Desc:
    """MemoryLayoutDesc."""

    shapes: list[Shape]
    dtypes: list[DType]


ONE_LAYER = Desc([Shape((2, 1, 8, 64))], [BFLOAT16])


class Device:
    """torch.device."""

    def __init__(self, kind: str) -> None:
        self.type = kind


class Raw:
    """The flat tensor of a memory object, a view of L1."""

    def __init__(self, view: npt.NDArray[np.uint8], kind: str = "cpu") -> None:
        self.view = view
        self.device = Device(kind)
        self.nbytes = view.nbytes

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return int(self.view.ctypes.data)


@dataclass
class Meta:
    """MemoryObjMetadata."""

    shape: Shape
    dtype: DType
    shapes: list[Shape] | None = None
    dtypes: list[DType] | None = None


@dataclass
class Memory:
    """TensorMemoryObj."""

    raw_data: Raw
    metadata: Meta
    valid: bool = True

    def is_valid(self) -> bool:
        return self.valid


class L1:
    """LMCache's arena: 4 KiB aligned objects behind one another."""

    def __init__(self, size: int = 8 << 20) -> None:
        whole = np.zeros(size + 4096, np.uint8)
        skipped = -whole.ctypes.data % 4096
        self.arena = whole[skipped : skipped + size]
        self._used = 0

    def allocate(self, desc: Desc = ONE_LAYER, fill: int = 0xA5) -> Memory:
        """A new object of this form."""
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True))
        taken = -(-size // 4096) * 4096
        view = self.arena[self._used : self._used + taken]
        assert len(view) == taken
        self._used += taken
        view[:] = fill
        return Memory(Raw(view), Meta(desc.shapes[0], desc.dtypes[0], list(desc.shapes), list(desc.dtypes)))


class Bitmap:
    """lmcache_native.Bitmap."""

    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, index: int) -> None:
        self.bits[index] = True


class StoreResult(int):
    """L2StoreResult."""

    def __new__(cls, success: bool, bytes_transferred: int) -> "StoreResult":
        return super().__new__(cls, bytes_transferred if success else -1)


class Notifier:
    """EventfdNotifier. Counts, so that a task that wakes twice is seen."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.notified = 0

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        self.notified += 1
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1


class L2AdapterInterface(ABC):
    """The base class of adapters."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.max_capacity_bytes = max_capacity_bytes
        self.accessed: list[Key] = []

    def _notify_keys_accessed(self, keys: list[Key]) -> None:
        self.accessed += keys

    @abstractmethod
    def get_store_event_fd(self) -> int: ...

    @abstractmethod
    def get_lookup_and_lock_event_fd(self) -> int: ...

    @abstractmethod
    def get_load_event_fd(self) -> int: ...

    @abstractmethod
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int: ...

    @abstractmethod
    def pop_completed_store_tasks(self) -> dict[int, Any]: ...

    @abstractmethod
    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int: ...

    @abstractmethod
    def query_lookup_and_lock_result(self, task_id: int) -> Any: ...

    @abstractmethod
    def submit_unlock(self, keys: list[Any]) -> None: ...

    @abstractmethod
    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int: ...

    @abstractmethod
    def query_load_result(self, task_id: int) -> Any: ...

    @abstractmethod
    def get_memory_tags(self) -> Any: ...

    @abstractmethod
    def close(self) -> None: ...


def installed() -> AbstractContextManager[None]:
    """LMCache's modules importable, for the adapter."""
    contents: dict[str, dict[str, Any]] = {
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": StoreResult},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
        "lmcache.v1.platform": {"create_event_notifier": Notifier},
    }
    return stand_in(contents, ADAPTER)


@dataclass
class Controller:
    """What LMCache's store and prefetch controllers do with an adapter, one task after the other or several at once."""

    adapter: Any
    model: str = "tiny"
    l1: L1 = field(default_factory=L1)

    def keys(self, *numbers: int, **fields: Any) -> list[Key]:
        """Keys of these chunks."""
        given = {"model_name": self.model, "kv_rank": (1 << 24) + (1 << 8), **fields}
        return [Key(chunk_hash=number.to_bytes(8, "little") * 4, **given) for number in numbers]

    def filled(self, keys: Sequence[Key], desc: Desc = ONE_LAYER) -> list[Memory]:
        """Objects with the bytes of these keys."""
        made = [self.l1.allocate(desc) for _ in keys]
        for key, memory in zip(keys, made, strict=True):
            memory.raw_data.view[:] = _bytes_of(key, memory.raw_data.nbytes)
        return made

    def store(self, keys: list[Key], objects: list[Memory] | None = None, desc: Desc = ONE_LAYER) -> int:
        """Store objects with the bytes of their keys; the bytes that were moved, -1 where the task has failed."""
        task = self.adapter.submit_store_task(keys, self.filled(keys, desc) if objects is None else objects)
        return int(self.ended_store(task))

    def ended_store(self, task: int) -> int:
        """How this store has ended: the only one that is open."""
        self._wait(self.adapter.get_store_event_fd())
        ended = self.adapter.pop_completed_store_tasks()
        assert list(ended) == [task]
        return int(ended[task])

    def lookup(self, keys: list[Key], desc: Desc | None = ONE_LAYER) -> list[bool]:
        """Look up and lock."""
        descs = {} if desc is None else {key.object_group_id: desc for key in keys}
        return self.ended_lookup(self.adapter.submit_lookup_and_lock_task(keys, descs))

    def ended_lookup(self, task: int) -> list[bool]:
        """What this lookup has found: the only one that is open."""
        self._wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        bits: list[bool] = found.bits
        return bits

    def load(self, keys: list[Key], desc: Desc = ONE_LAYER) -> list[bool]:
        """Load into fresh objects; every one that is answered has the bytes of its key."""
        objects = [self.l1.allocate(desc) for _ in keys]
        return self.ended_load(self.adapter.submit_load_task(keys, objects), keys, objects)

    def ended_load(self, task: int, keys: Sequence[Key], objects: Sequence[Memory]) -> list[bool]:
        """What this load has brought: the only one that is open."""
        self._wait(self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        assert self.adapter.query_load_result(task) is None
        bits: list[bool] = loaded.bits
        assert len(bits) == len(keys)
        for key, memory, is_loaded in zip(keys, objects, bits, strict=True):
            size = memory.metadata.shapes and sum(
                shape.numel() * dtype.itemsize
                for shape, dtype in zip(memory.metadata.shapes, memory.metadata.dtypes or [], strict=True)
            )
            if is_loaded:
                expected = _bytes_of(key, memory.raw_data.nbytes)[:size]
                assert np.array_equal(memory.raw_data.view[:size], expected), f"other bytes of {key}"
            assert (memory.raw_data.view[size:] == 0xA5).all(), f"bytes behind the object of {key}"
        return bits

    @property
    def notified(self) -> tuple[int, int, int]:
        """How often each descriptor was written: stores, lookups, loads."""
        adapter = self.adapter
        kinds = (adapter._stored, adapter._looked_up, adapter._loaded)
        stores, lookups, loads = (kind._notifier.notified for kind in kinds)
        return stores, lookups, loads

    def _wait(self, descriptor: int) -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(WAIT_S * 1000), "no task has ended"
        os.eventfd_read(descriptor)


def _bytes_of(key: Key, size: int) -> npt.NDArray[np.uint8]:
    return chunk_bytes_of(hashlib.sha256(repr(key).encode()).digest(), size)
