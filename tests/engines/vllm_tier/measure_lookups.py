"""The time of one key's lookup by the tier, as vLLM's scheduler asks for it: hits and misses, over a real daemon.

    PYTHONPATH=.:client:tools python -m tests.engines.vllm_tier.measure_lookups [ROUNDS]

Without vLLM and without its class, which adds one call. Processor time of the thread, of all keys of a prompt together; medians
with quartiles over the prompts.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.engines.vllm_tier.region import Context, Region, keys_of
from tests.rigs.daemon import Daemon, wait_until

KEYS = 64
ROUNDS = 200
HIT_US_MEANT = 10.0


def _lookup_us(region: Region, keys: Sequence[bytes], rounds: int) -> list[float]:
    """The quartiles of a lookup."""
    found = []
    for _ in range(rounds):
        context = Context(keys)
        region.jobs.begin_request(context)
        begun_ns = time.thread_time_ns()
        for key in keys:
            region.jobs.guard.call("lookup", False, region.jobs.has, key, context)
        found.append((time.thread_time_ns() - begun_ns) / 1000 / len(keys))
    return statistics.quantiles(found, n=4)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with (
        tempfile.TemporaryDirectory(prefix="kvl") as short,
        Daemon(Path(short), **{"dram.capacity": "16MiB"}) as daemon,
    ):
        region, keys = Region(daemon), keys_of(1, KEYS)
        wait_until(lambda: "connected" in repr(region.jobs), "the tier is connected")
        assert region.store(keys).is_whole
        for name, asked in (("hit", keys), ("miss", keys_of(2, KEYS))):
            first, median, third = _lookup_us(region, asked, rounds)
            print(f"a key that is a {name}: {median:.1f} us ({first:.1f} to {third:.1f}); meant {HIT_US_MEANT:g}")
        region.jobs.close()


if __name__ == "__main__":
    main()
