"""Plain reading of runs: every word once, whoever reads it."""

import numpy as np
import pytest

import kvpool_native

RUNS, RUN_BYTES = 7, 768


@pytest.mark.parametrize("threads", [1, 3])
def test_the_sum_is_that_of_all_words(threads: int) -> None:
    words = np.random.default_rng(1).integers(0, 1 << 64, (RUNS, RUN_BYTES // 8), dtype=np.uint64)
    runs = np.uint64(words.ctypes.data) + np.arange(RUNS, dtype=np.uint64) * np.uint64(RUN_BYTES)
    team = kvpool_native.WorkerTeam(threads)
    assert kvpool_native.read_plainly(team, runs, run_bytes=RUN_BYTES) == int(words.sum())
    assert kvpool_native.read_plainly(team, runs[:0], run_bytes=RUN_BYTES) == 0
    assert kvpool_native.read_plainly(team, runs, run_bytes=0) == 0


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        kvpool_native.read_plainly(kvpool_native.WorkerTeam(1), np.zeros(0, np.uint64), run_bytes=8)
