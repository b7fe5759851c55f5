"""A plug-in of LMCache's over a dict of this process: the floor of what one in Python takes. For measurements alone.

Keeps a copy of every object, checks nothing, has no bound, and does its work where the task is submitted.
"""

from collections.abc import Mapping
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvpool_client.lmcache.task_results import TaskResults


class DictAdapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache's class is untyped here
    """See the module."""

    def __init__(self, adapter_params: Mapping[str, object], l1_memory_desc: object = None) -> None:
        super().__init__()
        self._objects: dict[Any, Any] = {}
        self._stored: TaskResults[Any] = TaskResults(create_event_notifier())
        self._looked_up: TaskResults[Any] = TaskResults(create_event_notifier())
        self._loaded: TaskResults[Any] = TaskResults(create_event_notifier())

    def get_store_event_fd(self) -> int:
        return self._stored.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looked_up.descriptor

    def get_load_event_fd(self) -> int:
        return self._loaded.descriptor

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        task = self._stored.begin()
        for key, memory in zip(keys, objects, strict=True):
            self._objects[key] = memory.raw_data.clone()
        self._stored.put(task, L2StoreResult(True, sum(memory.get_size() for memory in objects)))
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stored.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        task, found = self._looked_up.begin(), Bitmap(len(keys))
        found.batched_set([place for place, key in enumerate(keys) if key in self._objects])
        self._looked_up.put(task, found)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._looked_up.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        pass

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        task, found = self._loaded.begin(), Bitmap(len(keys))
        for place, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            if key in self._objects:
                memory.raw_data.copy_(self._objects[key])
                found.set(place)
        self._loaded.put(task, found)
        return task

    def query_load_result(self, task_id: int) -> Any:
        return self._loaded.take(task_id)

    def get_memory_tags(self) -> Any:
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags  # not in 0.5.6

        return MemoryTags(MemorySegment.DRAM, MemoryResidency.LOCAL)

    def close(self) -> None:
        for results in (self._stored, self._looked_up, self._loaded):
            results.close()
