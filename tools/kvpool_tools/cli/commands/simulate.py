"""`kvpoolctl simulate`: hit rates of a trace in a pool of a given size, with the daemon's own decisions and no bytes.

Holds the command, its options, and the rows it prints. The simulation is in `kvpool_tools.sim`; it uses no daemon. Main thread
only.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from kvpool.errors import ConfigError, InvalidArgument, KVPoolError
from kvpool.layouts.groups import WINDOW_MAX
from kvpool.units import format_size
from kvpool_tools.cli.hit_plot import plot_hit_rates
from kvpool_tools.cli.kvpoolctl import Options, cli, common_options, epilog
from kvpool_tools.cli.number_range import NumberRange
from kvpool_tools.cli.output import EXIT_FAILURE, EXIT_USAGE, fail, print_table
from kvpool_tools.cli.simulation.document import simulate_each
from kvpool_tools.cli.simulation.group_options import GroupOptions, readable_groups
from kvpool_tools.cli.simulation.options import SimulateOptions, parse_blocks, parse_share, ssd_blocks_beside
from kvpool_tools.cli.simulation.rows import COLUMNS_MAX, Row, make_row, readable
from kvpool_tools.cli.simulation.trace_options import TRACE_OPTIONS, add_options, parse_options, policy_option
from kvpool_tools.sim.cells import Cell, Outcome
from kvpool_tools.sim.pool import POLICIES
from kvpool_tools.sim.runner import Result, Simulation, Work
from kvpool_tools.sim.traces import Trace, TraceError
from kvpool_tools.sim.workload import Workload


def _simulate_trace(path: str, wanted: SimulateOptions, progress: Progress) -> list[Row]:
    """Rows of one trace, by capacity and policy. Raises TraceError, InvalidArgument, or KVPoolError when a process fails."""
    settings = wanted.settings(path)
    name = Trace(Path(path)).name
    settings.config()  # its faults are reported before the trace is read
    task = progress.add_task(f"read {name}", total=None)
    workload = settings.workload()
    cells = _cells(wanted, workload)
    works: list[Work] = [*cells, *dict.fromkeys(cell.blocks for cell in cells)]
    works += [wanted.groups.cell(cell.policy, cell.dram_blocks) for cell in cells] if wanted.groups is not None else []
    progress.update(task, description=f"simulate {name}", total=len(works))
    results: dict[Work, Result] = {}
    for work, result in Simulation(settings, workload).run_all(works, wanted.processes):
        results[work] = result
        progress.update(task, advance=1)
    rows = [make_row(name, workload, cell, results, share=share) for cell, share in cells.items()]
    for cell, row in zip(cells, rows, strict=True):
        if wanted.groups is not None:
            outcome = results[wanted.groups.cell(cell.policy, cell.dram_blocks)]
            assert isinstance(outcome, Outcome)
            row.update(wanted.groups.columns(outcome, workload.references))
    return rows


def _cells(wanted: SimulateOptions, workload: Workload) -> dict[Cell, float]:
    """Each cell with its share of the unique blocks, as requested."""
    cells = {}
    for text in wanted.capacities:
        blocks = parse_blocks(text, workload.unique, wanted.block_bytes)
        ssd_blocks = ssd_blocks_beside(text, blocks, workload.unique, wanted)
        hbm_blocks = 0
        if wanted.hbm_capacity is not None:
            hbm_blocks = parse_blocks(wanted.hbm_capacity, workload.unique, wanted.block_bytes, option="--tiers hbm")
        share = parse_share(text) or blocks / workload.unique
        cells.update({Cell(policy, blocks, ssd_blocks, hbm_blocks): round(share, 6) for policy in wanted.policies})
    return cells


def _print_rows(rows: list[Row], block_bytes: int) -> None:
    first = rows[0]
    title = (
        f"{first['trace']}: {first['requests']} requests, {first['references']} block references, "
        f"{first['unique_blocks']} unique blocks of {format_size(block_bytes)}"
    )
    print_table(title, [readable(row, block_bytes) for row in rows], columns_max=COLUMNS_MAX)
    if "full_share" in first:
        shown = [{**_place_of(row, block_bytes), **readable_groups(row)} for row in rows]
        what = f"{100 * first['full_share']:.3g} % of the layers full, the others with a window of {first['window_tokens']}"
        print_table(f"{what} tokens", shown, columns_max=COLUMNS_MAX)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        shares = [row["of_belady"] for row in rows if row["policy"] == policy and row["of_belady"] is not None]
        if shares:
            score = 100 * sum(shares) / len(shares)
            click.echo(f"{policy}: {score:.1f} % of the optimum's hits, mean of {len(shares)} capacities")


def _place_of(row: Row, block_bytes: int) -> Row:
    return {"policy": row["policy"], "size": format_size(row["capacity_blocks"] * block_bytes)}


@cli.command(
    epilog=epilog(
        "kvpoolctl simulate conversation_trace.jsonl.gz --capacity 1%,2%,5% --png hits.png",
        "kvpoolctl simulate ours.jsonl --capacity 64GiB,128GiB --token-bytes 160KiB --tiers dram,ssd --json",
        "kvpoolctl simulate ours.jsonl --tiers hbm:8GiB,dram:64GiB,ssd:1TiB --policy class-queues",
        "kvpoolctl simulate ours.jsonl --capacity 64GiB --window 1024 --full-share 0.25",
    )
)
@add_options((*TRACE_OPTIONS, policy_option(POLICIES)))
@click.option(
    "--window",
    type=click.IntRange(1, WINDOW_MAX),
    metavar="TOKENS",
    help="Layers beside the full ones attend to the last TOKENS tokens: compare storing by groups with storing everything.",
)
@click.option("--full-share", type=NumberRange(0.0, 1.0), metavar="F", help="Share of the layers that are full.")
@common_options
@click.pass_obj
def simulate(options: Options, /, window: int | None, full_share: float | None, **given: Any) -> None:
    """Print the hit rates of request traces in a pool of a given size: the daemon's own decisions, without bytes or waiting.

    TRACE is a file of JSON lines as Mooncake publishes them (.jsonl, .jsonl.gz) or a numpy archive (.npz). Rates are of block
    references. Beside each are the hits of the offline optimum, which knows the future, and those of leaf-first LRU, with as
    many blocks as all tiers have together. docs/sizing.md shows how to choose a size, and how to make a trace of your own.
    """
    if options.socket is not None:
        fail("simulate uses no daemon: leave --socket out", EXIT_USAGE)
    try:
        wanted = parse_options(given)
        others = {"--tiers ssd": wanted.ssd_ratio or wanted.ssd_capacity, "--tiers hbm": wanted.hbm_capacity}
        wanted = replace(wanted, groups=GroupOptions.parse(window, full_share, **others))
        rows = simulate_each(
            given,
            lambda path, progress: _simulate_trace(path, wanted, progress),
            lambda rows: _print_rows(rows, wanted.block_bytes),
            command="simulate",
            is_json=options.is_json,
        )
        if given["png"] is not None:
            plot_hit_rates(rows, Path(given["png"]))
    except (TraceError, InvalidArgument, ConfigError) as error:
        fail(str(error), EXIT_USAGE)
    except KVPoolError as error:
        fail(str(error), EXIT_FAILURE)
    if any(row["holes"] or row.get("holes_groups") for row in rows):
        fail("the index was found broken: see holes", EXIT_FAILURE)
