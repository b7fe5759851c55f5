"""`kvpoolctl mrc`: the hit rate that a running daemon would have with more memory, or less. Text, JSON, or a picture.

The curve is the daemon's estimate from a sample of requested chunks; see docs/sizing.md. Main thread only.
"""

import math
from pathlib import Path
from typing import Any

import click

from kvpool import __version__
from kvpool.config.path_options import check_writable
from kvpool.errors import InvalidArgument
from kvpool.units import format_size, parse_size
from kvpool_tools.cli.hit_plot import plot_curve, require_plot
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool_tools.cli.output import EXIT_USAGE, fail, print_json, print_line

DEFAULT_ADDITION = "64GiB"
# Sizes from an eighth of DRAM on, two for each doubling.
SMALLEST_SHARE = 8
STEPS_PER_OCTAVE = 2
STEPS_MAX = 64
BAR_WIDTH = 40
# A share of n independent chunks is off by 1 / sqrt(n) or less, 19 times in 20. From so many points on that is worth a line;
# from the other on it is no curve.
UNSURE_POINTS, USELESS_POINTS = 2.0, 20.0

Row = dict[str, Any]


@cli.command(epilog=epilog("kvpoolctl mrc --add 64GiB,256GiB", "kvpoolctl mrc --json", "kvpoolctl mrc --png curve.png"))
@click.option(
    "--add",
    metavar="LIST",
    help=f"Show what so much more memory would bring, by comma (default: {DEFAULT_ADDITION}; for a small DRAM, its size).",
)
@click.option("--png", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the curve.")
@common_options
@click.pass_obj
def mrc(options: Options, add: str | None, png: str | None) -> None:
    """Print the hit rate with more memory, or less: the miss-ratio curve of the daemon's requests.

    The curve is an estimate for plain LRU from a sample of the chunks; recent hours weigh most. A rate is the share of the
    bytes that engines wanted, found or saved. The daemon's own policy may hit more at the size it has. By how many points a
    rate may be off, because the sample is small, is printed where it matters, and is error_points with --json; it is more
    where few chunks have most of the requests.
    """
    try:
        additions = None if add is None else [parse_size(text.strip()) for text in add.split(",")]
        if png is not None:
            check_writable("--png", Path(png))
            require_plot()
    except InvalidArgument as error:
        fail(f"--add: {error}" if "size" in str(error) else str(error), EXIT_USAGE)
    with options.connect() as connection:
        known = ask(lambda: connection.hit_curve([]))
        capacities = _capacities(known, additions)
        report = ask(lambda: connection.hit_curve(sorted(capacities)))
    rows = _rows(report, capacities)
    if png is not None:
        plot_curve(rows, Path(png))
    if options.is_json:
        error_points = round(_error_points(report), 2)
        print_json(
            {"command": "mrc", "version": __version__, **_facts(report), "error_points": error_points, "rows": rows}
        )
    else:
        _print_rows(report, rows)


def _capacities(known: Row, additions: list[int] | None) -> dict[int, str]:
    """The capacities and their names; none beyond the daemon's estimate."""
    dram, ssd = known["dram_capacity_bytes"], known["ssd_capacity_bytes"]
    named = {dram: "DRAM, now"}
    if ssd:
        named[dram + ssd] = "DRAM and SSD, now"
    most = known["horizon_bytes"] - dram
    if additions is None:
        addition = parse_size(DEFAULT_ADDITION)
        additions = [addition if addition <= most else dram]
    for addition in additions:
        named.setdefault(dram + addition, f"DRAM + {format_size(addition)}")
        if addition > most:
            largest = format_size(most)
            fail(f"--add is {format_size(addition)}, expected at most {largest}: nothing is known beyond", EXIT_USAGE)
    for step in range(STEPS_MAX):
        capacity = int(dram / SMALLEST_SHARE * 2 ** (step / STEPS_PER_OCTAVE))
        if 0 < capacity <= known["horizon_bytes"]:
            named.setdefault(capacity, "")
    return named


def _rows(report: Row, named: dict[int, str]) -> list[Row]:
    rates = dict(zip(sorted(named), report["hit_rates"], strict=True))
    now = rates[report["dram_capacity_bytes"]]
    return [
        {
            "capacity_bytes": capacity,
            "name": named[capacity],
            "hit_rate": rate,
            "delta_points": round(100 * (rate - now), 4),
        }
        for capacity, rate in rates.items()
    ]


def _facts(report: Row) -> Row:
    return {name: value for name, value in report.items() if name != "hit_rates"}


def _error_points(report: Row) -> float:
    """By how many points a rate may be off, for a sample of so many chunks."""
    return 100.0 / math.sqrt(max(1, report["sampled_chunks"]))


def _print_rows(report: Row, rows: list[Row]) -> None:
    referenced = format_size(report["referenced_bytes"])
    if not report["referenced_bytes"]:
        print_line("nothing was asked for yet")
        return
    print_line(f"LRU over {referenced} asked for, from {report['sampled_chunks']} chunks, one in "
               f"{1 / report['sample_rate']:.0f}")  # fmt: skip
    points = _error_points(report)
    if points >= USELESS_POINTS:
        print_line("the sample is too small: what follows is no estimate; ask again after more requests")
    elif points >= UNSURE_POINTS:
        print_line(f"the sample is small: a rate may be off by {points:.0f} points")
    for row in rows:
        bar = "█" * round(BAR_WIDTH * row["hit_rate"])
        size, rate = format_size(row["capacity_bytes"]), f"{100 * row['hit_rate']:.1f}%"
        change = f"{row['delta_points']:+.1f} points"
        print_line(f"{size:>10} {rate:>6} {change:>13}  {bar:<{BAR_WIDTH}} {row['name']}".rstrip())
