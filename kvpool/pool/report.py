"""Report for operators: the names in `info` and `stats`, and the source of each number.

Names never change their meaning; a new number gets a new name. Pure functions; any thread.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import kvpool_native
from kvpool.config.config import Config
from kvpool.tiers.dram.tier import PageUse
from kvpool.usage import MASS_UNIT, SPARSE_COUNTS, Measurements

Sections = dict[str, dict[str, int | float | str]]


def render_info(
    config: Config, geometry: kvpool_native.DirectoryGeometry, pages: PageUse, *, epoch: bytes, uptime_s: float
) -> dict[str, Any]:
    """The resources in use on this machine."""
    return {
        "epoch": epoch.hex(),
        "uptime_s": round(uptime_s, 3),
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


def render_stats(config: Config, measured: Measurements) -> Sections:
    """Counters by section."""
    directory, failures = measured.directory, measured.failures
    return {
        "server": {**measured.server},
        "index": {**measured.index, "pins": directory["held"] + directory["pinned"]},
        "dram": {
            "dram.chunks": directory["chunks"],
            "dram.token_id_bytes": directory["token_id_bytes"],
            "dram.chunks_without_token_ids": directory["token_ids_left_out"],
            "dram.used_bytes": directory["used_bytes"],
            "dram.capacity_bytes": config.dram.capacity,
            "dram.resident_bytes": measured.resident_bytes,
            "dram.writing_chunks": directory["writing"],
            "dram.zombie_slots": directory["zombies"],
            "dram.free_segments": directory["free_segments"],
            "dram.segments": directory["segments"],
            "dram.retained_chunks": directory["retained_chunks"],
            "dram.retained_bytes": directory["retained_bytes"],
            "dram.evicted_own_class": directory["evicted_own_class"],
            "dram.evicted_other_class": directory["evicted_other_class"],
            "dram.evicted_index_full": directory["evicted_index_full"],
            "dram.flushed_chunks": directory["flushed_chunks"],
            "dram.dropped_chunks": directory["dropped_chunks"],
        },
        "chunks": {
            "chunks": measured.chunks,
            "saved_chunks": directory["stored_chunks"],
            "evicted_chunks": measured.evicted_chunks,
            "retention_clipped_chunks": directory["retention_clipped_chunks"],
            "retention_expired_chunks": directory["retention_expired_chunks"],
            "eviction_by_age": int(directory["policy_by_age"]),
            "policy_switches": directory["policy_switches"],
            "policy_learned_uses": directory["policy_learned_uses"],
            "present_chunks": directory["answered_present"],
            "aborted_chunks": directory["aborted_chunks"],
            "declined_pending": directory["answered_pending"],
            "declined_no_parent": directory["answered_no_parent"] + failures.declined_chunks["no_parent"],
            "declined_full": directory["answered_full"],
            "declined_not_ready": directory["answered_not_ready"],
            "declined_foreign": directory["answered_foreign"],
            "declined_quota": directory["answered_quota"],
            **{f"declined_{word}": count for word, count in failures.declined_chunks.items() if word != "no_parent"},
        },
        "held": {
            **measured.held,
            **{f"held.user.{user}.bytes": count for user, count in measured.held_by_user.items()},
        },
        "usage": _render_usage(measured),
        **_render_sparse(measured),
        "events": {**measured.events},
        **{
            name: {**counted, **_render_slots(name, measured.classes.get(name, ()))}
            for name, counted in measured.tiers.items()
        },
    }


def _render_slots(name: str, classes: Sequence[Mapping[str, int]]) -> dict[str, int | float | str]:
    """A tier's slots by size class."""
    slots: dict[str, int | float | str] = {}
    for row in classes:
        size = f"{row['chunk_bytes']}x{row['extents']}"
        slots[f"{name}.slots_used.{size}"] = row["slots_used"]
        slots[f"{name}.slots.{size}"] = row["slots"]
    return slots


def _render_usage(measured: Measurements) -> dict[str, int | float | str]:
    """Usage of all models, as clients report it, at most a second late."""
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
        "usage.saved_tokens": sum(model.stored_tokens for model in models),
        "usage.saved_bytes": sum(model.stored_bytes for model in models),
        **{f"usage.failed_loads_{word}": count for word, count in failures.failed_loads.items()},
        "usage.reports": failures.usage_reports,
        "usage.clamped_values": failures.clamped_values,
    }


def _render_sparse(measured: Measurements) -> Sections:
    """Compute by lookup in all models, as clients report it: a section only where there was any."""
    sums = {name: sum(getattr(model.sparse, name) for model in measured.models.values()) for name in SPARSE_COUNTS}
    if not any(sums.values()):
        return {}
    mass, heads = sums.pop("kept_mass_millionths"), sums["query_heads"]
    return {
        "sparse": {
            **{f"sparse.{name}": count for name, count in sums.items()},
            "sparse.recalled_share": _share(sums["recalled_blocks"], sums["middle_blocks"]),
            "sparse.kept_mass": _share(mass, heads * MASS_UNIT),
            "sparse.staging_hit_rate": _share(sums["staging_hit_blocks"], sums["staging_wanted_blocks"]),
            "sparse.overlap": _share(sums["repeated_blocks"], sums["compared_blocks"]),
        }
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
