"""Settings: the value of each option as it was written, and where: a line of the file, --set, an operator's order, or nowhere.

Pure functions and values; any thread.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT, OVERRIDE, ORDER = "default", "--set", "an operator's order"
_TABLE = re.compile(r"\s*\[\s*([\w\"'.\s-]+?)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([\w\"'.\s-]+?)\s*=")
_TEXT_MARKS = ('"' * 3, "'" * 3)


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an option: as its file, --set or the built-in defaults have it, and which of them."""

    value: Any
    source: str


def settings_of(
    defaults: Mapping[str, str], file: Mapping[str, Any], overrides: Mapping[str, Any], *, path: str | None, text: str
) -> dict[str, Setting]:
    """The setting of each option, by its name: an override, else the file's at `path`, with this `text`, else the default."""
    lines = lines_of(text)
    settings = {name: Setting(value, DEFAULT) for name, value in defaults.items()}
    for name, value in file.items():
        line = lines.get(name)
        settings[name] = Setting(value, f"{path}:{line}" if line else str(path))
    settings.update({name: Setting(value, OVERRIDE) for name, value in overrides.items()})
    return settings


def lines_of(text: str) -> dict[str, int]:
    """The line of each option in a valid TOML file, counted from 1. Options in inline tables have that of their table."""
    found: dict[str, int] = {}
    table, mark = "", ""
    for number, line in enumerate(text.split("\n"), 1):
        if mark:  # within a text of several lines
            mark = "" if line.count(mark) % 2 else mark
            continue
        header, key = _TABLE.fullmatch(line), _KEY.match(line)
        if header:
            table = _plain(header.group(1)) + "."
        elif key:
            found.setdefault(table + _plain(key.group(1)), number)
            _note_inline(line, table + _plain(key.group(1)), number, found)
        mark = next((one for one in _TEXT_MARKS if line.partition("#")[0].count(one) % 2), "")
    return found


def _note_inline(line: str, name: str, number: int, found: dict[str, int]) -> None:
    _, is_inline, entries = line.partition("{")
    for entry in re.findall(r"([\w-]+)\s*=", entries) if is_inline else ():
        found.setdefault(f"{name}.{entry}", number)


def _plain(name: str) -> str:
    """A key without quotes and spaces around its dots."""
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
