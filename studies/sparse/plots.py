"""Plots of the study: error by budget, needles found, and answers, as small SVG files. Needs matplotlib; main thread only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]

COLOURS = {
    "mean": "#8c564b",
    "quest": "#ff7f0e",
    "arkvale": "#bcbd22",
    "runs4": "#1f77b4",
    "clusters7": "#2ca02c",
    "oracle": "#7f7f7f",
    "dense": "#000000",
}
LABELS = {
    "mean": "mean key",
    "quest": "Quest: bounds",
    "arkvale": "centre and deviation",
    "runs4": "4 runs, tail",
    "clusters7": "7 clusters, tail",
    "oracle": "best choice, no tail",
}


def write_plots(rows: Sequence[Row], directory: Path) -> list[Path]:
    """The plots that the rows allow, as sparse-*.svg."""
    losses = [row for row in rows if row["part"] == "loss"]
    shown = [
        name
        for name in ("trained", "synthetic needle, outliers in fast pairs", "synthetic topic, outliers in fast pairs")
        if any(row["samples"] == name for row in losses)
    ]
    written = [
        _write(directory / "sparse-error.svg", losses, shown, "error"),
        _write(directory / "sparse-needles.svg", losses, shown[:2], "needle_recall"),
    ]
    answers = [row for row in rows if row["part"] == "answers" and row["samples"] != "needle"]
    return [*written, _write_answers(directory / "sparse-answers.svg", answers)] if answers else written


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.4 * panels + 0.6, 3.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    return figure, list(axes)


def _save(figure: Figure, path: Path) -> Path:
    # Without the date, and with names that do not change, so that equal figures are equal files.
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "kvpool", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    return path


def _write(path: Path, losses: Sequence[Row], shown: Sequence[str], column: str) -> Path:
    """A panel for each kind of samples, a line for each way, by budget, at the greatest length."""
    tokens = max(row["tokens"] for row in losses)
    figure, axes = _figure(len(shown))
    for panel, samples in zip(axes, shown, strict=True):
        for method, label in LABELS.items():
            found = [
                row for row in losses if (row["samples"], row["method"], row["tokens"]) == (samples, method, tokens)
            ]
            points = [(100 * row["budget"], row[column]) for row in found if row[column] is not None]
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, color=COLOURS[method])
        panel.set_title(f"{samples}, {tokens} tokens".replace(", outliers", ",\noutliers"), fontsize=8)
        panel.set_xscale("log")
        panel.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        panel.set_xlabel("middle blocks recalled, %", fontsize=8)
        panel.set_ylim(0, None)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel({"error": "error of the output", "needle_recall": "needles found"}[column], fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7)
    return _save(figure, path)


def _write_answers(path: Path, answers: Sequence[Row]) -> Path:
    """A bar for each way and budget, a panel for each task, at the greatest length."""
    tokens = max(row["tokens"] for row in answers)
    tasks = list(dict.fromkeys(row["samples"] for row in answers))
    figure, axes = _figure(len(tasks))
    for panel, task in zip(axes, tasks, strict=True):
        found = [row for row in answers if row["samples"] == task and row["tokens"] == tokens]
        names = [row["method"] if row["method"] == "dense" else f"{row['method']} {row['budget']:.0%}" for row in found]
        panel.barh(names, [row["accuracy"] for row in found], color=[COLOURS[row["method"]] for row in found])
        panel.invert_yaxis()
        panel.set_xlim(0, 1)
        panel.set_title(f"{task}, {tokens} tokens, {found[0]['asked']} questions", fontsize=8)
        panel.set_xlabel("right answers", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3, axis="x")
    return _save(figure, path)
