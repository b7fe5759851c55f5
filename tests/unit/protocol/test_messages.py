"""The records of the protocol: each kind of frame has one record, in any module."""

import importlib
import pkgutil
from collections import Counter
from typing import Any

import kvpool.protocol


def _records() -> list[type[Any]]:
    found = set()
    for module in pkgutil.walk_packages(kvpool.protocol.__path__, "kvpool.protocol."):
        found |= {value for value in vars(importlib.import_module(module.name)).values() if hasattr(value, "KIND")}
    return list(found)


def test_no_two_records_have_one_kind() -> None:
    records = _records()
    assert len(records) > 40
    assert [kind for kind, count in Counter(record.KIND for record in records).items() if count > 1] == []
