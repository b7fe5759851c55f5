"""Names that must be right: functions that ARCHITECTURE.md passes by, and kinds of tiers in their own rooms alone."""

import ast
import re
from pathlib import Path

import pytest

from tests.test_tidy import PRODUCT, ROOT, name_of, nodes_of, text_of


def _is_defined(name: str, path: Path) -> bool:
    """Whether a file defines `Class.method` (Python) or `Class::method` (C++)."""
    if path.suffix != ".py":
        return (
            path.exists()
            and re.search(rf"^[\w<>:,&* \[\]]*\b{re.escape(name)}\(", text_of(path), re.MULTILINE) is not None
        )
    body: list[ast.stmt] = list(ast.parse(text_of(path)).body) if path.exists() else []
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == part
        ]
        if not found:
            return False
        body = found[0].body
    return True


# Where a kind of tier may be named: its own rooms, its options and where they are set, its place in the composition, and names
# that are public: levels, events, metrics, failpoints, commands.
SSD_NAMED_IN = (
    "kvpool/tiers/ssd/",
    "kvpool/config/",
    "kvpool/bench/",
    "kvpool/cli/",
    "kvpool/sim/",
    "kvpool/pool/lower_tiers.py",
    "kvpool/types.py",
    "kvpool/protocol/verify_walk.py",
    "kvpool/router_events/vllm_format.py",
    "kvpool/server/metrics/definitions.py",
    "kvpool/server/reload.py",
    "kvpool/failpoint.py",
)


@pytest.mark.parametrize("path", [path for path in PRODUCT if path.is_relative_to(ROOT / "kvpool")], ids=name_of)
def test_a_kind_of_tier_is_named_in_its_own_rooms_alone(path: Path) -> None:
    """Everybody else is written against `tiers/base.py`: no identifier and no string, but for docstrings."""
    if name_of(path).startswith(SSD_NAMED_IN):
        pytest.skip("a tier is at home here")
    docstrings = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    for node in nodes_of(path):
        said = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module", "asname")]
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            said.append(node.value)
        named = [word for word in said if isinstance(word, str) and "ssd" in word.lower()]
        assert not named, f"names {named[0]!r} in line {getattr(node, 'lineno', 0)}"


def test_the_ways_through_the_house_name_what_is_there() -> None:
    steps = re.findall(r"`([\w.:]+)` in `([\w/.]+)`", text_of(ROOT / "ARCHITECTURE.md"))
    assert len(steps) >= 30, "the ways of a save, a load, a promotion, a demotion and an eviction"
    missing = [f"{name} in {path}" for name, path in steps if not _is_defined(name, ROOT / path)]
    assert not missing, f"ARCHITECTURE.md names what is not there: {missing}"
    assert not _is_defined("Pool.none", ROOT / "kvpool/pool/pool.py")
    assert not _is_defined("Directory::none", ROOT / "native/directory/directory.cpp")
