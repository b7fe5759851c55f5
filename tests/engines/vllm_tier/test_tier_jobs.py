"""The tier's jobs over a real daemon: each ends once, a miss is a miss, and a row that counts as loaded has its own bytes."""

import signal
from typing import Any

import numpy as np
import pytest

from kvpool.protocol.blocking import BlockingConnection
from kvpool_client.engines.flushing import flush_model
from tests.engines.vllm_tier.region import Region, Start, bytes_of, key_of, keys_of
from tests.rigs.daemon import Daemon, in_both_write_modes, wait_until

CHUNKS = 20


def _flush(daemon: Daemon, region: Region) -> None:
    model = str(region.jobs).split("<Pool ")[1].split(" ")[0]
    assert flush_model(daemon.socket, model, 60.0) == ""


@in_both_write_modes
def test_a_second_engine_loads_what_the_first_has_stored(daemon: Daemon, start_region: Start) -> None:
    first, keys = start_region(daemon), keys_of(1, CHUNKS)
    assert first.found(first.begin(), keys) == [False] * CHUNKS
    assert first.store(keys).is_whole
    second = start_region(daemon)
    context = second.begin(keys)
    assert second.found(context, keys) == [True] * CHUNKS
    assert second.load(keys, context).is_whole
    assert second.counts() == {"loaded_chunks": CHUNKS}
    assert first.counts() == {"saved_chunks": CHUNKS}
    wait_until(lambda: daemon.stats()["leases"] == 0, "the leases have ended")
    assert daemon.problems() == []


def test_rows_of_a_set_are_stored_in_the_order_of_its_iteration(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon), keys_of(1, CHUNKS)
    as_set = set(keys)
    context = region.begin(keys)
    for row, key in enumerate(as_set):
        region.rows[row] = bytes_of(key)
    number = region.submit(context, list(as_set), is_load=False)
    assert region.wait(number).is_whole
    assert region.load(keys).is_whole


def test_groups_of_a_model_have_chunks_of_their_own(daemon: Daemon, start_region: Start) -> None:
    region = start_region(daemon)
    ours, other = key_of(1, 0, group=0), key_of(1, 0, group=1)
    assert region.store([ours]).is_whole
    assert region.found(region.begin(), [ours, other]) == [True, False]


def test_a_key_that_fails_is_a_miss_for_its_request_and_the_others_are_loaded(
    daemon: Daemon, start_region: Start
) -> None:
    region, keys = start_region(daemon), keys_of(1, 6)
    assert region.store(keys).is_whole
    context = region.begin(keys)
    assert all(region.found(context, keys))
    _flush(daemon, region)
    stays = keys[:2] + keys[4:]
    assert region.store(stays).is_whole
    ended = region.load(keys, context)
    assert not ended.is_whole
    assert sorted(ended.good) == sorted(stays)
    assert region.counts()["failed_chunks_absent"] == 2
    assert region.store(keys).is_whole
    assert region.found(context, keys) == [key in stays for key in keys]
    assert all(region.found(region.begin(keys), keys))


def test_without_a_daemon_everything_misses_and_every_job_ends(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon), keys_of(1, 4)
    assert region.store(keys).is_whole
    context = region.begin(keys)
    daemon.kill()
    wait_until(lambda: "connected" not in repr(region.jobs), "the tier has noticed")
    assert region.found(context, keys) == [False] * 4
    assert region.load(keys, context).good == ()
    assert not region.store(keys_of(2, 4)).is_whole
    daemon.start()
    wait_until(lambda: "connected" in repr(region.jobs), "the tier has reconnected")
    later = region.begin(keys)
    assert region.store(keys, later).is_whole
    assert region.load(keys).is_whole
    assert region.found(context, keys) == [False] * 4


def test_jobs_that_are_open_when_the_daemon_dies_end(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon, timeout_s=10.0), keys_of(1, 8)
    assert region.store(keys).is_whole
    daemon.signal(signal.SIGSTOP)
    numbers = [region.submit(region.begin(keys), keys, is_load=True)]
    numbers += [
        region.submit(region.begin(new), new, range(10 + turn, 11 + turn), is_load=False)
        for turn, new in ((turn, keys_of(2 + turn, 1)) for turn in range(3))
    ]
    region.poll()
    assert not region.ended.keys() & set(numbers)
    daemon.kill()
    assert region.wait(numbers[0]).good == ()
    assert not any(region.wait(number).is_whole for number in numbers)
    region.settle()


def test_a_full_line_ends_jobs_without_success(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon, queue_jobs=2), keys_of(1, 3)
    daemon.signal(signal.SIGSTOP)
    numbers = [region.submit(region.begin([key]), [key], [row], is_load=False) for row, key in enumerate(keys)]
    assert not region.wait(numbers[2]).is_whole
    assert list(region.ended) == numbers[2:]
    daemon.signal(signal.SIGCONT)
    assert region.wait(numbers[0]).is_whole
    assert region.wait(numbers[1]).is_whole
    assert region.counts() == {"saved_chunks": 2, "declined_chunks_withdrawn": 1}
    assert region.found(region.begin(), keys) == [True, True, False]


def test_loads_do_not_wait_for_stores(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon, queue_jobs=1), keys_of(1, 2)
    assert region.store(keys).is_whole
    daemon.signal(signal.SIGSTOP)
    storing = region.submit(region.begin(), keys_of(2, 1), [9], is_load=False)
    loading = region.submit(region.begin(keys), keys, is_load=True)
    daemon.signal(signal.SIGCONT)
    assert region.wait(loading).is_whole
    assert region.wait(storing).is_whole


def test_rows_that_do_not_exist_are_refused(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon, rows=4), keys_of(1, 1)
    context = region.begin(keys)
    number = region.submit(context, keys, is_load=False)
    assert region.wait(number).is_whole
    job = type("Job", (), {"job_id": 77, "keys": keys, "chunk_ids": np.array([4]), "req_context": context})
    region.jobs.submit_load(job)
    assert region.wait(77).good == ()
    assert region.found(context, keys) == [False]


def test_a_prompt_that_the_region_serves_survives_others_that_fill_the_pool(
    start_daemon: Start, start_region: Start
) -> None:
    """vLLM offers all chunks of each request: a use, though nothing is copied."""
    daemon = start_daemon(dram__capacity="4MiB")
    region = start_region(daemon)
    chunks = 60
    hot, first, second = keys_of(1, chunks // 3), keys_of(2, chunks // 3), keys_of(3, chunks // 2)
    region.store(hot)
    region.store(first)
    for _ in range(5):
        assert region.store(hot).is_whole
    region.store(second)
    region.settle()
    context = region.begin(hot)
    assert all(region.found(context, hot))
    assert not all(region.found(context, first))
    assert region.load(hot, context).is_whole


def test_a_prompt_stored_in_several_jobs_is_evicted_from_its_end_on(start_daemon: Start, start_region: Start) -> None:
    daemon = start_daemon(dram__capacity="4MiB")
    region = start_region(daemon)
    keys = keys_of(1, 40)
    context = region.begin(keys)
    for first in range(0, 40, 10):
        region.store(keys[first : first + 10], context)
    region.end(context)
    assert region.counts()["used_chunks"] == 40
    region.store(keys_of(2, 40))
    found = region.found(region.begin(), keys)
    assert any(found)
    assert not all(found)
    assert found == sorted(found, reverse=True)


def test_a_reset_hides_what_was_stored_from_its_engine_alone_and_ends_open_jobs(
    daemon: Daemon, start_region: Start
) -> None:
    region, keys = start_region(daemon), keys_of(1, 4)
    assert region.store(keys).is_whole
    old = region.begin(keys)
    number = region.submit(old, keys, is_load=True)
    region.jobs.drain()
    region.poll()
    assert number in region.ended
    assert region.found(region.begin(keys), keys) == [False] * 4
    assert not region.store(keys, old).is_whole
    assert region.store(keys).is_whole
    assert region.load(keys).is_whole
    other = start_region(daemon)
    assert other.found(other.begin(), keys) == [True] * 4
    assert other.load(keys).is_whole
    assert "flushes" not in region.counts()


def test_a_reset_of_the_node_drops_what_was_stored_for_all(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon, reset="node"), keys_of(1, 4)
    other = start_region(daemon)
    assert region.store(keys).is_whole
    region.jobs.drain()
    assert other.found(other.begin(), keys) == [False] * 4
    assert region.found(region.begin(), keys) == [False] * 4
    assert region.counts()["flushes"] == 1


def test_a_reset_waits_for_its_flush_no_longer_than_is_left(
    daemon: Daemon, start_region: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    flush = BlockingConnection.flush

    def watched(self: BlockingConnection, *given: Any, timeout_s: float | None = None) -> dict[str, Any]:
        waits.append(timeout_s)
        return flush(self, *given, timeout_s=timeout_s)

    monkeypatch.setattr(BlockingConnection, "flush", watched)
    region = start_region(daemon, reset="node", timeout_s=5.0)
    region.jobs.drain()
    assert waits
    assert all(wait is not None and wait <= 5.0 for wait in waits)


@pytest.mark.parametrize(("reset", "failed"), [("engine", 0), ("node", 1)])
def test_after_a_reset_nothing_old_is_found_even_if_the_daemon_was_away(
    daemon: Daemon, start_region: Start, reset: str, failed: int
) -> None:
    region, keys = start_region(daemon, timeout_s=0.2, reset=reset), keys_of(1, 4)
    region.store(keys)
    daemon.signal(signal.SIGSTOP)
    region.jobs.drain()
    daemon.signal(signal.SIGCONT)
    wait_until(lambda: "connected" in repr(region.jobs), "the tier is connected")
    assert region.found(region.begin(keys), keys) == [False] * 4
    assert region.counts().get("failed_flushes", 0) == failed


def test_a_reset_withdraws_jobs_that_a_hanging_daemon_delays(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon, timeout_s=0.3), keys_of(1, 4)
    region.store(keys)
    daemon.signal(signal.SIGSTOP)
    numbers = [region.submit(region.begin(keys), keys, is_load=True) for _ in range(8)]
    region.jobs.drain()
    region.poll()
    assert set(numbers) <= set(region.ended)
    daemon.signal(signal.SIGCONT)
    assert "0/" in repr(region.jobs)


def test_requests_choose_what_is_loaded_and_saved(daemon: Daemon, start_region: Start) -> None:
    region, keys = start_region(daemon), keys_of(1, 2)
    assert not region.store(keys, region.begin(keys, params={"save": False})).is_whole
    assert region.found(region.begin(), keys) == [False] * 2
    assert region.store(keys).is_whole
    assert region.found(region.begin(keys, params={"load": False}), keys) == [False] * 2


@pytest.mark.parametrize("place", ["hints", "params"])
def test_hints_set_the_retention_of_the_chunks_that_they_cover(
    start_daemon: Start, start_region: Start, place: str
) -> None:
    daemon = start_daemon(dram__capacity="4MiB")
    region, keys = start_region(daemon), keys_of(1, 8)
    action = {
        "action_id": "1",
        "action_type": "kv.retain",
        "action_version": "1.0",
        "payload": {"start": 0, "end": 4 * 16, "priority": 90},
    }
    envelope = {"protocol_version": "1.0", "message_id": "m", "actions": [action]}
    given = {"hints": envelope} if place == "hints" else {"params": {"kv_hints": envelope}}
    assert region.store(keys, region.begin(keys, **given)).is_whole
    for prompt in range(2, 8):
        region.store(keys_of(prompt, 20))
    assert region.found(region.begin(), keys) == [True] * 4 + [False] * 4


def test_hints_that_cannot_be_carried_out_are_counted(daemon: Daemon, start_region: Start) -> None:
    region = start_region(daemon)
    action = {"action_id": "1", "action_type": "kv.prefetch", "action_version": "1.0", "payload": {}}
    region.begin(params={"kv_hints": {"protocol_version": "1.0", "message_id": "m", "actions": [action, {}]}})
    region.begin(params={"retention": "all", "decode_priority": 5})
    assert region.counts()["rejected_hints"] == 3
