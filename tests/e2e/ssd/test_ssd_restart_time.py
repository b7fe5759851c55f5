"""A restart over a large catalogue: socket and DRAM at once, the SSD tier's index within two seconds a million chunks.

The quick case has 60,000 records, the campaign's a million, all real: written by the catalogue, read by a fresh daemon.
"""

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.rigs.daemon import Daemon, Start
from tests.rigs.large_catalogue import CHAIN, TINY, add_records, tier_for
from tests.rigs.payload import store, tokens_of

READY_S = 1.0
INDEX_S_PER_MILLION = 2.0
# The fixed part of any tier: a process for the check, files to open, the first checkpoint.
INDEX_S = 1.0
# Where two programs share a core each takes about half as much CPU time again for the same work.
SHARED_CORE = 1.5
# The machine is shared: the best of so many counts.
LIVES = 3


def _time_of_start(daemon: Daemon) -> tuple[float, float, float]:
    """Seconds from exec until the socket answers, until the tier's index is there, and of CPU by then."""
    began = time.monotonic()
    daemon.start()
    ready_s = time.monotonic() - began
    daemon.wait_open()
    index_s = time.monotonic() - began
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return ready_s, index_s, sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _is_quick(life: tuple[float, float, float], count: int) -> bool:
    """By the clock; on a machine that others keep busy by the CPU's, which counts the child that reads the catalogue too."""
    ready_s, index_s, cpu_s = life
    bound_s = INDEX_S + INDEX_S_PER_MILLION * count / 1e6
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    return (ready_s <= READY_S and index_s <= bound_s) or (is_busy and cpu_s <= SHARED_CORE * bound_s)


@pytest.mark.timed
@pytest.mark.parametrize("count", [60_000, pytest.param(1_000_000, marks=pytest.mark.campaign)])
def test_a_restart_is_as_quick_as_promised(start_tiered: Start, tmp_path: Path, count: int) -> None:
    options = tier_for(count)
    capacity = int(options["ssd__capacity"].removesuffix("B"))
    if shutil.disk_usage(tmp_path).free < capacity + (1 << 30):
        pytest.skip(f"{capacity >> 20} MiB are needed below {tmp_path}")
    daemon = start_tiered(**options)
    with daemon.connect(layout=TINY) as pool, daemon.admin() as admin:
        keys = pool.keys(tokens_of(1, CHAIN * TINY.chunk_tokens))
        store(pool, keys)
        assert admin.demote_all(10.0)["chunks"] == CHAIN
    assert daemon.stop() == 0
    add_records(tmp_path / "ssd", count)

    lives = []
    for _ in range(LIVES):
        lives.append(_time_of_start(daemon))
        assert daemon.stats()["ssd.chunks"] == count + CHAIN
        if _is_quick(lives[-1], count):
            break
        if len(lives) < LIVES:
            daemon.kill()
    for ready_s, index_s, cpu_s in lives:
        print(f"{count} records: ready {ready_s:.2f} s, index {index_s:.2f} s after exec, {cpu_s:.2f} s of CPU")
    assert any(_is_quick(life, count) for life in lives)
    with daemon.connect(layout=TINY) as pool:
        assert pool.lookup(pool.keys(tokens_of(1, CHAIN * TINY.chunk_tokens))).chunks == CHAIN
    assert daemon.problems(deep=False) == []
