"""Modules of an engine that is not installed, in its place for as long as a test wants them."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType
from typing import Any


@contextmanager
def stand_in(contents: Mapping[str, Mapping[str, Any]], *importers: str) -> Iterator[None]:
    """Modules of these names and contents are importable, and the packages that they are in. The `importers`, kvpool's, are
    imported anew within the context, and are what they were before behind it."""
    names = dict.fromkeys(part for name in contents for part in accumulate(name.split("."), "{}.{}".format))
    before = {name: sys.modules.pop(name, None) for name in (*names, *importers)}
    for name in names:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents.get(name, {}))
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
