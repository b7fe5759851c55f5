"""The backend under SGLang's own base class, factory and failure injector, out of a wheel that is never installed.

Opt-in (`make test-sglang` fetches the wheel): KVPOOL_SGLANG_WHEEL names sglang-0.5.23-….whl. Needs torch, no GPU.
"""

import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.daemon import Daemon

WHEEL = os.environ.get("KVPOOL_SGLANG_WHEEL", "")
MODULES = (
    "sglang/srt/environ.py",
    "sglang/srt/mem_cache/hicache_storage.py",
    "sglang/srt/mem_cache/storage/backend_factory.py",
)
POOLS = ("hicache_storage", "memory_pool_host", *(f"pool_host/{kind}" for kind in ("base", "mamba", "dsa", "mha")))
TURNS = 40
PACKAGES = os.environ.get("KVPOOL_SGLANG_PACKAGES", "")

pytest.importorskip("torch", reason="the torch extra is not installed")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not WHEEL, reason="KVPOOL_SGLANG_WHEEL names no wheel (make test-sglang)"),
]


def _drive(daemon: Daemon, directory: Path, **environment: str) -> dict[str, Any]:
    return _run("wheel_driver", MODULES, directory, daemon.socket, str(TURNS), **environment)


def _run(driver: str, modules: tuple[str, ...], directory: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a driver prints, in a process that has these modules of the wheel."""
    with zipfile.ZipFile(WHEEL) as wheel:
        for module in modules:
            wheel.extract(module, directory)
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), str(root / "client"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"tests.engines.sglang.{driver}", str(directory), *arguments]
    variables = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_factory_loads_the_backend_and_pages_come_back(daemon: Daemon, tmp_path: Path) -> None:
    seen = _drive(daemon, tmp_path)
    of_kv = {"wrapper": "KVPoolStorage", "fetched": TURNS * 8, "stored": TURNS * 8, "left": 0}
    assert seen == of_kv | {"hybrid_fetched": TURNS * 8, "hybrid_stored": TURNS, "hybrid_left": 0}


def test_sglangs_own_delays_and_failures_bring_no_wrong_byte(daemon: Daemon, tmp_path: Path) -> None:
    seen = _drive(
        daemon,
        tmp_path,
        SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY="0.01",
        SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE="0.2",
    )
    assert seen["wrapper"] == "HiCacheStorageFailureInjector"
    assert 0 < seen["fetched"] < TURNS * 8
    assert 0 < seen["stored"] < TURNS * 8
    assert 0 < seen["hybrid_fetched"] < TURNS * 8
    assert daemon.stats()["leases"] == 0


def test_pages_of_sglangs_own_host_pools_come_back(daemon: Daemon, tmp_path: Path) -> None:
    """The addresses of pages are those that SGLang's classes compute: states, indexers, compressed KV, wide keys."""
    modules = tuple(f"sglang/srt/mem_cache/{name}.py" for name in POOLS)
    seen = _run("wheel_pools", modules, tmp_path, daemon.socket)
    names = ("mamba", "indexer", "deepseek_v4_c4", "deepseek_v4_c128", "deepseek_v4_c4_state", "swa")
    assert seen == {"came_back": dict.fromkeys(names, 2), "hits": 2}


def _drive_linker(daemon: Daemon, directory: Path, case: str, **environment: str) -> dict[str, Any]:
    if not PACKAGES:
        pytest.skip("KVPOOL_SGLANG_PACKAGES names no folder with msgspec (make test-sglang)")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(directory)
    return _run("wheel_linker", (), directory, PACKAGES, daemon.socket, case, **environment)


def test_the_linker_serves_sglangs_own_tree_and_pools(daemon: Daemon, tmp_path: Path) -> None:
    """Of a window its own pages are stored with the KV's, and of Mamba the state at a node's end."""
    seen = _drive_linker(daemon, tmp_path, "kinds")
    assert {kind: found["loaded"] for kind, found in seen.items()} == dict.fromkeys(
        ("mha", "mla", "uneven", "swa", "mamba"), 48
    )
    assert all(all(found["stored"]) for found in seen.values())
    assert daemon.stats()["leases"] == 0


def test_sglang_gives_a_request_up_whose_promised_page_has_other_bytes(daemon: Daemon, tmp_path: Path) -> None:
    """Its KV never reaches the tree, and the page is not found again."""
    seen = _drive_linker(daemon, tmp_path, "flipped")
    assert seen == {"aborted": ["a"], "in_tree": 0, "found_again": 4}


def test_two_ranks_with_the_same_kv_find_it_behind_a_reset(daemon: Daemon, tmp_path: Path) -> None:
    """The engine's own name is one for its ranks, of which the first stores what is the same on all."""
    places = {"RANKS_PLACE": str(tmp_path / "ranks"), "GLOO_SOCKET_IFNAME": "lo"}
    with ThreadPoolExecutor(2) as ranks:
        running = [
            ranks.submit(_drive_linker, daemon, tmp_path / str(number), "rank", RANK=str(number), **places)
            for number in range(2)
        ]
    assert [rank.result() for rank in running] == [{"loaded": 24, "saved_pages": saved} for saved in (6, 0)]
    assert daemon.stats()["leases"] == 0
