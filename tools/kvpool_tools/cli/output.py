"""Output of commands: JSON for machines, aligned names and tables for people, errors with the next step.

Nothing here talks to a daemon. Main thread of a command only.
"""

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from kvpool.escaping import escaped
from kvpool.units import format_size

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
COLUMNS_MAX = 7
PLAIN_WIDTH = 176
_UNBOUNDED_WIDTH = 10_000


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_line(text: str) -> None:
    """One line on standard output; names in it are escaped."""
    click.echo(escaped(text))


def print_section(name: str, values: Mapping[str, object], *, is_readable: bool = False) -> None:
    """`# Section` and one `name:value` line for each value.

    Readable: after each size in bytes a line `…_human` repeats it with a unit.
    """
    sys.stdout.write(f"# {name.capitalize()}\n")
    for key, value in values.items():
        sys.stdout.write(f"{escaped(key)}:{_plain(value)}\n")
        if is_readable and key.endswith("_bytes") and isinstance(value, int):
            sys.stdout.write(f"{escaped(key.removesuffix('_bytes'))}_human:{format_size(value)}\n")


def print_table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    columns_max: int = COLUMNS_MAX,
    words: Collection[str] = (),
) -> None:
    """A table that aligns: a column for each key, or a line where keys are more than `columns_max` and more than rows.

    To the left are columns whose first value is a word, and those that `words` names."""
    from rich.console import Console  # with tables, a third of the time of a command that prints none
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    keys = list(rows[0])
    table = Table(title=title, title_justify="left")
    if len(keys) > max(columns_max, len(rows)):
        table.add_column(keys[0])
        for row in rows:
            table.add_column(Text(_plain(row[keys[0]])), justify="right")
        for key in keys[1:]:
            table.add_row(Text(key), *(Text(_plain(row[key])) for row in rows))
    else:
        for key in keys:
            table.add_column(key, justify="left" if key in words or _is_word(rows[0][key]) else "right")
        for row in rows:
            table.add_row(*(Text(_plain(row[key])) for key in keys))
    shown = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    natural = Measurement.get(shown, shown.options.update(width=_UNBOUNDED_WIDTH), table).maximum
    # Lines that a narrow terminal folds can be read, and columns that are cut cannot.
    whole = Console(width=max(shown.width, natural), height=shown.height)
    whole.print(table, soft_wrap=True)


def fail(message: str, code: int) -> NoReturn:
    """Print on standard error what failed, and end with the exit code."""
    sys.stderr.write(f"kvpoolctl: {escaped(message)}\n")
    sys.exit(code)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Encloses what writes a file; ends the command where that fails, as on a full disk."""
    try:
        yield
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}", EXIT_FAILURE)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.lstrip("+-")[:1].isalpha()


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ",".join(f"{escaped(str(key))}={_plain(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(escaped(str(entry)) for entry in value)
    return escaped(str(value))
