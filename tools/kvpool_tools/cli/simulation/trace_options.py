"""Options of a simulation of traces, whatever is simulated with them: which tiers, of which sizes, by which policies. Main
thread of a command."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvpool.config.path_options import check_writable
from kvpool.errors import InvalidArgument
from kvpool.units import parse_size
from kvpool_tools.cli.hit_plot import require_plot
from kvpool_tools.cli.number_range import NumberRange
from kvpool_tools.cli.simulation.options import SimulateOptions, listed
from kvpool_tools.cli.simulation.tiers_option import DEFAULT_CAPACITIES, DEFAULT_SSD_RATIO, parse_tiers
from kvpool_tools.sim.pool import POLICIES
from kvpool_tools.sim.runner import TAILS
from kvpool_tools.sim.traces import BLOCK_TOKENS

DEFAULT_KV_BYTES = "128KiB"  # of a token
PROCESSES_MAX = 256
# Options of a daemon that have a meaning without bytes.
HEEDED = ("ssd.admission", "ssd.write_budget", "ssd.watermark", "ssd.write_through")

TRACE_OPTIONS = (
    click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(dir_okay=False)),
    click.option(
        "--capacity",
        metavar="LIST",
        help=f"DRAM: shares of the unique blocks, blocks, or sizes, by comma (default: {DEFAULT_CAPACITIES}).",
    ),
    click.option(
        "--tiers",
        default="dram",
        metavar="LIST",
        help="Which tiers there are: dram; dram,ssd; or with sizes, such as hbm:1%,dram:5%,ssd:40% (default: dram).",
    ),
    click.option(
        "--ssd-ratio",
        type=NumberRange(1.0, 1000.0),
        metavar="R",
        help=f"SSD capacity for each block of DRAM's, with --tiers dram,ssd (default: {DEFAULT_SSD_RATIO:g}).",
    ),
    click.option("--ssd-capacity", metavar="C", help="SSD capacity, like one entry of --capacity, instead of a ratio."),
    click.option(
        "--token-bytes",
        default=DEFAULT_KV_BYTES,
        metavar="SIZE",
        help=f"KV of a token, all layers and ranks: makes blocks of sizes (default: {DEFAULT_KV_BYTES}).",
    ),
    click.option(
        "--tails",
        type=click.Choice(TAILS),
        default=TAILS[0],
        help=f"Partial blocks at the ends of prompts: asked for and never stored, stored, or left out (default: {TAILS[0]}).",
    ),
    click.option(
        "--requests",
        type=click.IntRange(min=1),
        metavar="N",
        help="Simulate the first N requests alone (default: all).",
    ),
    click.option(
        "--times", metavar="FILE", help="When requests come: a file of bench replay --times (default: the trace's)."
    ),
    click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help=f"A daemon's option: {', '.join(HEEDED)}."
    ),
    click.option(
        "--processes",
        type=click.IntRange(1, PROCESSES_MAX),
        metavar="N",
        help="Run so many processes at once (default: one for each core).",
    ),
    click.option("--png", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the hit rates."),
    click.option(
        "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write the JSON document to FILE, too."
    ),
)


def policy_option(default: tuple[str, ...]) -> Callable[..., Any]:
    """The option of eviction policies, with those where none is named."""
    text = f"Eviction policies of DRAM, by comma: {', '.join(POLICIES)} (default: {', '.join(default)})."
    return click.option("--policy", default=",".join(default), metavar="LIST", help=text)


def add_options(options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Decorator of a command that adds the options, in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def parse_options(given: Mapping[str, Any]) -> SimulateOptions:
    """What TRACE_OPTIONS and `policy_option` came to, by name. Raises InvalidArgument."""
    if given["times"] is not None and len(given["traces"]) > 1:
        raise InvalidArgument("--times is for one trace")
    for name in ("png", "out"):
        if given[name] is not None:
            check_writable(f"--{name}", Path(given[name]))
    if given["png"] is not None:
        require_plot()
    of_tiers = {name: given[name] for name in ("capacity", "ssd_ratio", "ssd_capacity")}
    sizes = parse_tiers(given["tiers"], **of_tiers)
    return SimulateOptions(
        capacities=sizes.capacities,
        policies=_policies(given["policy"]),
        ssd_ratio=sizes.ssd_ratio,
        ssd_capacity=sizes.ssd_capacity,
        hbm_capacity=sizes.hbm_capacity,
        processes=given["processes"] or len(os.sched_getaffinity(0)),
        requests=given["requests"],
        tails=given["tails"],
        block_bytes=_token_bytes(given["token_bytes"]) * BLOCK_TOKENS,
        overrides=_heeded(given["overrides"]),
        times=given["times"],
    )


def _policies(text: str) -> tuple[str, ...]:
    chosen = listed("--policy", text)
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
