"""Engines on a device whose daemon, devices and processes stop at random for longer than every deadline: never a wrong byte."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.rigs.batches import batches
from tests.faults.rigs.device_engine import LAYOUT
from tests.rigs.daemon import importing
from tests.rigs.device.device_daemon import DeviceDaemon
from tests.rigs.device.emulated import METHODS, REAL, environment

ROOT = Path(__file__).parent.parent.parent
ENGINES = 3
LIFE_S = 8.0
ENDED_S = 120.0
# Longer than a reservation lives, and a lease; the last one, until its connection is ended.
STOPS_S = (0.05, 0.5, 1.3, 3.3)
DELAYS_US = (0, 200, 2_000, 20_000, 400_000)


class Life:
    """A daemon with a device tier, engines in processes of their own, and what happens to them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._dice = random.Random(seed)
        chunks = self._dice.choice((34, 56, 80))
        self._method = self._dice.choice(list(METHODS))
        options = {
            "dram.capacity": f"{chunks * LAYOUT.chunk_bytes}B",
            "server.reservation_ttl": "1s",
            "server.lease_ttl": self._dice.choice(("300ms", "1s", "30s")),
        }
        self.daemon = DeviceDaemon(directory, **options)
        self._engines: list[subprocess.Popen[str]] = []
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Live for so long."""
        with self.daemon:
            self.daemon.wait_for_state("ok")
            end = time.monotonic() + seconds
            self._engines = [self._start(seconds) for _ in range(ENGINES)]
            while time.monotonic() < end:
                time.sleep(self._dice.uniform(0.0, 0.3))
                self._trouble(end - time.monotonic())
            for engine in self._engines:
                self._take_counts(engine)
            assert self.daemon.problems() == []

    def end(self) -> None:
        """No process is left."""
        for engine in self._engines:
            engine.kill()
            engine.communicate()

    def _start(self, seconds: float) -> "subprocess.Popen[str]":
        # Some engines' devices hang with the daemon's.
        orders = self.daemon.control.environment if self._dice.random() < 0.5 else {}
        driver = environment(self._method, delay_us=str(self._dice.choice(DELAYS_US[:4])))
        arguments = [self.daemon.socket, str(self._dice.randrange(1 << 32)), str(max(1.0, seconds))]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.faults.rigs.device_engine", *arguments],
            env={**importing(), **driver, **orders},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _take_counts(self, engine: "subprocess.Popen[str]") -> None:
        out, error = engine.communicate(timeout=ENDED_S)
        assert engine.returncode == 0, error
        self.counts.update(json.loads(out))

    def _trouble(self, left_s: float) -> None:
        """One thing that happens."""
        engine, drawn = self._dice.randrange(ENGINES), self._dice.random()
        if drawn < 0.2:
            self._stop(self._engines[engine].send_signal)
        elif drawn < 0.3:
            self._stop(self.daemon.signal)
        elif drawn < 0.4 and not REAL:
            self.daemon.control.order("hang 1")
            time.sleep(self._dice.choice(STOPS_S))
            self.daemon.control.order(f"hang 0\ndelay_us {self._dice.choice(DELAYS_US)}")
        elif drawn < 0.8:
            with self.daemon.admin() as admin:
                admin.flush(None, None, self._dice.choice(("hbm", "hbm", "hbm", "dram")))
        elif drawn < 0.83 and self._engines[engine].poll() is None:
            self._engines[engine].kill()
            self._engines[engine].communicate()
            self.counts["killed"] += 1
            self._engines[engine] = self._start(left_s)

    def _stop(self, send: Callable[[int], None]) -> None:
        send(signal.SIGSTOP)
        time.sleep(self._dice.choice(STOPS_S))
        send(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("lives", [pytest.param(1, id="one"), *batches(5, of=20)])
def test_engines_on_a_device_get_their_own_bytes_whatever_stops(
    tmp_path: Path, seed: int, summary: Callable[[str], None], lives: int
) -> None:
    counts: Counter[str] = Counter()
    for number in range(lives):
        directory = tmp_path / str(number)
        directory.mkdir()
        life = Life(directory, seed + number)
        try:
            life.run(LIFE_S)
        finally:
            life.end()
        counts.update(life.counts)
    assert counts["loaded_chunks"] > 0
    assert counts["saved_chunks"] > 0
    names = ("loaded_chunks", "leased_copies", "load_cancelled", "load_gone", "save_aborted", "save_expired", "killed")
    summary(f"{lives} lives, {', '.join(f'{name} {counts[name]}' for name in names)}")
