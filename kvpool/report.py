"""What the daemon tells operators: the names of `info` and `stats`, and where each number comes from.

Names never change their meaning; a new number gets a new name. Pure functions; any thread.
"""

from collections.abc import Mapping
from typing import Any

import kvpool_native
from kvpool.config import Config
from kvpool.tiers.dram import PageUse

Sections = dict[str, dict[str, int | float | str]]


def render_info(
    config: Config, geometry: kvpool_native.DirectoryGeometry, pages: PageUse, *, epoch: bytes, uptime_s: float
) -> dict[str, Any]:
    """What is in use on this machine."""
    return {
        "epoch": epoch.hex(),
        "uptime_s": round(uptime_s, 3),
        "tiers": ["dram"],
        "transport": "shared memory",
        "write_mode": "in place",
        "key_hash": f"blake3 ({kvpool_native.hash_lanes()})",
        "checksum": f"crc32c ({kvpool_native.crc_path()})",
        "verify": config.dram.verify,
        "dram_capacity_bytes": config.dram.capacity,
        "dram_arena_bytes": geometry.arena_bytes,
        "dram_segment_bytes": geometry.segment_bytes,
        "dram_max_chunks": geometry.max_chunks,
        "dram_pages": pages.mode,
        "dram_huge_bytes": pages.huge_bytes,
        "dram_resident_bytes": pages.resident_bytes,
        "dram_is_settling": pages.is_settling,
        "index_bytes": geometry.index_bytes,
    }


def render_stats(
    config: Config,
    directory: Mapping[str, Any],
    pages: PageUse,
    *,
    server: Mapping[str, int],
    index: Mapping[str, int],
) -> Sections:
    """Counters by section."""
    return {
        "server": {**server},
        "index": {**index, "pins": directory["held"]},
        "dram": {
            "dram.chunks": directory["chunks"],
            "dram.used_bytes": directory["used_bytes"],
            "dram.capacity_bytes": config.dram.capacity,
            "dram.resident_bytes": pages.resident_bytes,
            "dram.writing_chunks": directory["writing"],
            "dram.zombie_slots": directory["zombies"],
            "dram.segments_free": directory["free_segments"],
            "dram.segments": directory["segments"],
        },
        "chunks": {
            "stored_chunks": directory["stored_chunks"],
            "evicted_chunks": directory["evicted_chunks"],
            "flushed_chunks": directory["flushed_chunks"],
            "dropped_chunks": directory["dropped_chunks"],
            "aborted_chunks": directory["aborted_chunks"],
            "declined_pending": directory["answered_pending"],
            "declined_no_parent": directory["answered_no_parent"],
            "declined_full": directory["answered_full"],
            "declined_not_ready": directory["answered_not_ready"],
        },
    }
