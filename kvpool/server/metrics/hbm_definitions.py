"""Metric definitions of the device tier: the copies in the memory of a GPU. Absent where there is none.

Pure functions; any thread.
"""

from collections.abc import Callable

from kvpool.server.metrics.measurements import Scrape
from kvpool.server.metrics.metric import Metric, Values, counter, gauge

STATES = ("starting", "ok", "offline")


def _hbm(key: str) -> Callable[[Scrape], float | None]:
    def read(now: Scrape) -> float | None:
        counted = now.pool.tiers.get("hbm", {}).get(f"hbm.{key}")
        return None if counted is None else float(counted)

    return read


def _states(now: Scrape) -> Values:
    counted = now.pool.tiers.get("hbm", {})
    return {(state,): float(counted["hbm.state"] == state) for state in STATES if counted}


HBM_METRICS: tuple[Metric, ...] = (
    gauge("kvpool_hbm_state", "1 for the state of the device tier: starting, ok, or offline because the device cannot be "
          "opened or was given up.", _states, "", "state"),
    gauge("kvpool_hbm_chunks", "Chunks that have a copy in device memory.", _hbm("chunks"), "chunks"),
    gauge("kvpool_hbm_used_bytes", "Bytes of these copies.", _hbm("used_bytes"), "bytes"),
    gauge("kvpool_hbm_capacity_bytes", "Bytes of device memory for copies.", _hbm("capacity_bytes"), "bytes"),
    counter("kvpool_hbm_leased_bytes", "Bytes of chunks leased by engines on the device, with a copy or without.",
            _hbm("leased_bytes"), "bytes"),
    counter("kvpool_hbm_served_chunks", "Leased chunks that had a copy, of engines on the device.", _hbm("served_chunks"),
            "chunks"),
    counter("kvpool_hbm_served_bytes", "Bytes of these chunks.", _hbm("served_bytes"), "bytes"),
    counter("kvpool_hbm_promoted_chunks", "Chunks copied to the device.", _hbm("promoted_chunks"), "chunks"),
    counter("kvpool_hbm_promoted_bytes", "Bytes copied to the device: the capacity, 1.2 for each byte served, and trials at "
            "most.", _hbm("promoted_bytes"), "bytes"),
    counter("kvpool_hbm_failed_chunks", "Chunks whose copy was not published: it failed, or the chunk left DRAM meanwhile.",
            _hbm("failed_chunks"), "chunks"),
    counter("kvpool_hbm_evicted_chunks", "Copies evicted for others; their chunks stay in DRAM.", _hbm("evicted_chunks"),
            "chunks"),
    counter("kvpool_hbm_withdrawn_chunks", "Copies that left because their chunk left DRAM.", _hbm("withdrawn_chunks"),
            "chunks"),
    counter("kvpool_hbm_left_out_prefixes", "Leased prefixes that were not looked at, because too many waited to be copied.",
            _hbm("left_out_prefixes")),
    counter("kvpool_hbm_corrupt_chunks", "Copies whose bytes did not match their checksums, dropped; their chunks stay.",
            _hbm("corrupt_chunks"), "chunks"),
)  # fmt: skip
