"""The tier under vLLM's own code, of 0.32 and 0.33: the whole scheduler with OffloadingConnector, and the tiering manager.

Out of wheels that are never installed: `make vllm-files` puts their Python files into build/vllm, a folder for each version;
without them these tests are skipped. Needs torch, no GPU. The scenarios of a version run in one process, one after the other.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FILES = Path(os.environ.get("KVPOOL_VLLM_FILES", ROOT / "build" / "vllm"))
VERSIONS = ("0.32.0", "0.33.0")
TIMEOUT_S = 900
SCENARIOS = (
    "manager_stores_and_loads",
    "manager_loses_some",
    "manager_without_a_daemon",
    "scheduler_serves_prompts",
    "scheduler_resets",
    "scheduler_has_new_weights",
    "scheduler_has_a_hot_prompt",
    "scheduler_aborts_and_preempts",
    "scheduler_loses_its_daemon",
    "scheduler_has_a_full_line",
)

pytest.importorskip("torch", reason="the torch extra is not installed")
pytestmark = pytest.mark.torch


@cache
def _seen(version: str) -> dict[str, Any]:
    """What the scenarios of a version have seen."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")])
    # vLLM's hashes of a script's own function are equal in two engines only with a seed.
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.engines.vllm_tier.contract_driver", str(FILES / version), *SCENARIOS]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _see(version: str, scenario: str) -> dict[str, Any]:
    """What a scenario has seen."""
    if not (FILES / version / "vllm" / "v1" / "kv_offload").is_dir():
        pytest.skip(f"{FILES / version} has no vLLM (make vllm-files)")
    seen = _seen(version)[scenario]
    assert isinstance(seen, dict), seen
    return seen


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manager_stores_loads_and_resets(version: str) -> None:
    seen = _see(version, "manager_stores_and_loads")
    assert seen == {
        "locality": "REMOTE",
        "loaded": 20,
        "again": 20,
        "stats": {"vllm:kvpool_tier_loaded_chunks": 20},
        "defined": True,
        "after_reset": 0,
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_keys_that_fail_under_the_manager_are_asked_for_once(version: str) -> None:
    seen = _see(version, "manager_loses_some")
    assert seen == {"ready": 5, "again": 5, "later": 5, "another request": 12}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manager_goes_on_without_a_daemon(version: str) -> None:
    assert _see(version, "manager_without_a_daemon") == {"away": 0, "region": 8, "absent": 0}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_engine_has_the_prompts_of_the_first(version: str) -> None:
    assert _see(version, "scheduler_serves_prompts") == {"first": [0, 0, 0], "second": [12, 12, 12]}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reset_makes_stale_what_was_stored_for_its_engine_or_for_all(version: str) -> None:
    seen = _see(version, "scheduler_resets")
    assert seen == {
        "cold": 0,
        "region": 12,
        "after_reset": 0,
        "running": "FINISHED_LENGTH_CAPPED",
        "other": 12,
        "after_reset_of_node": 0,
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_prompt_that_the_region_serves_survives_two_that_fill_the_pool(version: str) -> None:
    assert _see(version, "scheduler_has_a_hot_prompt") == {"region": [20] * 5, "found": 20, "others": True}


@pytest.mark.parametrize("version", VERSIONS)
def test_aborts_and_preemptions_leave_every_request_with_its_tokens(version: str) -> None:
    assert _see(version, "scheduler_aborts_and_preempts") == {"preempted": True, "loaded": True, "ended": [60] * 4}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_daemon_that_dies_with_jobs_open_costs_computing(version: str) -> None:
    assert _see(version, "scheduler_loses_its_daemon") == {"ended": [4] * 4, "cold": 0, "back": True}


@pytest.mark.parametrize("version", VERSIONS)
def test_new_weights_are_stored_from_the_next_reset_on(version: str) -> None:
    assert _see(version, "scheduler_has_new_weights") == {
        "old": 4,
        "behind a reset": 8,
        "checked": 4,
        "beside one that runs again": 4,
        "without a reset": 0,
        "behind a reset of the prefix cache alone": 0,
        "reset at last": 4,
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_full_line_costs_stores(version: str) -> None:
    assert _see(version, "scheduler_has_a_full_line") == {"ended": [20] * 6}
