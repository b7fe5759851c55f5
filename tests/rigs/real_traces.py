"""The place of the published traces, for tests that want real ones: the folder in KVPOOL_TRACES, or one beside the tree."""

import os
from pathlib import Path

import pytest

from kvpool_tools.sim.traces import SUFFIXES


def real_traces() -> Path | None:
    """The folder with the traces; None where there is none."""
    root = Path(__file__).parents[2]
    named = os.environ.get("KVPOOL_TRACES")
    folder = Path(named) if named else root.parent / "shared" / "traces"
    has_some = folder.is_dir() and any(entry.name.endswith(SUFFIXES) for entry in folder.iterdir())
    return folder if has_some else None


def real_trace(name: str) -> Path:
    """One of the published traces by its file's name; skips the test where it is not there."""
    folder = real_traces()
    if folder is None or not (folder / name).is_file():
        pytest.skip(f"{name} is not there: name the folder of the traces by KVPOOL_TRACES")
    return folder / name
