"""Tests of campaigns: continuous integration's two runs of a suite leave no test out, and repeat none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _collected(suite: str, campaign: str, marked: str = "") -> set[str]:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", marked, suite],
        cwd=ROOT,
        env={**os.environ, "KVPOOL_CAMPAIGN": campaign, "KVPOOL_SAMPLE": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return {line for line in run.stdout.splitlines() if "::" in line}


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["tests/faults", "tests/hostile", "tests/nodes"])
def test_what_is_left_out_of_one_run_is_in_the_other(suite: str) -> None:
    everything, longer = (_collected(suite, campaign) for campaign in ("1", "only"))
    quick = _collected(suite, "", "not slow")
    assert quick | longer == everything
    assert longer < everything
    assert longer
    source = {name: (ROOT / name.partition("::")[0]).read_text() for name in quick & longer}
    assert all("campaign: Campaign" in text for text in source.values())
