"""A module that is imported when a test first uses it.

Every process of a run collects all tests, and the import of transformers takes seconds.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class LateModule:
    """In a module's place, with its names. `needs`: a package without which the tests of the file are skipped."""

    def __init__(self, name: str, *, needs: str) -> None:
        if find_spec(needs) is None:
            pytest.skip(f"{name} needs {needs}: pip install kvpool[demo]", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
