"""Weights in files whose reading waits: as if another process of this user were reading them, until `release`."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpool.clock import NS_PER_S, wall_time_s
from kvpool_client.engines import weights, weights_reading
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.file_stamps import stamps_of


class HeldWeights:
    """A directory with one file of weights. `path`: for an engine's arguments."""

    def __init__(self, place: Path, content: bytes) -> None:
        self.file = place / "model.safetensors"
        self._held = ExitStack()
        place.mkdir()
        self.file.write_bytes(content)
        (place / "config.json").write_text("{}")
        self.path = str(place)

    def hold(self) -> None:
        """From now on readings wait."""
        memory = DigestMemory.of_user(os.environ)
        for stamp in stamps_of(self.file.parent).values():
            self._held.enter_context(memory.turn(stamp, threading.Event()))

    def release(self) -> None:
        """Readings go on."""
        self._held.close()

    def let_begin(self, engine: Any) -> None:
        """A scripted engine of vLLM's begins with the pool, in a step of its own."""
        self.release()
        (reading,) = engine.scheduler._late.name.revision.readings
        assert reading.wait(60)
        engine.step()


@pytest.fixture
def begun_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """See begin_now."""
    begin_now(monkeypatch)


def begin_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine's process begins with its connector: what a test has written before is older."""
    monkeypatch.setattr(weights, "process_began_ns", lambda: int(wall_time_s() * NS_PER_S))


@pytest.fixture
def held_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[HeldWeights]:
    """Weights of this test's own, whose reading waits; no engine's start waits for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "START_WAIT_S", 0.0)
    monkeypatch.setattr(weights_reading, "keeps_times", lambda _: True)
    begin_now(monkeypatch)
    held = HeldWeights(tmp_path / "weights", request.node.nodeid.encode())
    held.hold()
    yield held
    held.release()
