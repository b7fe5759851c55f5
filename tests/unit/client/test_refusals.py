"""Refusals counted in the engine's own metrics: once each, also those from before the registry existed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.engines.refusals import REASONS_MAX, Refusals


class Registry:
    """As `prometheus_client`, as far as it is used."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], int] = {}
        self.made = 0

    def Counter(self, _name: str, _help: str, _labels: list[str]) -> Any:
        self.made += 1
        return self

    def labels(self, *values: str) -> Any:
        return SimpleNamespace(inc=lambda amount: self._add(values, amount))

    def _add(self, values: tuple[str, ...], amount: int) -> None:
        self.values[values] = self.values.get(values, 0) + amount


def test_refusals_before_the_engine_had_a_registry_are_shown_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    refusals = Refusals("trtllm")
    refusals.count("layout: two groups")
    refusals.count("layout: two groups")
    refusals.show()
    registry = Registry()
    monkeypatch.setitem(sys.modules, "prometheus_client", registry)
    refusals.show()
    refusals.show()
    assert registry.values == {("trtllm", "layout"): 2}
    refusals.count("salt", 3)
    assert registry.values == {("trtllm", "layout"): 2, ("trtllm", "salt"): 3}
    assert registry.made == 1
    assert refusals.counts() == {"refused_layout": 2, "refused_salt": 3}


def test_no_refusal_names_more_reasons_than_are_counted() -> None:
    refusals = Refusals("sglang")
    for number in range(REASONS_MAX + 5):
        refusals.count(f"reason-{number}")
    assert refusals.counts()["refused_other"] == 5


def test_the_library_is_loaded_only_where_the_engine_collects_from_files(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    script = (
        "import os, sys; from kvpool_client.engines.refusals import Refusals\n"
        "for folder in ('', sys.argv[1]):\n"
        "    os.environ['PROMETHEUS_MULTIPROC_DIR'] = folder\n"
        "    Refusals('trtllm').count('layout')\n"
        "    print('prometheus_client' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert any(b"kvpool_engine_refused" in path.read_bytes() for path in tmp_path.iterdir())
