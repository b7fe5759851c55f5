"""`kvpoolctl simulate`: hit rates of a trace in a pool of a given size, with the daemon's own decisions and no bytes.

Holds the command, its options, and the rows it prints. The simulation is in `kvpool_tools.sim`; it uses no daemon. Main thread
only.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvpool import __version__
from kvpool.config.path_options import check_writable
from kvpool.errors import ConfigError, InvalidArgument, KVPoolError
from kvpool.layouts.groups import WINDOW_MAX
from kvpool.units import format_size, parse_size
from kvpool_tools.cli.hit_plot import plot_hit_rates, require_plot
from kvpool_tools.cli.kvpoolctl import Options, cli, common_options, epilog
from kvpool_tools.cli.machine import describe_machine
from kvpool_tools.cli.number_range import NumberRange
from kvpool_tools.cli.output import EXIT_FAILURE, EXIT_USAGE, fail, print_json, print_table
from kvpool_tools.cli.simulation.group_options import GroupOptions, readable_groups
from kvpool_tools.cli.simulation.node_options import NODE_OPTIONS, NodeOptions, add_options
from kvpool_tools.cli.simulation.nodes import print_node_rows, simulate_nodes
from kvpool_tools.cli.simulation.nodes_plot import plot_nodes
from kvpool_tools.cli.simulation.options import SimulateOptions, listed, parse_blocks, parse_share, ssd_blocks_beside
from kvpool_tools.cli.simulation.rows import COLUMNS_MAX, Row, make_row, readable
from kvpool_tools.cli.simulation.tiers_option import DEFAULT_CAPACITIES, DEFAULT_SSD_RATIO, parse_tiers
from kvpool_tools.sim.cells import Cell, Outcome
from kvpool_tools.sim.node import POLICIES
from kvpool_tools.sim.runner import TAILS, Result, Simulation, Work
from kvpool_tools.sim.traces import BLOCK_TOKENS, Trace, TraceError
from kvpool_tools.sim.workload import Workload

DEFAULT_KV_BYTES = "128KiB"  # of a token
PROCESSES_MAX = 256
# Options of a daemon that have a meaning without bytes.
HEEDED = ("ssd.admission", "ssd.write_budget", "ssd.watermark", "ssd.write_through")


def simulate_trace(path: str, wanted: SimulateOptions, progress: Progress) -> list[Row]:
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
        "kvpoolctl simulate ours.jsonl --capacity 256GiB --nodes 1,2,4,8,16 --router session-affine,round-robin",
    )
)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(dir_okay=False))
@click.option(
    "--capacity",
    metavar="LIST",
    help=f"DRAM: shares of the unique blocks, blocks, or sizes, by comma (default: {DEFAULT_CAPACITIES}).",
)
@click.option(
    "--tiers",
    default="dram",
    metavar="LIST",
    help="Which tiers there are: dram; dram,ssd; or with sizes, such as hbm:1%,dram:5%,ssd:40% (default: dram).",
)
@click.option(
    "--ssd-ratio",
    type=NumberRange(1.0, 1000.0),
    metavar="R",
    help=f"SSD capacity for each block of DRAM's, with --tiers dram,ssd (default: {DEFAULT_SSD_RATIO:g}).",
)
@click.option("--ssd-capacity", metavar="C", help="SSD capacity, like one entry of --capacity, instead of a ratio.")
@click.option(
    "--policy",
    metavar="LIST",
    help=f"Eviction policies of DRAM, by comma: {', '.join(POLICIES)} (default: all; for nodes the first).",
)
@click.option(
    "--token-bytes",
    default=DEFAULT_KV_BYTES,
    metavar="SIZE",
    help=f"KV of a token, all layers and ranks: makes blocks of sizes (default: {DEFAULT_KV_BYTES}).",
)
@click.option(
    "--tails",
    type=click.Choice(TAILS),
    default=TAILS[0],
    help=f"Partial blocks at the ends of prompts: asked for and never stored, stored, or left out (default: {TAILS[0]}).",
)
@click.option(
    "--window",
    type=click.IntRange(1, WINDOW_MAX),
    metavar="TOKENS",
    help="Layers beside the full ones attend to the last TOKENS tokens: compare storing by groups with storing everything.",
)
@click.option("--full-share", type=NumberRange(0.0, 1.0), metavar="F", help="Share of the layers that are full.")
@click.option(
    "--requests", type=click.IntRange(min=1), metavar="N", help="Simulate the first N requests alone (default: all)."
)
@click.option(
    "--times", metavar="FILE", help="When requests come: a file of bench replay --times (default: the trace's)."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=f"A daemon's option: {', '.join(HEEDED)}.")
@click.option(
    "--processes",
    type=click.IntRange(1, PROCESSES_MAX),
    metavar="N",
    help="Run so many processes at once (default: one for each core).",
)
@click.option(
    "--png", type=click.Path(dir_okay=False), metavar="FILE", help="Draw hit rate against capacity, or nodes."
)
@add_options(NODE_OPTIONS)
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write the JSON document to FILE, too.")
@common_options
@click.pass_obj
def simulate(
    options: Options,
    /,
    traces: tuple[str, ...],
    capacity: str | None,
    tiers: str,
    ssd_ratio: float | None,
    ssd_capacity: str | None,
    policy: str | None,
    token_bytes: str,
    tails: str,
    window: int | None,
    full_share: float | None,
    requests: int | None,
    times: str | None,
    overrides: tuple[str, ...],
    processes: int | None,
    png: str | None,
    out: str | None,
    **of_nodes: Any,
) -> None:
    """Print the hit rates of request traces in a pool of a given size: the daemon's own decisions, without bytes or waiting.

    TRACE is a file of JSON lines as Mooncake publishes them (.jsonl, .jsonl.gz) or a numpy archive (.npz). Rates are of block
    references. Beside each are the hits of the offline optimum, which knows the future, and those of leaf-first LRU, with as
    many blocks as all tiers have together. docs/sizing.md shows how to choose a size, and how to make a trace of your own.
    With --nodes the requests are shared out among so many nodes by a router's model: "Many nodes" there.
    """
    if options.socket is not None:
        fail("simulate uses no daemon: leave --socket out", EXIT_USAGE)
    if times is not None and len(traces) > 1:
        fail("--times is for one trace", EXIT_USAGE)
    try:
        for option, file in (("--png", png), ("--out", out)):
            if file is not None:
                check_writable(option, Path(file))
        if png is not None:
            require_plot()
        nodes = NodeOptions.parse(of_nodes)
        sizes = parse_tiers(tiers, capacity=capacity, ssd_ratio=ssd_ratio, ssd_capacity=ssd_capacity)
        if nodes is not None and sizes.hbm_capacity is not None:
            raise InvalidArgument(f"--tiers {tiers} has hbm, which has no meaning with --nodes")
        others = {
            "--nodes": nodes,
            "--tiers ssd": sizes.ssd_ratio or sizes.ssd_capacity,
            "--tiers hbm": sizes.hbm_capacity,
        }
        wanted = SimulateOptions(
            groups=GroupOptions.parse(window, full_share, **others),
            capacities=sizes.capacities,
            policies=_policies(policy, POLICIES if nodes is None else POLICIES[:1]),
            ssd_ratio=sizes.ssd_ratio,
            ssd_capacity=sizes.ssd_capacity,
            hbm_capacity=sizes.hbm_capacity,
            processes=processes or len(os.sched_getaffinity(0)),
            requests=requests,
            tails=tails,
            block_bytes=_token_bytes(token_bytes) * BLOCK_TOKENS,
            overrides=_heeded(overrides),
            times=times,
        )
        rows = _simulate_all(traces, wanted, nodes, is_json=options.is_json, out=out)
        if png is not None:
            (plot_hit_rates if nodes is None else plot_nodes)(rows, Path(png))
    except (TraceError, InvalidArgument, ConfigError) as error:
        fail(str(error), EXIT_USAGE)
    except KVPoolError as error:
        fail(str(error), EXIT_FAILURE)
    if any(row["holes"] or row.get("holes_groups") for row in rows):
        fail("the index was found broken: see holes", EXIT_FAILURE)


def _simulate_all(
    traces: Sequence[str], wanted: SimulateOptions, nodes: NodeOptions | None, *, is_json: bool, out: str | None
) -> list[Row]:
    document: dict[str, Any] = {
        "command": "simulate",
        "version": __version__,
        "machine": describe_machine(),
        "rows": [],
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    for path in traces:
        console = Console(stderr=True)
        with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as progress:
            rows = simulate_nodes(path, wanted, nodes, progress) if nodes else simulate_trace(path, wanted, progress)
        document["rows"] += rows
        if nodes is not None and not is_json:
            print_node_rows(rows, wanted.block_bytes, nodes)
        elif not is_json:
            _print_rows(rows, wanted.block_bytes)
    if is_json:
        print_json(document)
    if out is not None:
        Path(out).write_text(json.dumps(document, indent=2) + "\n")
    return list(document["rows"])


def _policies(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    chosen = default if text is None else listed("--policy", text)
    for name in chosen:
        if name not in POLICIES:
            raise InvalidArgument(f"--policy has {name!r}, expected {', '.join(POLICIES)}")
    return chosen


def _token_bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"--token-bytes: {error}") from error
    if not size:
        raise InvalidArgument(f"--token-bytes is {text!r}, expected more than none")
    return size


def _heeded(overrides: tuple[str, ...]) -> tuple[str, ...]:
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name not in HEEDED:
            raise InvalidArgument(f"--set {name} has no meaning in a simulation, expected one of {', '.join(HEEDED)}")
    return overrides
