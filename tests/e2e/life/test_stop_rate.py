"""Time that a stop under load takes, against the disk's own rate: eight engines save, SIGTERM, and DRAM is demoted.

Small in the suite, as a bound that one of three lives must keep: other users of the disk slow lives down, and
never speed one up. With KVPOOL_CAMPAIGN=1 five times over a larger DRAM, as a figure.
"""

import itertools
import os
import re
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_tools.bench.disk import RawFile, aligned_bytes, file_system
from kvpool_tools.bench.measure import cpu_seconds
from tests.conftest import CAMPAIGN_LINE
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import chunk_bytes_of, store, tokens_of

pytestmark = pytest.mark.timed

IS_CAMPAIGN = os.environ.get("KVPOOL_CAMPAIGN", "") not in ("", "0")
LIVES = 5 if IS_CAMPAIGN else 3
DRAM_MIB = 1024 if IS_CAMPAIGN else 192
ENGINES = 8
CHUNKS = 4  # of a prompt
LAYOUT = kv.Layout(layers=8, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=64)
STOP_TIMEOUT_S = 1.0
RAW_DEPTH = 8
# The time that a busy machine adds to a process's end, and the change of a shared disk's rate between measurements.
SLACK_S, DISK_SWING = 3.0, 2.0
# Of a life: its tier, the raw file beside it, and what a tier leaves free on a disk.
DISK_MIB = DRAM_MIB + DRAM_MIB // 4
ROOM_BYTES = 2 * (DISK_MIB << 20) + (2 << 30)
# No bound: after so long the disk has failed, and the test with it.
LONG_S = 120.0


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop: the demoted bytes, seconds from SIGTERM to the exit, CPU seconds, and the raw rate right after it."""

    bytes: int
    seconds: float
    cpu_seconds: float
    raw_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """The stop's own rate."""
        return self.bytes / self.seconds

    @property
    def ratio(self) -> float:
        """The share of the raw rate."""
        return self.bytes_per_s / self.raw_bytes_per_s

    @property
    def is_in_time(self) -> bool:
        """True if it took no longer than the disk needs at the raw rate."""
        disk_s = DISK_SWING * self.bytes / self.raw_bytes_per_s
        return self.seconds <= STOP_TIMEOUT_S + disk_s + SLACK_S


class Engine(threading.Thread):
    """Saves prompt after prompt until the daemon stops."""

    def __init__(self, daemon: Daemon, number: int) -> None:
        super().__init__()
        self._daemon, self._number = daemon, number

    def run(self) -> None:
        with self._daemon.connect(LAYOUT) as pool:
            for prompt in itertools.count():
                keys = pool.keys(tokens_of(1_000_000 * self._number + prompt, CHUNKS * LAYOUT.chunk_tokens))
                if {"stopping", "disconnected"} & set(store(pool, keys).reasons):
                    return


def _raw_bytes_per_s(folder: Path, count: int) -> float:
    """The disk's time to write and sync as many chunks into allocated room."""
    raw = RawFile(folder / "raw", LAYOUT.chunk_bytes, count, RAW_DEPTH)
    try:
        source = aligned_bytes(count * LAYOUT.chunk_bytes).reshape(count, LAYOUT.chunk_bytes)
        source[:] = chunk_bytes_of(bytes(16), LAYOUT.chunk_bytes)
        source[:, 0] = np.arange(count) % 251
        return source.nbytes / raw.write(source, is_synced=True)
    finally:
        raw.close()


def _cpu_seconds_of_children() -> float:
    """CPU time of the processes of this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _stop_under_load(daemon: Daemon, folder: Path, first_engine: int) -> Stop:
    engines = [Engine(daemon, first_engine + number) for number in range(ENGINES)]
    for one in engines:
        one.start()
    full = int(0.8 * (DRAM_MIB << 20) / LAYOUT.chunk_bytes)
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) >= full, "DRAM is nearly full", LONG_S)
    assert daemon.process is not None
    ended_before_s, used_before_s = _cpu_seconds_of_children(), cpu_seconds(daemon.process.pid)
    began_s = time.perf_counter()
    assert daemon.stop(LONG_S) == 0, daemon.log()
    seconds = time.perf_counter() - began_s
    used_s = _cpu_seconds_of_children() - ended_before_s - used_before_s
    for one in engines:
        one.join()
    written, dropped, durable = re.findall(r"(\d+) chunks written down, (\d+) dropped .* durable: (\w+)", daemon.log())[
        -1
    ]
    assert (dropped, durable) == ("0", "yes")
    return Stop(int(written) * LAYOUT.chunk_bytes, seconds, used_s, _raw_bytes_per_s(folder, int(written)))


def test_a_stop_under_load_takes_no_longer_than_the_disk_needs_for_its_bytes(
    start_daemon: Callable[..., Daemon], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("the tests' folder is memory and no disk: name another with --basetemp")
    if (free := shutil.disk_usage(tmp_path).free) < ROOM_BYTES:
        pytest.skip(f"the tests' disk has {free >> 20} MiB free, expected {ROOM_BYTES >> 20}")
    daemon = start_daemon(
        dram__capacity=f"{DRAM_MIB}MiB",
        ssd__path=str(tmp_path / "ssd"),
        ssd__capacity=f"{DISK_MIB}MiB",
        ssd__watermark="1",  # nothing is demoted before the stop
        ssd__stall_timeout=f"{LONG_S}s",
        server__stop_timeout=f"{STOP_TIMEOUT_S}s",
    )
    stops = []
    for life in range(LIVES):
        if life:  # on an empty disk, as the first one
            shutil.rmtree(tmp_path / "ssd")
            daemon.start()
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open", LONG_S)
        stops.append(_stop_under_load(daemon, tmp_path, life * ENGINES))
        if stops[-1].is_in_time and not IS_CAMPAIGN:
            break
    rates = sorted(stop.bytes_per_s / 1e9 for stop in stops)
    ratios = sorted(stop.ratio for stop in stops)
    raw = sorted(stop.raw_bytes_per_s / 1e9 for stop in stops)
    record_property(
        CAMPAIGN_LINE,
        f"a stop under load, {ENGINES} engines saving, {len(stops)} lives, {file_system(tmp_path)}: "
        f"{statistics.median(stop.bytes for stop in stops) / 1e6:.0f} MB written down, "
        f"{statistics.median(stop.seconds for stop in stops):.2f} s from SIGTERM to the exit "
        f"({statistics.median(stop.cpu_seconds for stop in stops):.2f} s of CPU), "
        f"{statistics.median(rates):.2f} GB/s ({rates[0]:.2f} to {rates[-1]:.2f}); "
        f"raw {statistics.median(raw):.2f} GB/s ({raw[0]:.2f} to {raw[-1]:.2f}); "
        f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
    )
    assert any(stop.is_in_time for stop in stops), stops
