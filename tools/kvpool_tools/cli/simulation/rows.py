"""Rows of `kvpoolctl simulate`: what each cell has come to, for programs and for people. Pure; any thread."""

from typing import Any

from kvpool.units import format_size
from kvpool_tools.sim.cells import Bounds, Cell, Outcome
from kvpool_tools.sim.runner import Result, Work
from kvpool_tools.sim.workload import Workload

# Columns of the table for people stand side by side.
COLUMNS_MAX = 14

Row = dict[str, Any]


def make_row(name: str, workload: Workload, cell: Cell, results: dict[Work, Result], *, share: float) -> Row:
    """The row of a cell, with the bounds at its capacity, for programs. `share`: of DRAM."""
    outcome, bounds = results[cell], results[cell.blocks]
    assert isinstance(outcome, Outcome)
    assert isinstance(bounds, Bounds)
    references = workload.references
    hits = outcome.hits
    return {
        "trace": name,
        "policy": cell.policy,
        "capacity_fraction": share,
        "capacity_blocks": cell.dram_blocks,
        "ssd_capacity_blocks": cell.ssd_blocks,
        "requests": workload.requests,
        "references": references,
        "unique_blocks": workload.unique,
        "hit_blocks_dram": outcome.hits_dram,
        "hit_blocks_ssd": outcome.hits_ssd,
        "hit_rate": round(hits / references, 6),
        "hit_rate_dram": round(outcome.hits_dram / references, 6),
        "hit_rate_ssd": round(outcome.hits_ssd / references, 6),
        "belady_hit_rate": round(bounds.belady_hits / references, 6),
        "lru_hit_rate": round(bounds.lru_hits / references, 6),
        "of_belady": round(hits / bounds.belady_hits, 6) if bounds.belady_hits else None,
        "delta_lru_points": round(100 * (hits - bounds.lru_hits) / references, 4),
        "ssd_blocks_written": outcome.ssd_blocks_written,
        "us_per_reference": round(outcome.seconds / references * 1e6, 3),
        "holes": outcome.holes,
        "hbm_capacity_blocks": cell.hbm_blocks,
        "hit_blocks_hbm": outcome.hits_hbm,
        "hit_rate_hbm": round(outcome.hits_hbm / references, 6),
        "hbm_blocks_promoted": outcome.hbm_blocks_promoted,
        "hbm_blocks_returned": 0,  # a copy moves nothing when it leaves: the tiers below have its block
        "blocks_moved_per_hit": round(outcome.blocks_moved / hits, 6) if hits else None,
    }


def readable(row: Row, block_bytes: int) -> Row:
    """A row for people: columns of the tiers that there are."""
    of_tiers = _of_three_tiers(row, block_bytes) if row["hbm_capacity_blocks"] else _of_two_tiers(row, block_bytes)
    return {
        "policy": row["policy"],
        **of_tiers,
        "optimum": _percent(row["belady_hit_rate"]),
        "of optimum": "-" if row["of_belady"] is None else f"{100 * row['of_belady']:.1f}%",
        "to LRU, points": f"{row['delta_lru_points']:+.2f}",
        "us/reference": f"{row['us_per_reference']:.2f}",
        "holes": row["holes"],
    }


def _of_two_tiers(row: Row, block_bytes: int) -> Row:
    shown = {
        "DRAM": f"{100 * row['capacity_fraction']:.3g}%",
        "blocks": row["capacity_blocks"],
        "size": format_size(row["capacity_blocks"] * block_bytes),
        "hit": _percent(row["hit_rate"]),
    }
    if row["ssd_capacity_blocks"]:
        shown["from DRAM"] = _percent(row["hit_rate_dram"])
        shown["from SSD"] = _percent(row["hit_rate_ssd"])
        shown["blocks to SSD"] = row["ssd_blocks_written"]
        shown["to SSD"] = format_size(row["ssd_blocks_written"] * block_bytes)
    return shown


def _of_three_tiers(row: Row, block_bytes: int) -> Row:
    used = row["hit_blocks_hbm"]
    shown = {
        "HBM": format_size(row["hbm_capacity_blocks"] * block_bytes),
        "DRAM": format_size(row["capacity_blocks"] * block_bytes),
        "hit": _percent(row["hit_rate"]),
        "from HBM": _percent(row["hit_rate_hbm"]),
        "from DRAM": _percent(row["hit_rate_dram"]),
    }
    if row["ssd_capacity_blocks"]:
        shown["from SSD"] = _percent(row["hit_rate_ssd"])
    return {
        **shown,
        "to HBM/hit there": f"{row['hbm_blocks_promoted'] / used:.2f}" if used else "-",
        "moved/hit": "-" if row["blocks_moved_per_hit"] is None else f"{row['blocks_moved_per_hit']:.2f}",
    }


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}%"
