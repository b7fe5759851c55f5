"""Link: one that cannot be made leaves nothing behind."""

import os
import threading
from pathlib import Path

import pytest

from kvpool_client import connect
from tests.rigs.tiers.tiered_pool import LAYOUT


def test_a_pool_for_which_no_thread_is_left_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            connect(tmp_path / "none.sock", model="model", revision="1", layout=LAYOUT)
    assert len(os.listdir("/proc/self/fd")) == before
