"""Engines of several tensor-parallel sizes whose KV is on an emulated device."""

from collections.abc import Sequence
from typing import Any

import kvpool_client as kv
from tests.rigs.device.engine import EngineArray
from tests.rigs.rank_memory import RankEngine, RankMemory, StateMemory


class Seen:
    """An array of the device, seen with other axes."""

    def __init__(self, array: EngineArray, host: Any) -> None:
        self._array, self._host = array, host

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        described = self._array.__cuda_array_interface__
        return {**described, "shape": self._host.shape, "strides": self._host.strides}


class DeviceRankEngine(RankEngine):
    """A rank with its KV on the device, in the bytes of its host memory, which shows how they lie."""

    def __init__(self, pool: kv.Pool, memory: str = "head_major") -> None:
        self._arrays: list[tuple[EngineArray, Any]] = []
        super().__init__(pool, memory)
        assert {cache.device for cache in self._caches} == {"cuda:0"}

    def _shown(self, memory: RankMemory | StateMemory) -> Sequence[Any]:
        owned = [array if array.base is None else array.base for array in memory.arrays]
        made = [EngineArray(array) for array in owned]
        self._arrays += zip(made, owned, strict=True)
        return [Seen(array, host) for array, host in zip(made, memory.arrays, strict=True)]

    def _write(self) -> None:
        for array, owned in self._arrays:
            array.write(owned)

    def _read(self) -> None:
        for array, owned in self._arrays:
            owned[...] = array.read()
