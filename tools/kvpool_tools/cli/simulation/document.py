"""Document of a simulation: the rows of each trace as they come, for people or for programs. Main thread of a command."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvpool import __version__
from kvpool_tools.bench.machine import describe_machine
from kvpool_tools.cli.output import print_json, writing
from kvpool_tools.cli.simulation.rows import Row


def simulate_each(
    given: Mapping[str, Any],
    simulate: Callable[[str, Progress], list[Row]],
    show: Callable[[list[Row]], None],
    *,
    command: str,
    is_json: bool,
) -> list[Row]:
    """The rows of the traces that TRACE_OPTIONS name, shown for each trace, or printed as one document at the end."""
    document: dict[str, Any] = {
        "command": command,
        "version": __version__,
        "machine": describe_machine(),
        "rows": [],
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    for path in given["traces"]:
        console = Console(stderr=True)
        with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as progress:
            rows = simulate(path, progress)
        document["rows"] += rows
        if not is_json:
            show(rows)
    if is_json:
        print_json(document)
    if given["out"] is not None:
        with writing(given["out"]):
            Path(given["out"]).write_text(json.dumps(document, indent=2) + "\n")
    return list(document["rows"])
