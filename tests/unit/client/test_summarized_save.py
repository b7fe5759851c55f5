"""Saves with summaries: the runs behind that of the KV begin in their order, once everything before them was copied."""

import threading
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.errors import DaemonUnreachable
from kvpool_client.copying.summarized_save import SummarizedSave, begin_summaries
from tests.rigs.daemon import SMALL

LAYOUT = replace(SMALL, head_dim=32, summaries="clusters7")
CHUNKS = 5


class Run:
    """A run that is as far as the test has it. Has the methods of `SaveRun` and of `SummaryRun`."""

    def __init__(self, extents: int, first: int = 0) -> None:
        self.sums = np.arange(CHUNKS * extents, dtype="<u4").reshape(CHUNKS, extents) + first
        self.announced: list[int] = []
        self.is_ready = self.was_cancelled = False
        self.done = 0

    def announce(self, layer: int) -> bool:
        self.announced.append(layer)
        return True

    def announce_all(self) -> None:
        self.announced.append(-1)

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s >= 0
        return self.is_ready or self.was_cancelled

    def is_cancelled(self) -> bool:
        return self.was_cancelled

    def progress(self) -> int:
        return self.done

    def checksums(self) -> bytes:
        return self.sums.tobytes()

    def copied_extents(self) -> int:
        return self.done

    def checksums_from(self, layer: int) -> bytes:
        return self.sums[:, layer : self.done].tobytes()

    def cancel(self) -> None:
        self.was_cancelled = True


class Setting:
    """A save with the KV's run and two behind it, as a save by copy has them."""

    def __init__(self) -> None:
        self.kv, self.built = Run(LAYOUT.layers), Run(LAYOUT.summary_extents, 1000)
        self.staged = Run(LAYOUT.summary_extents, 2000)
        self.begun: list[Run] = []
        further = [lambda run=run: self._begin(run) for run in (self.built, self.staged)]
        self.fault: Exception | None = None
        self.save = SummarizedSave(self.kv, further, LAYOUT)

    def _begin(self, run: Run) -> Run:
        if self.fault is not None:
            raise self.fault
        self.begun.append(run)
        return run


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_nothing_begins_before_every_layer_is_announced_and_copied(setting: Setting) -> None:
    setting.kv.is_ready = True
    for layer in range(LAYOUT.layers - 1):
        assert setting.save.announce(layer)
        assert setting.save.wait(0.0), "what was announced is copied"
    assert not setting.begun
    setting.kv.is_ready = False
    assert setting.save.announce(LAYOUT.layers - 1)
    assert not setting.save.wait(0.0)
    assert not setting.begun
    setting.kv.is_ready = True
    assert not setting.save.wait(0.0)
    assert setting.begun == [setting.built]
    assert setting.kv.announced == list(range(LAYOUT.layers))


def test_each_run_begins_once_after_the_one_before_it(setting: Setting) -> None:
    setting.save.announce_all()
    assert setting.kv.announced == [-1]
    setting.kv.is_ready = True
    assert not setting.save.wait(0.0)
    assert not setting.save.wait(0.0)
    assert setting.begun == [setting.built]
    setting.built.is_ready = True
    assert not setting.save.wait(0.0)
    assert setting.begun == [setting.built, setting.staged]
    setting.staged.is_ready = True
    assert setting.save.wait(0.0)
    assert not setting.save.is_cancelled()
    assert setting.begun == [setting.built, setting.staged]


def test_checksums_are_a_row_for_each_chunk_with_those_of_the_last_run_behind_the_layers(setting: Setting) -> None:
    setting.save.announce_all()
    for run in (setting.kv, setting.built, setting.staged):
        run.is_ready = True
    assert setting.save.wait(0.0)
    sums = np.frombuffer(setting.save.checksums(), "<u4").reshape(CHUNKS, LAYOUT.extents)
    assert np.array_equal(sums[:, : LAYOUT.layers], setting.kv.sums)
    assert np.array_equal(sums[:, LAYOUT.layers :], setting.staged.sums)


def test_progress_counts_all_runs_and_layers_are_the_kvs(setting: Setting) -> None:
    setting.save.announce_all()
    setting.kv.is_ready = True
    setting.kv.done, setting.built.done = 2, 30
    assert setting.save.progress() == 2
    setting.save.wait(0.0)
    assert setting.save.progress() == 32
    assert setting.save.copied_extents() == 2
    assert setting.save.checksums_from(1) == setting.kv.checksums_from(1)


def test_a_cancelled_save_begins_nothing_and_cancels_what_runs(setting: Setting) -> None:
    setting.save.announce_all()
    setting.kv.is_ready = True
    setting.save.wait(0.0)
    setting.save.cancel()
    assert setting.kv.was_cancelled
    assert setting.built.was_cancelled
    assert setting.save.is_cancelled()
    assert setting.save.wait(0.0), "nobody waits for it"
    assert setting.begun == [setting.built]


@pytest.mark.parametrize("failing", ["kv", "built"])
def test_what_ends_without_its_bytes_ends_the_save(setting: Setting, failing: str) -> None:
    setting.save.announce_all()
    setting.kv.is_ready = True
    setting.save.wait(0.0)
    getattr(setting, failing).was_cancelled = True
    assert setting.save.wait(0.0)
    assert setting.save.is_cancelled()
    assert setting.staged not in setting.begun


@pytest.mark.parametrize("fault", [ValueError("outside"), DaemonUnreachable("away")])
def test_summaries_that_cannot_begin_end_the_save(setting: Setting, fault: Exception) -> None:
    setting.fault = fault
    setting.save.announce_all()
    setting.kv.is_ready = True
    assert setting.save.wait(0.0)
    assert setting.save.is_cancelled()


def test_a_save_cancelled_while_somebody_waits_ends_all_that_was_begun(setting: Setting) -> None:
    setting.save.announce_all()
    setting.kv.is_ready = True
    waiter = threading.Thread(target=setting.save.wait, args=(5.0,))
    waiter.start()
    setting.save.cancel()
    waiter.join()
    assert all(run.was_cancelled for run in setting.begun)


def test_the_native_threads_get_the_whole_geometry() -> None:
    given: dict[str, Any] = {}

    class Threads:
        def summarize(self, arena: object, offsets: bytes, target: object, **geometry: object) -> Run:
            given.update(geometry, arena=arena, offsets=offsets, target=target)
            return Run(1)

    layout = kv.Layout(layers=3, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=192, summaries="mean")
    offsets = np.array([4096, 8192], "<u8")
    begin_summaries(cast(Any, Threads()), cast(Any, "arena"), layout, offsets=offsets, target=None)
    assert given == {
        "arena": "arena",
        "offsets": offsets.tobytes(),
        "target": None,
        "form": "mean",
        "dtype": "float16",
        "head_dim": 64,
        "kv_heads": 2,
        "layers": 3,
        "layer_bytes": layout.layer_bytes,
        "chunk_tokens": 192,
        "block_tokens": 64,
        "extents": 1,
    }
