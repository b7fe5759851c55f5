"""Picture of a simulation of many nodes: hits by their source, and what the nodes exchange, against the number of nodes.

Needs matplotlib, which is in the extra `plot` and is imported only when a picture is asked for. Main thread of a command only.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

PANEL_INCHES = (4.6, 3.8)
GB = 1e9


def plot_nodes(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture: a line of panels for each trace, in each a curve for each router, capacity and policy."""
    from matplotlib.figure import Figure  # an optional heavy dependency

    traces = list(dict.fromkeys(row["trace"] for row in rows))
    width, height = PANEL_INCHES
    figure = Figure(figsize=(4 * width, height * len(traces)), layout="constrained")
    for line, trace in zip(figure.subplots(len(traces), 4, squeeze=False), traces, strict=True):
        of_trace = [row for row in rows if row["trace"] == trace]
        for number, (label, group) in enumerate(groupby(of_trace, key=lambda row: _label(row, of_trace))):
            _draw(line, sorted(group, key=lambda row: int(row["nodes"])), label=label, color=f"C{number % 10}")
        titles = (
            "block hits, %: all, local (dots)",
            "over the network, GB",
            "index of a node, MiB",
            "changes/s to a node",
        )
        for axes, title in zip(line, titles, strict=True):
            axes.set_title(f"{trace}\n{title}", fontsize=9)
            axes.set_xscale("log")
            axes.set_xlabel("nodes")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.3)
        line[0].legend(fontsize=8)
    figure.savefig(path, format="png", dpi=90)


def _label(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The router, and the policy and the capacity where there are several."""
    several = [key for key in ("policy", "capacity_fraction") if len({other[key] for other in rows}) > 1]
    return ", ".join(str(row[key]) for key in ("router", *several))


def _draw(line: Any, rows: Sequence[Mapping[str, Any]], *, label: str, color: str) -> None:
    nodes = [row["nodes"] for row in rows]
    network = ("network_bytes_peer", "network_bytes_from_store", "network_bytes_to_store")
    style = {"color": color, "label": label}
    line[0].plot(nodes, [100 * row["hit_rate"] for row in rows], "o-", markersize=3, **style)
    line[0].plot(nodes, [100 * row["hit_rate_local"] for row in rows], ":", color=color)
    line[1].plot(nodes, [sum(row[key] for key in network) / GB for row in rows], "o-", markersize=3, **style)
    line[2].plot(nodes, [row["index_bytes"] / (1 << 20) for row in rows], "o-", markersize=3, **style)
    line[3].plot(nodes, [row["received_changes_per_s"] or 0 for row in rows], "o-", markersize=3, **style)
