"""A process in which LMCache's own storage manager drives the plug-in: `L2_ADAPTER_JSON`, then one order a line.

LMCache is out of its wheel; `stubs` stands for what that imports and does not use. Each line of standard input is a JSON object
with an order, each line of output the answer:

    {"do": "write", "first": 0, "count": 8}     objects are written into L1, and LMCache stores them: each task's result
    {"do": "clear"}                             L1 is emptied
    {"do": "prefetch", "first": 0, "count": 8}  bits of the keys in L1 afterwards, those of L2, and which have other bytes
    {"do": "status"}                            the adapter's report

`groups` and `salt` say of which kind objects are. L1 has 64 MiB.
"""

import json
import sys
import time
from functools import partial
from typing import Any

from tests.engines.lmcache import stubs

stubs.install()

import torch  # noqa: E402  # after the stubs
from lmcache.v1.distributed import api  # noqa: E402
from lmcache.v1.distributed.config import get_arg_parser, parse_args_to_config  # noqa: E402
from lmcache.v1.distributed.storage_manager import StorageManager  # noqa: E402

from tests.engines.lmcache.wheel_shapes import RANK, form_of_group  # noqa: E402

WAIT_S = 120.0


class Driver:
    """One storage manager with one adapter."""

    def __init__(self, l2_adapter: str) -> None:
        arguments = ["--l1-size-gb", "0.0625", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        config = parse_args_to_config(get_arg_parser().parse_args([*arguments, "--l2-adapter", l2_adapter]))
        self.manager = StorageManager(config)
        ((_, self.adapter),) = self.manager.l2_adapters()
        self.ended: list[int] = []
        pop = self.adapter.pop_completed_store_tasks

        def counted() -> Any:
            results = pop()
            self.ended += [int(result) for result in results.values()]
            return results

        self.adapter.pop_completed_store_tasks = counted

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        return dict(getattr(self, f"_{order.pop('do')}")(**order))

    def _keys(self, first: int, count: int, group: int, salt: str) -> list[Any]:
        hashes = [number.to_bytes(8, "little") * 4 for number in range(first, first + count)]
        rank = api.ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
        assert rank == RANK
        return [api.ObjectKey(each, "tiny", rank, group, salt) for each in hashes]

    def _write(self, first: int, count: int, groups: tuple[int, ...] = (0,), salt: str = "") -> dict[str, Any]:
        ended_before = len(self.ended)
        for number, group in enumerate(groups, 1):
            keys = self._keys(first, count, group, salt)
            reserved = self.manager.reserve_write(keys, _desc(group))
            for key, memory in reserved.items():
                memory.tensor.view(torch.int16)[...] = _content(key, memory.tensor.view(torch.int16).shape)
            self.manager.finish_write(list(reserved))
            _wait(partial(self._have_ended, ended_before + number))
        return {"stored_bytes": self.ended[ended_before:]}

    def _have_ended(self, stores: int) -> bool:
        return len(self.ended) >= stores

    def _clear(self) -> dict[str, Any]:
        self.manager.clear(force=True)
        return {}

    def _prefetch(self, first: int, count: int, groups: tuple[int, ...] = (0,), salt: str = "") -> dict[str, Any]:
        rows = [
            api.GroupedObjectKeys(self._keys(first, count, group, salt), group, _desc(group), -1) for group in groups
        ]
        handle = self.manager.submit_prefetch_task(api.PrefetchTaskSpec(key_groups=rows))
        assert self.manager.wait_prefetch_status(handle, WAIT_S), "the prefetch has not ended"
        result = self.manager.query_prefetch_status(handle)
        wrong, hits = 0, [bits.get_indices_list() for bits in result.hit_cells]
        for row, places in zip(rows, hits, strict=True):
            keys = [row.keys[place] for place in places]
            if not keys:
                continue
            with self.manager.read_prefetched_results(keys) as objects:
                assert objects is not None
                for key, memory in zip(keys, objects, strict=True):
                    found = memory.tensor.view(torch.int16)
                    wrong += not torch.equal(found, _content(key, found.shape))
            self.manager.finish_read_prefetched(keys)
        return {"hits": hits, "from_l2": [bits.popcount() for bits in result.l2_hit_cells], "wrong": wrong}

    def _status(self) -> dict[str, Any]:
        return {"adapter": self.adapter.report_status(), "manager": self.manager.report_status()["is_healthy"]}


def _desc(group: int) -> Any:
    form = form_of_group(group)
    shapes, dtypes = form.shapes, form.dtypes
    return api.MemoryLayoutDesc(shapes=list(shapes), dtypes=list(dtypes))


def _content(key: Any, shape: Any) -> Any:
    seed = int.from_bytes(key.chunk_hash[:4], "little") * 7 + key.object_group_id + len(key.cache_salt)
    return torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))


def _wait(is_done: Any) -> None:
    ends = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < ends, "no store has ended"
        time.sleep(0.002)


def main() -> None:
    driver = Driver(sys.argv[1])
    try:
        for line in sys.stdin:
            print(json.dumps(driver.do(json.loads(line)), default=str), flush=True)
    finally:
        driver.manager.close()
    print(json.dumps({"closed": True}), flush=True)


if __name__ == "__main__":
    main()
