"""`kvpoolctl bench restart`: every chunk is found again after the kills, and the hits are those without kills."""

import json

import pytest

from tests.rigs.kvpoolctl import ctl, execute


@pytest.mark.slow
def test_every_chunk_and_every_hit_outlives_the_kills() -> None:
    run = execute("bench", "restart", "--quick", "--json")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["command"] == "bench restart"
    start, *replays = document["rows"]
    assert 0 < start["ready_s"] < start["found_s"]
    assert start["ready_empty_s"] > 0
    assert [row["wrong_bytes"] for row in document["rows"]] == [0, 0, 0, 0]
    assert [row["kills"] for row in replays] == [10, 10, 10]
    of_all, _, of_lru = replays
    assert of_all["hit_ratio"] == of_lru["hit_ratio"] == 1.0, "only what a policy has learned is lost"
    assert of_all["hit_rate"] > 0


def test_a_daemon_that_was_named_is_not_killed() -> None:
    refused = ctl(None, "bench", "restart", "--socket", "/nowhere/kvpool.sock")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "restart starts daemons of its own: leave --socket out" in refused.stderr
