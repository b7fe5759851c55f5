"""A module that needs transformers, imported when a test first uses it.

Every process of a run collects all tests, and the import of transformers takes seconds.
"""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class LateModule:
    """In a module's place, with its public names. Without transformers the tests of the file are skipped."""

    def __init__(self, name: str) -> None:
        if find_spec("transformers") is None:
            pytest.skip("needs the demo extra: pip install kvpool[demo]", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # Pytest asks whatever it collects for its own marks.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
