"""Functions that ARCHITECTURE.md names in its paths through the code: each exists, in the file named beside it."""

import ast
import re
from pathlib import Path

from tests.tree.test_tidy import ROOT, text_of


def _is_defined(name: str, path: Path) -> bool:
    """True if a file defines `Class.method` (Python) or `Class::method` (C++)."""
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


def test_functions_named_in_architecture_exist() -> None:
    steps = re.findall(r"`([\w.:]+)` in `([\w/.]+)`", text_of(ROOT / "ARCHITECTURE.md"))
    assert len(steps) >= 30, "the paths of a save, a load, a promotion, a demotion and an eviction"
    missing = [f"{name} in {path}" for name, path in steps if not _is_defined(name, ROOT / path)]
    assert not missing, f"ARCHITECTURE.md names what is not there: {missing}"
    assert not _is_defined("Pool.none", ROOT / "kvpool/pool/pool.py")
    assert not _is_defined("Directory::none", ROOT / "native/directory/directory.cpp")
