"""SGLang's batches through the backend, timed: `python -m tests.engines.sglang.measure`.

128 pages of 64 tokens (64 KiB each) are backed up and fetched, in turns; prints median, least and most of 15 turns in
milliseconds, and a plain copy of the same bytes as the floor.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.engines.sglang.standin import Controller, HostPool, StorageConfig, installed, page_keys
from tests.rigs.daemon import Daemon, wait_until

PAGES = 128
TURNS = 15


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, installed():
        from kvpool_client.sglang import KVPoolStorage

        with Daemon(Path(directory), **{"dram.capacity": "512MiB"}) as daemon:
            extra = {"interface_v1": 1, "socket": daemon.socket, "revision": "1"}
            backend = KVPoolStorage(StorageConfig(extra_config=extra), {})  # type: ignore[operator]
            pool = HostPool(pages=PAGES, page_size=64, layer_num=8, heads=2)
            backend.register_mem_pool_host(pool)
            wait_until(lambda: backend.counters().get("connected") == 1, "the backend is connected")
            _measure(Controller(backend, pool), pool)
            backend.close()


def _measure(controller: Controller, pool: HostPool) -> None:
    times: dict[str, list[float]] = {"backup": [], "prefetch": [], "copy": []}
    for turn in range(TURNS):
        keys = page_keys(turn, PAGES)
        times["backup"].append(_timed(lambda keys=keys: controller.backup(keys, range(PAGES))))  # type: ignore[misc]
        times["prefetch"].append(_timed(lambda keys=keys: controller.prefetch(keys, range(PAGES))))  # type: ignore[misc]
        times["copy"].append(_timed(pool.kv_buffer.copy))
    for name, taken in times.items():
        print(f"{name:9} {statistics.median(taken):7.2f} ms ({min(taken):.2f} to {max(taken):.2f})")


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    main()
