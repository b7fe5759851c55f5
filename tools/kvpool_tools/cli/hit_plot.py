"""Plots of hit rate against capacity: of a simulation, one line for each policy, and of a daemon's own estimate.

Needs matplotlib, which is in the extra `plot` and is imported only when a picture is asked for. Main thread of a command only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgument
from kvpool_tools.cli.output import writing

PICTURE_INCHES = (7.0, 4.5)
GIB = 1 << 30


def require_plot() -> None:
    """Check that a picture can be drawn, before anything is computed for it. Raises InvalidArgument."""
    try:
        import matplotlib.figure  # noqa: F401 - an optional heavy dependency
    except ImportError as error:
        raise InvalidArgument(
            "--png needs matplotlib, which is not installed: pip install 'kvpool[plot]' brings it"
        ) from error


def plot_hit_rates(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture of a simulation's rows: one plot for each trace."""
    from matplotlib.figure import Figure  # an optional heavy dependency

    traces = list(dict.fromkeys(row["trace"] for row in rows))
    width, height = PICTURE_INCHES
    figure = Figure(figsize=(width * len(traces), height), layout="constrained")
    for axes, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        of_trace = [row for row in rows if row["trace"] == trace]
        policies = list(dict.fromkeys(row["policy"] for row in of_trace))
        some = sorted((row for row in of_trace if row["policy"] == policies[0]), key=_capacity)
        axes.plot([*map(_capacity, some)], [100 * row["belady_hit_rate"] for row in some], "k--", label="optimum")
        axes.plot([*map(_capacity, some)], [100 * row["lru_hit_rate"] for row in some], "k:", label="LRU, simple model")
        for policy in policies:
            own = sorted((row for row in of_trace if row["policy"] == policy), key=_capacity)
            axes.plot([*map(_capacity, own)], [100 * row["hit_rate"] for row in own], "o-", label=policy)
            if any(row["ssd_capacity_blocks"] for row in own):
                dram = [100 * row["hit_rate_dram"] for row in own]
                axes.plot([*map(_capacity, own)], dram, ".-", alpha=0.5, label=f"{policy}, from DRAM")
        axes.set_title(trace)
        axes.set_xscale("log")
        axes.set_xlabel("DRAM capacity, % of the unique blocks")
        axes.set_ylabel("block hit rate, %")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    with writing(path):
        figure.savefig(path, format="png", dpi=120)


def plot_curve(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture of a daemon's miss-ratio curve; sizes that have a name are marked with it."""
    from matplotlib.figure import Figure  # an optional heavy dependency

    figure = Figure(figsize=PICTURE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.plot([row["capacity_bytes"] / GIB for row in rows], [100 * (1 - row["hit_rate"]) for row in rows], "-")
    for row in rows:
        if row["name"]:
            at = (row["capacity_bytes"] / GIB, 100 * (1 - row["hit_rate"]))
            axes.plot(*at, "o")
            axes.annotate(row["name"], at, xytext=(4, 6), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xlabel("capacity, GiB")
    axes.set_ylabel("missed by LRU, % of the bytes asked for")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    with writing(path):
        figure.savefig(path, format="png", dpi=120)


def _capacity(row: Mapping[str, Any]) -> float:
    return 100.0 * float(row["capacity_fraction"])
