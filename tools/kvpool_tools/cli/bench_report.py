"""Report of `kvpoolctl bench`: rows under a progress bar, as a table for people or a JSON document. Main thread only."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvpool import __version__
from kvpool.config.path_options import check_writable
from kvpool_tools.bench.compare import SLOWER, TIMES, Earlier, Terms
from kvpool_tools.bench.machine import describe_machine
from kvpool_tools.cli.kvpoolctl import Options
from kvpool_tools.cli.output import print_json, print_table, writing

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of every benchmark."""

    is_quick: bool
    out: str | None
    against: str | None


# Called once for each step done, with the number of steps there are.
Advance = Callable[[int], None]


class Report:
    """Rows as they are measured: printed at once, or collected for the JSON document. Invariant: `rows` holds all of them,
    `notes` all remarks, and `compared` the figures that were compared with those of an earlier document."""

    def __init__(self, options: Options, command: str, asked: Asked, terms: Terms = TIMES) -> None:
        """Raises InvalidArgument for an earlier document that is none."""
        self.rows: list[Row] = []
        self.compared: list[Row] = []
        self.notes: list[str] = []
        self._is_json = options.is_json
        self._command = command
        self._asked = asked
        # Before anything is measured: the load shown is that of other processes, and a file that cannot be written is found
        # early.
        self.machine = describe_machine()
        if asked.out is not None:
            check_writable("--out", Path(asked.out))
        self._earlier: Earlier | None = None
        if asked.against is not None:
            self._earlier = Earlier(asked.against, terms, self.machine, is_quick=asked.is_quick)
            if self._earlier.fault:
                self.note_remark(f"nothing is compared with {asked.against}: {self._earlier.fault}")

    def measure(self, name: str, title: str, run: Callable[[Advance], Sequence[Row]]) -> None:
        """Run one kind under a progress bar, and print its rows."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, *times, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"bench {name}", total=None)
            rows = list(run(lambda total: progress.update(task, advance=1, total=total)))
        self.rows += rows
        if not self._is_json:
            print_table(f"{name}: {title}", [_readable(row) for row in rows])
        compared = self._earlier.compare(rows) if self._earlier else []
        self.compared += compared
        self._print_compared(f"{name}: compared with {self._asked.against}", compared)

    @property
    def slower(self) -> list[Row]:
        """Figures that got slower."""
        return [row for row in self.compared if row["verdict"] == SLOWER]

    def note_remark(self, text: str) -> None:
        """Print a remark that is no figure."""
        self.notes.append(text)
        click.echo(text, err=self._is_json)

    def finish(self) -> None:
        """Write the document where it was asked for, and say what got slower."""
        document = {
            "command": f"bench {self._command}",
            "version": __version__,
            "is_quick": self._asked.is_quick,
            "machine": self.machine,
            "rows": self.rows,
            "notes": self.notes,
            "compared": self.compared,
        }
        if self._is_json:
            print_json(document)
        if self._asked.out is not None:
            with writing(self._asked.out):
                Path(self._asked.out).write_text(json.dumps(document, indent=2) + "\n")
        self._print_compared("slower", self.slower)

    def _print_compared(self, title: str, rows: Sequence[Row]) -> None:
        if rows and not self._is_json:
            print_table(title, rows)


def _readable(row: Row) -> Row:
    """A row for people: spreads as `low..high`, counts by reason as words; keys of wrong chunks are shortened."""
    readable = {}
    for name, value in row.items():
        if "spread" in name:
            value = f"{value[0]:g}..{value[1]:g}"
        elif isinstance(value, dict):
            value = ", ".join(f"{count} {reason}" for reason, count in value.items()) or "none"
        if name != "wrong_keys":
            readable[name] = value
    return readable
