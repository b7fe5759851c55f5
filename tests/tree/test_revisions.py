"""Revisions in what users copy: every `connect` of documents, examples and our own programs names the weights."""

import re
from collections.abc import Iterator

from tests.tree.test_tidy import ROOT, name_of, text_of

CONNECT = re.compile(r"\b(?:kv|kvpool_client)\.connect\(")
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOLDERS = ("kvpool", "client", "tools", "studies", "demo", "examples", "packaging", "benchmarks", "docs")


def _calls(text: str) -> Iterator[str]:
    """Each call of `connect`, up to its closing parenthesis."""
    for found in CONNECT.finditer(text):
        depth, end = 1, found.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield text[found.start() : end]


def _texts() -> Iterator[tuple[str, str]]:
    """The text of each program, and the listings of each document."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield name_of(path), text_of(path)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield name_of(path), "\n".join(FENCE.findall(text_of(path)))


def test_what_users_copy_connects_with_a_revision() -> None:
    calls = [(name, call) for name, text in _texts() for call in _calls(text)]
    assert len(calls) >= 20
    unnamed = [f"{name}: {call}" for name, call in calls if "revision=" not in call]
    assert not unnamed, f"a new checkpoint would get the KV of the old one: {unnamed}"
