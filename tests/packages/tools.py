"""Programs that others keep, for reading what is in dist/: they live in build/packages/check-tools, pinned by
packaging/check-tools.txt."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.packages.roots import TREE

TOOLS = TREE / "build/packages/check-tools/bin"
TOOL_S = 120


def tool(name: str) -> Path:
    """The path of a program. Raises AssertionError where it is not there."""
    path = TOOLS / name
    assert path.exists(), f"no {path}: make test-packages installs packaging/check-tools.txt"
    return path


def ask(script: str, question: Any = None) -> Any:
    """The JSON that a Python script of the tools writes, given another as `question`."""
    ended = subprocess.run(
        [str(tool("python")), "-c", f"import json, sys\nquestion = json.load(sys.stdin)\n{script}"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=TOOL_S,
    )
    assert ended.returncode == 0, f"exit code {ended.returncode} of:\n{script}\nwhich wrote:\n{ended.stderr}"
    return json.loads(ended.stdout)
