"""Rows of the fleet: where hits come from with so many nodes, and what that costs. Main thread alone."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from kvpool.units import format_size
from kvpool_tools.cli.output import print_table
from kvpool_tools.cli.simulation.options import (
    BLOCKS_MAX,
    SimulateOptions,
    parse_blocks,
    parse_share,
    ssd_blocks_beside,
)
from kvpool_tools.sim.runner import SimulationSettings
from kvpool_tools.sim.traces import Trace
from kvpool_tools.sim.workload import Workload
from studies.fleet.cell import ClusterCell, ClusterOutcome
from studies.fleet.cluster import run_cluster
from studies.fleet.node_options import NodeOptions, allow_files
from studies.fleet.remote_index import ENTRY_BYTES

COLUMNS_MAX = 16

Row = dict[str, Any]


def simulate_nodes(path: str, wanted: SimulateOptions, nodes: NodeOptions, progress: Progress) -> list[Row]:
    """Rows of one trace, by router, capacity, policy and number of nodes. Raises TraceError, InvalidArgument, or KVPoolError
    when a process fails."""
    settings, name = wanted.settings(path), Trace(Path(path)).name
    settings.config()  # its faults are reported before the trace is read
    allow_files(max(nodes.nodes))
    task = progress.add_task(f"read {name}", total=None)
    workload = _workload(settings)
    cells = _cells(wanted, nodes, workload)
    progress.update(task, description=f"simulate {name}", total=len(cells))
    rows: list[Row] = []
    for cell, outcome in zip(cells, _outcomes(settings, list(cells), wanted.processes), strict=True):
        rows.append(_row(name, workload, cell, outcome, share=cells[cell]))
        progress.update(task, advance=1)
    return rows


def _outcomes(settings: SimulationSettings, cells: Sequence[ClusterCell], processes: int) -> Iterator[ClusterOutcome]:
    """The outcome of each cell, in their order, from so many processes; each reads the trace itself."""
    run = partial(_run, settings)
    if min(processes, len(cells)) == 1:
        yield from map(run, cells)
        return
    with ProcessPoolExecutor(min(processes, len(cells)), get_context("spawn")) as children:
        yield from children.map(run, cells)


def _run(settings: SimulationSettings, cell: ClusterCell) -> ClusterOutcome:
    return run_cluster(_workload(settings), cell, settings.config())


@lru_cache(maxsize=1)
def _workload(settings: SimulationSettings) -> Workload:
    return settings.workload()


def _cells(wanted: SimulateOptions, nodes: NodeOptions, workload: Workload) -> dict[ClusterCell, float]:
    """Each cell with its capacity's share of the unique blocks, as requested."""
    cells = {}
    for router in nodes.routers:
        settings = nodes.settings(router, wanted, workload.unique)
        for text in wanted.capacities:
            blocks = parse_blocks(text, workload.unique, wanted.block_bytes)
            ssd_blocks = ssd_blocks_beside(text, blocks, workload.unique, wanted)
            share = round(parse_share(text) or blocks / workload.unique, 6)
            for policy in wanted.policies:
                for count in nodes.nodes:
                    among = count if nodes.is_capacity_of_all else 1
                    own = max(1, blocks // among), max(1, ssd_blocks // among) if ssd_blocks else 0
                    cells[ClusterCell(count, policy, *own, settings)] = share
    assert all(cell.dram_blocks <= BLOCKS_MAX for cell in cells)
    return cells


def _row(name: str, workload: Workload, cell: ClusterCell, outcome: ClusterOutcome, *, share: float) -> Row:
    references, settings = workload.references, cell.settings
    block_bytes, seconds = settings.block_bytes, outcome.trace_s
    others = (cell.nodes - 1) / cell.nodes

    def rate(blocks: int) -> float:
        return round(blocks / references, 6)

    def per_s(count: float) -> float | None:
        return round(count / seconds, 3) if seconds else None

    return {
        "trace": name,
        "policy": cell.policy,
        "router": settings.router,
        "nodes": cell.nodes,
        "seed": settings.seed,
        "peers": settings.has_peers,
        "capacity_fraction": share,
        "capacity_blocks": cell.dram_blocks,
        "ssd_capacity_blocks": cell.ssd_blocks,
        "store_capacity_blocks": settings.store_blocks,
        "requests": workload.requests,
        "sessions": outcome.sessions,
        "references": references,
        "unique_blocks": workload.unique,
        "nodes_used": outcome.nodes_used,
        "hit_blocks_dram": outcome.hits_dram,
        "hit_blocks_ssd": outcome.hits_ssd,
        "hit_blocks_peer": outcome.hits_peer,
        "hit_blocks_store": outcome.hits_store,
        "missed_blocks": outcome.missed,
        "hit_rate": rate(outcome.hits),
        "hit_rate_local": rate(outcome.hits_dram + outcome.hits_ssd),
        "hit_rate_dram": rate(outcome.hits_dram),
        "hit_rate_ssd": rate(outcome.hits_ssd),
        "hit_rate_peer": rate(outcome.hits_peer),
        "hit_rate_store": rate(outcome.hits_store),
        "stale_blocks": outcome.blocks_stale,
        "slow_blocks": outcome.blocks_slow,
        "pulls": outcome.pulls,
        "network_bytes_peer": outcome.hits_peer * block_bytes,
        "network_bytes_from_store": outcome.hits_store * block_bytes,
        "network_bytes_to_store": outcome.blocks_to_store * block_bytes,
        "network_busiest_share": round(outcome.busiest_share, 6),
        "ssd_blocks_written": outcome.ssd_blocks_written,
        "index_entries": outcome.index_entries,
        "index_bytes": outcome.index_entries * ENTRY_BYTES,
        "index_forgotten": outcome.index_forgotten,
        "published_changes_per_s": per_s(outcome.changes / cell.nodes),
        "published_events_per_s": per_s(outcome.events / cell.nodes),
        "received_changes_per_s": per_s(outcome.changes * others),
        "received_events_per_s": per_s(outcome.events * others),
        "received_changes_peak": round(outcome.changes_peak * others),
        "recompute_seconds": round(references * settings.block_compute_s, 3),
        "saved_seconds": round(outcome.saved_s, 3),
        "saved_share": round(outcome.saved_s / (references * settings.block_compute_s), 6),
        "us_per_reference": round(outcome.seconds / references * 1e6, 3),
        "holes": outcome.holes,
    }


def _readable(row: Row, block_bytes: int) -> Row:
    network = row["network_bytes_peer"] + row["network_bytes_from_store"] + row["network_bytes_to_store"]
    readable = {
        "router": row["router"],
        "policy": row["policy"],
        "nodes": row["nodes"],
        "DRAM each": format_size(row["capacity_blocks"] * block_bytes),
        "hit": _percent(row["hit_rate"]),
        "DRAM": _percent(row["hit_rate_dram"]),
    }
    if row["ssd_capacity_blocks"]:
        readable["SSD"] = _percent(row["hit_rate_ssd"])
    readable["peer"] = _percent(row["hit_rate_peer"])
    if row["store_capacity_blocks"]:
        readable["store"] = _percent(row["hit_rate_store"])
    return {
        **readable,
        "network": format_size(network),
        "busiest link": _percent(row["network_busiest_share"]),
        "index": format_size(row["index_bytes"]),
        "changes/s in": "-" if row["received_changes_per_s"] is None else f"{row['received_changes_per_s']:.0f}",
        "peak/s": row["received_changes_peak"],
        "time saved": f"{100 * row['saved_share']:.1f}%",
        "holes": row["holes"],
    }


def print_node_rows(rows: list[Row], block_bytes: int, nodes: NodeOptions) -> None:
    """Print the table of a trace."""
    first = rows[0]
    title = (
        f"{first['trace']}: {first['requests']} requests, {first['sessions']} sessions, "
        f"{first['references']} block references, {first['unique_blocks']} unique blocks of {format_size(block_bytes)}"
    )
    print_table(title, [_readable(row, block_bytes) for row in rows], columns_max=COLUMNS_MAX)
    click.echo(nodes.describe())


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}%"
