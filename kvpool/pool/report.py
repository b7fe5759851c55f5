"""Report for operators: the names of `info` and `stats`, and where each number comes from.

Names never change their meaning; a new number gets a new name. Pure functions; any thread.
"""

from typing import Any

import kvpool_native
from kvpool.config.config import Config
from kvpool.tiers.dram.tier import PageUse
from kvpool.tiers.ssd.status import TierState
from kvpool.tiers.ssd.tier import SsdTier
from kvpool.types import Measurements
from kvpool.units import format_size

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
        "write_mode": config.server.write_mode,
        "staging_bytes": config.server.staging_bytes,
        "key_hash": f"blake3 ({kvpool_native.hash_lanes()})",
        "checksum": f"crc32c ({kvpool_native.crc_path()})",
        **kvpool_native.copy_choices(),
        "verify": config.dram.verify,
        "dram_capacity_bytes": config.dram.capacity,
        "dram_arena_bytes": geometry.arena_bytes,
        "dram_segment_bytes": geometry.segment_bytes,
        "dram_max_chunks": geometry.max_chunks,
        "dram_numa": config.dram.numa,
        "dram_pages": pages.mode,
        "dram_huge_bytes": pages.huge_bytes,
        **({"dram_pages_warning": pages.shortfall} if pages.shortfall else {}),
        "dram_resident_bytes": pages.resident_bytes,
        "dram_is_settling": pages.is_settling,
        "index_bytes": geometry.index_bytes,
    }


def render_ssd_info(config: Config, tier: SsdTier) -> dict[str, Any]:
    """What is in use of an SSD tier."""
    plan = tier.plan
    warning = warn_of_small_ssd(config)
    return {
        "tiers": ["dram", "ssd"],
        "ssd_path": str(plan.path),
        "ssd_state": tier.state.name.lower(),
        "ssd_reason": tier.state_reason,
        "ssd_io": tier.backend,
        "ssd_segments": plan.segments,
        "ssd_segment_bytes": plan.segment_bytes,
        "ssd_max_chunks": plan.max_chunks,
        "ssd_catalogue_bytes": plan.catalogue_bytes,
        "ssd_write_budget_bytes": config.ssd.write_budget_bytes,
        **({"ssd_warning": warning} if warning else {}),
        **({"ssd_disk_warning": tier.disk_warning} if tier.disk_warning else {}),
    }


def find_shortcomings(tier: SsdTier | None) -> list[str]:
    """What was configured of an SSD tier and is missing since the daemon's start, one line each."""
    if tier is None or tier.state != TierState.OFFLINE or tier.fileno() >= 0:
        return []
    return [f"ssd: it could not be opened: {tier.state_reason}"]


def render_ssd_classes(directory: kvpool_native.Directory) -> list[dict[str, int]]:
    """Slots of an SSD tier by size class, named by the chunks in them: without their headers."""
    return [
        {**row, "chunk_bytes": row["chunk_bytes"] - kvpool_native.SSD_HEADER_BYTES}
        for row in directory.stats()["classes"]
    ]


def warn_of_small_ssd(config: Config) -> str:
    """What is wrong with an SSD tier that is smaller than DRAM; empty where it is not."""
    if not 0 < config.ssd.capacity < config.dram.capacity:
        return ""
    return (
        f"ssd.capacity is {format_size(config.ssd.capacity)}, less than dram.capacity {format_size(config.dram.capacity)}: "
        "it cannot even hold what DRAM has, and a restart loses the rest"
    )


def render_stats(config: Config, measured: Measurements) -> Sections:
    """Counters by section."""
    directory, failures = measured.directory, measured.failures
    return {
        "server": {**measured.server},
        "index": {**measured.index, "pins": directory["held"] + directory["pinned"]},
        "dram": {
            "dram.chunks": directory["chunks"],
            "dram.token_id_bytes": directory["token_id_bytes"],
            "dram.token_ids_left_out": directory["token_ids_left_out"],
            "dram.used_bytes": directory["used_bytes"],
            "dram.capacity_bytes": config.dram.capacity,
            "dram.resident_bytes": measured.resident_bytes,
            "dram.writing_chunks": directory["writing"],
            "dram.zombie_slots": directory["zombies"],
            "dram.segments_free": directory["free_segments"],
            "dram.segments": directory["segments"],
            "dram.kept_chunks": directory["kept_chunks"],
            "dram.kept_bytes": directory["kept_bytes"],
        },
        "chunks": {
            "stored_chunks": directory["stored_chunks"],
            "evicted_chunks": int(directory["evicted_chunks"]) + int(measured.ssd.get("ssd.evicted_last_copies", 0)),
            "evicted_own_class": directory["evicted_own_class"],
            "evicted_other_class": directory["evicted_other_class"],
            "evicted_index_full": directory["evicted_index_full"],
            "retention_clipped": directory["clipped_chunks"],
            "retention_lapsed": directory["lapsed_chunks"],
            "policy_by_age": int(directory["policy_by_age"]),
            "policy_switches": directory["policy_switches"],
            "policy_learned_uses": directory["policy_learned_uses"],
            "flushed_chunks": directory["flushed_chunks"],
            "dropped_chunks": directory["dropped_chunks"],
            "aborted_chunks": directory["aborted_chunks"],
            "declined_pending": directory["answered_pending"],
            "declined_no_parent": directory["answered_no_parent"],
            "declined_full": directory["answered_full"],
            "declined_not_ready": directory["answered_not_ready"],
            "declined_foreign": directory["answered_foreign"],
            "declined_share": directory["answered_share"],
            **{f"declined_{word}": count for word, count in failures.declined_chunks.items()},
        },
        "held": {**measured.held},
        "usage": _render_usage(measured),
        "events": {**measured.events},
        **({"ssd": {**measured.ssd, **_render_slots(measured)}} if measured.ssd else {}),
    }


def _render_slots(measured: Measurements) -> dict[str, int | float | str]:
    """The SSD tier's slots by size class."""
    slots: dict[str, int | float | str] = {}
    for row in measured.ssd_classes:
        name = f"{row['chunk_bytes']}x{row['layers']}"
        slots[f"ssd.slots_used.{name}"] = row["slots_used"]
        slots[f"ssd.slots.{name}"] = row["slots"]
    return slots


def _render_usage(measured: Measurements) -> dict[str, int | float | str]:
    """What clients did, over all models; as they report it, at most a second late."""
    models, failures = measured.models.values(), measured.failures
    looked_up = sum(model.lookup_tokens for model in models)
    hit = sum(sum(model.hit_tokens) for model in models)
    return {
        "usage.models": len(models),
        "usage.lookups": sum(model.lookups for model in models),
        "usage.lookup_tokens": looked_up,
        "usage.hit_tokens": hit,
        "usage.hit_rate": round(hit / looked_up, 4) if looked_up else 0.0,
        "usage.loads": sum(model.loads for model in models),
        "usage.loaded_tokens": sum(sum(model.loaded_tokens) for model in models),
        "usage.loaded_bytes": sum(sum(model.loaded_bytes) for model in models),
        "usage.stored_tokens": sum(model.stored_tokens for model in models),
        "usage.stored_bytes": sum(model.stored_bytes for model in models),
        **{f"usage.failed_loads_{word}": count for word, count in failures.failed_loads.items()},
        "usage.reports": failures.usage_reports,
        "usage.clamped_values": failures.clamped_values,
    }
