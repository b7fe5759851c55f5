"""More chunk sizes and models than a daemon serves at a time, over flushes and restarts: no engine is refused for ever."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.index.namespaces import NAMESPACES_MAX, SIZE_CLASSES_MAX
from tests.hostile.rigs.raw_clients import engine, keys_of, read_back, store
from tests.rigs.daemon import SMALL, Daemon, wait_connected, wait_until

LAYOUTS = [
    replace(SMALL, layers=1 + number % 8, chunk_tokens=1 + number // 8) for number in range(SIZE_CLASSES_MAX + 1)
]


def save(daemon: Daemon, layout: kv.Layout, model: str) -> bool:
    """True if one chunk of a model is or can be stored."""
    with daemon.connect(layout, model=model, timeout_s=20.0) as pool:
        wait_connected(pool)
        keys = pool.keys(list(range(layout.chunk_tokens)))
        return not pool.save(keys, from_=payload_of(layout)).commit().declined


def save_and_load(daemon: Daemon, layout: kv.Layout, model: str) -> bool:
    """The same, and it loads with the right bytes."""
    if not save(daemon, layout, model):
        return False
    with daemon.connect(layout, model=model, timeout_s=20.0) as pool:
        wait_connected(pool)
        found = np.zeros((1, layout.chunk_bytes), np.uint8)
        with pool.acquire(pool.lookup(pool.keys(list(range(layout.chunk_tokens))))) as lease:
            return pool.load(lease, into=found).wait().chunks == 1 and bool((found == payload_of(layout)).all())


def payload_of(layout: kv.Layout) -> np.ndarray:
    return np.full((1, layout.chunk_bytes), layout.chunk_bytes % 251, np.uint8)


def test_chunk_sizes_are_given_back_by_a_flush_and_over_restarts(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    small = {"dram__segment": "64KiB", "ssd__segment": "64KiB"}
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="32MiB", **small)
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    for number, layout in enumerate(LAYOUTS[:-1]):
        assert save(daemon, layout, f"model-{number}")
    daemon.stop()
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open again")
    assert daemon.stats()["namespaces"] == SIZE_CLASSES_MAX  # each has a chunk on disk
    with pytest.raises(Refused, match="flush --model"):
        engine(daemon, LAYOUTS[-1], "one more")
    with daemon.connect(LAYOUTS[-1], model="one more") as waiting:  # never an exception in an engine
        assert waiting.lookup(waiting.keys(list(range(99)))).chunks == 0
        with daemon.admin() as admin:
            admin.flush("model-7", None, "")
        wait_connected(waiting)
    assert save_and_load(daemon, LAYOUTS[-1], "one more")
    assert save_and_load(daemon, LAYOUTS[3], "model-3")
    assert daemon.problems() == []


def test_models_without_chunks_are_not_restored_by_a_restart(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    for model in ("stays", "goes"):
        with engine(daemon, SMALL, model) as one, daemon.admin() as admin:
            store(one, keys_of(1 if model == "stays" else 10, 3))
            assert admin.demote_all(60.0)["left"] == 0
    with daemon.admin() as admin:
        admin.flush("goes", None, "")
    assert daemon.stats()["namespaces"] == 2
    daemon.stop()
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open again")
    assert daemon.stats()["namespaces"] == 1


def test_models_beyond_the_bound_replace_models_without_chunks(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    wide = replace(SMALL, rank=None, world=1024)
    with engine(daemon, SMALL, "mine") as mine:
        store(mine, keys_of(1, 3))
        for number in range(2 * NAMESPACES_MAX // wide.world):
            engine(daemon, wide, f"model-{number}").close()
        assert daemon.stats()["namespaces"] <= NAMESPACES_MAX
        assert read_back(mine, keys_of(1, 3)) == [True] * 3
    assert daemon.problems() == []
