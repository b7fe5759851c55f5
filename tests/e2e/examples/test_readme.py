"""README's example as a program: on a miss, on a half-stored prompt, and on a hit."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs.daemon import Start, wait_connected

README = Path(__file__).parents[3] / "README.md"
SMALLER = {"layers=32": "layers=2", "kv_heads=8": "kv_heads=1", "head_dim=128": "head_dim=8", "tokens=256": "tokens=32"}
BLOCKS = 8


def test_the_example_runs_as_it_stands(start_daemon: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start_daemon()
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    source = found[1]
    monkeypatch.setenv("KVPOOL_SOCKET", daemon.socket)
    for large, small in SMALLER.items():
        assert large in source
        source = source.replace(large, small)
    connect = kv.connect

    def connect_and_wait(*arguments: Any, **options: Any) -> kv.Pool:
        pool = connect(*arguments, **options)
        wait_connected(pool)
        return pool

    monkeypatch.setattr(kv, "connect", connect_and_wait)
    chance = np.random.default_rng(1)
    first = [chance.integers(1, 1000, (2, BLOCKS, 16, 1, 8)).astype(np.uint16) for _ in range(2)]
    loaded: list[int] = []
    for chunks in (2, 4, 4):  # a miss, the half, all of it, of which a token is left to compute
        layers = [np.zeros_like(layer) for layer in first] if loaded else [layer.copy() for layer in first]
        names: dict[str, Any] = {
            "kv_layers": layers,
            "tokens": list(range(32 * chunks)),
            "block_ids": list(range(2 * chunks)),
        }
        exec(source, names)
        loaded.append(names["loaded"])
        names["pool"].close()
        for mine, made in zip(layers, first, strict=True):
            assert (mine[:, :4] == made[:, :4]).all()
    assert loaded == [0, 2, 3]
    assert daemon.problems() == []
