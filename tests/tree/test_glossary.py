"""The glossary, docs/glossary.md, as a test: the words that it refuses are in no name, message, docstring or page."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.rigs.runs.for_each import for_each
from tests.tree.test_tidy import NATIVE, PAGES, PRODUCT, PYTHON, ROOT

# This file names the refused words as its examples.
OTHERS = [path for path in PYTHON if path not in PRODUCT and path != Path(__file__)]
GLOSSARY = ROOT / "docs" / "glossary.md"
CONFIGS = [ROOT / "configs" / "kvpool.toml"]


def _refused() -> list[str]:
    """The last column of the glossary's table."""
    rows = [row.strip("|").split("|") for row in GLOSSARY.read_text().splitlines() if row.startswith("| ")]
    return [word.strip() for row in rows[1:] for word in row[2].split(",") if word.strip()]


@cache
def _pattern() -> re.Pattern[str]:
    words = (re.escape(word).replace(r"\ ", r"[\s#/*_-]+") for word in _refused())
    return re.compile(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])", re.IGNORECASE)


def _found(text: str) -> list[str]:
    """Refused words in a text: as words, and as parts of names."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    return sorted({match.lower() for match in _pattern().findall(parts)})


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@for_each([path for path in (*PRODUCT, *OTHERS, *NATIVE, *PAGES, *CONFIGS) if path != GLOSSARY], _name)
def test_the_glossarys_words_are_used(path: Path) -> None:
    assert not (found := _found(path.read_text())), f"has {', '.join(found)}: see docs/glossary.md"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def wishes_of(", ["wishes"]),
        ("class RequestWishes:", ["wishes"]),
        ("# what gave\n    # way below", ["gave way"]),
        ('"events.fates": len(self)', ["fates"]),
        ("a border", ["border"]),
        ("the sender of hints", []),
    ],
)
def test_refused_words_are_found_in_names_and_prose(text: str, found: list[str]) -> None:
    assert [" ".join(re.findall(r"[a-z]+", word)) for word in _found(text)] == found
