"""The plug-in under LMCache's own storage manager and benchmark, out of a wheel that is never installed.

Opt-in (`make test-lmcache` fetches the wheels): KVPOOL_LMCACHE_WHEEL names lmcache-….whl, KVPOOL_LMCACHE_SITE a folder with
what it imports. Needs torch, no GPU.
"""

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from kvpool_client.engines.weights import Revision
from kvpool_client.lmcache.object_layout import layout_of
from kvpool_client.lmcache.object_names import names_of
from tests.engines.lmcache.standin import Key
from tests.engines.lmcache.wheel_shapes import RANK, form_of_group
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import flip_bit

WHEEL = os.environ.get("KVPOOL_LMCACHE_WHEEL", "")
SITE = os.environ.get("KVPOOL_LMCACHE_SITE", "")
ROOT = Path(__file__).parents[3]
SIZE = 256 << 10

pytest.importorskip("torch", reason="the torch extra is not installed")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not WHEEL, reason="KVPOOL_LMCACHE_WHEEL names no wheel (make test-lmcache)"),
]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process that has the wheel's LMCache."""
    place = tmp_path_factory.mktemp("lmcache")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(place)
    paths = [str(ROOT), str(ROOT / "client"), str(place), SITE, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class LMCache:
    """A storage manager in a process of its own (`wheel_driver`)."""

    def __init__(self, daemon: Daemon, environment: dict[str, str], **params: object) -> None:
        command = [sys.executable, "-m", "tests.engines.lmcache.wheel_driver", adapter_json(daemon, **params)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def do(self, order: str, **fields: object) -> dict[str, Any]:
        """An order's answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": order, **fields}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """The storage manager closes the adapter, and the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._answer() == {"closed": True}
        assert self._process.wait(60) == 0

    def kill(self) -> None:
        """It has ended, also where a test has failed."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError("LMCache's process has ended")


def adapter_json(daemon: Daemon, **params: object) -> str:
    """The argument of --l2-adapter, as docs/engines/lmcache.md has it."""
    given = {"socket": daemon.socket, "revision": "1", "timeout_s": 60, "task_timeout_s": 60, **params}
    names = {"module_path": "kvpool_client.lmcache", "class_name": "KVPoolAdapter"}
    return json.dumps({"type": "plugin", **names, "adapter_params": given})


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., LMCache]]:
    """Starts LMCache with the plug-in on a daemon."""
    made = []

    def make(daemon: Daemon, **params: object) -> LMCache:
        made.append(LMCache(daemon, environment, **params))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def test_lmcaches_benchmark_verifies_what_it_loads(daemon: Daemon, environment: dict[str, str]) -> None:
    shape = ["--num-keys", "16", "--in-flight", "4", "--data-size-kb", "32", "--rounds", "3"]
    checks = ["--no-skip-verify", "--lookup-max-hit-rate", "0.5"]
    command = [sys.executable, "-m", "tests.engines.lmcache.benchmark_driver", "--l2-adapter", adapter_json(daemon)]
    done = subprocess.run(
        [*command, *shape, *checks], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 64 keys data verified OK." in done.stdout
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert [line for line in lines if line.startswith("Total success")] == [
        "Total success: 192",
        "Total success: 96",
        "Total success: 192",
    ]
    assert lines.count("Rounds timed out: 0") == 3
    assert daemon.problems() == []


def test_what_is_stored_is_prefetched_after_l1_was_cleared_and_no_lock_is_left(
    daemon: Daemon, start: Callable[..., LMCache]
) -> None:
    lmcache = start(daemon)
    both = [0, 1]
    assert lmcache.do("write", first=0, count=8, groups=both)["stored_bytes"] == [8 * SIZE, 8 * SIZE * 3 // 4]
    assert lmcache.do("prefetch", first=0, count=8, groups=both)["from_l2"] == [0, 0]
    lmcache.do("clear")
    answer = lmcache.do("prefetch", first=0, count=10, groups=both)
    assert answer == {"hits": [list(range(8))] * 2, "from_l2": [8, 8], "wrong": 0}
    assert lmcache.do("prefetch", first=0, count=8, groups=both, salt="tenant")["hits"] == [[], []]
    wait_until(lambda: daemon.stats()["leases"] == 0, "no lock is left")
    status = lmcache.do("status")
    assert status["adapter"]["locks"] == 0
    assert status["manager"] is True
    other = start(daemon)
    assert other.do("prefetch", first=0, count=8, groups=both)["from_l2"] == [8, 8]
    lmcache.close()
    other.close()
    assert daemon.problems() == []


def test_a_killed_daemon_is_a_miss_and_a_new_one_is_filled_again(
    start_daemon: Callable[..., Daemon], start: Callable[..., LMCache]
) -> None:
    daemon = start_daemon()
    lmcache = start(daemon)
    lmcache.do("write", first=0, count=4)
    lmcache.do("clear")
    daemon.kill()
    assert lmcache.do("prefetch", first=0, count=4)["hits"] == [[]]
    assert lmcache.do("write", first=4, count=4)["stored_bytes"] == [-1]
    daemon.start()
    wait_until(lambda: lmcache.do("status")["adapter"]["is_connected"], "connected again")
    lmcache.do("write", first=0, count=4)
    lmcache.do("clear")
    assert lmcache.do("prefetch", first=0, count=4) == {"hits": [[0, 1, 2, 3]], "from_l2": [4], "wrong": 0}
    lmcache.close()


def test_a_flipped_bit_ends_the_prefix_before_its_object(daemon: Daemon, start: Callable[..., LMCache]) -> None:
    lmcache = start(daemon)
    lmcache.do("write", first=0, count=6)
    lmcache.do("clear")
    key = Key((3).to_bytes(8, "little") * 4, "tiny", RANK)
    layout, revision = layout_of(form_of_group(0)), Revision({}, weights="1").find()
    assert revision is not None
    with (
        kv.connect(daemon.socket, model="tiny", revision=revision, layout=layout) as pool,
        pool.acquire_set(names_of([key])) as lease,
    ):
        flip_bit(lease, 0, at=4711)
    assert lmcache.do("prefetch", first=0, count=6) == {"hits": [[0, 1, 2]], "from_l2": [3], "wrong": 0}
    lmcache.close()


def test_a_pool_that_is_too_small_keeps_some_and_no_other_bytes(
    start_daemon: Callable[..., Daemon], start: Callable[..., LMCache]
) -> None:
    daemon = start_daemon(dram__capacity="4MiB")
    lmcache = start(daemon)
    for first in range(0, 40, 4):
        lmcache.do("write", first=first, count=4)
    lmcache.do("clear")
    found = [lmcache.do("prefetch", first=first, count=1) for first in range(40)]
    assert sum(answer["wrong"] for answer in found) == 0
    assert 8 <= sum(answer["from_l2"][0] for answer in found) < 20
    lmcache.close()
    assert daemon.problems() == []


def test_a_daemon_that_hangs_holds_up_no_request(
    start_daemon: Callable[..., Daemon], start: Callable[..., LMCache]
) -> None:
    daemon = start_daemon()
    lmcache = start(daemon, timeout_s=0.3, task_timeout_s=1)
    wait_until(lambda: lmcache.do("write", first=0, count=4)["stored_bytes"] != [-1], "stored")
    lmcache.do("clear")
    daemon.signal(signal.SIGSTOP)
    try:
        assert lmcache.do("prefetch", first=0, count=4)["hits"] == [[]]
    finally:
        daemon.signal(signal.SIGCONT)
    wait_until(lambda: lmcache.do("prefetch", first=0, count=4)["hits"] == [[0, 1, 2, 3]], "it answers again")
    lmcache.close()


def test_after_a_restart_of_both_the_ssd_tier_is_warm(
    start_daemon: Callable[..., Daemon], start: Callable[..., LMCache], tmp_path: Path
) -> None:
    options = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "64MiB", "ssd__admission": "all"}
    daemon = start_daemon(**options)
    daemon.wait_open()
    first = start(daemon)
    first.do("write", first=0, count=8)
    first.close()
    daemon.stop()
    daemon.start()
    daemon.wait_open()
    second = start(daemon)
    assert second.do("prefetch", first=0, count=8) == {"hits": [list(range(8))], "from_l2": [8], "wrong": 0}
    second.close()
