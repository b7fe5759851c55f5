"""Sleep in the order of another release's own code, out of a wheel that is never installed.

Opt-in: KVPOOL_VLLM_WHEEL names vllm-0.33.0-….whl. Needs an environment in which that release's Python files can be imported, as
the one of `make test-engines`; none of its native parts.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.engines.vllm.rigs.engine import ENVIRONMENT, ROOT
from tests.rigs.daemon import Daemon
from tests.rigs.vllm.setting import CHUNK

WHEEL = os.environ.get("KVPOOL_VLLM_WHEEL", "")
TIMEOUT_S = 1200.0  # it imports all of vLLM

pytestmark = pytest.mark.skipif(not WHEEL, reason="KVPOOL_VLLM_WHEEL names no wheel")


def test_the_releases_own_sleep_and_waking_leave_a_right_engine(daemon: Daemon, tmp_path: Path) -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(tmp_path, [name for name in wheel.namelist() if name.endswith(".py")])
    paths = os.pathsep.join([str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tests.engines.vllm.rigs.sleep_driver", str(tmp_path), str(daemon.socket)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert daemon.stats()["leases"] == 0
    seen = json.loads(done.stdout.splitlines()[-1])
    whole = [5 * CHUNK, 0, 5 * CHUNK]
    assert seen == {
        "version": Path(WHEEL).name.split("-")[1],
        "supports_sleep_mode": [True, True],
        "level 1": whole,
        "level 2, woken in parts": whole,
        "released": whole,
        "watched": [True, True],
        "lookahead_token_ids": None,
        "wrong_reads": 0,
        "apply_model is noticed": True,
    }
