"""Retention through a daemon: retained and clipped chunks and their reports, by engines, schedulers, operators and hints."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kvpool_client as kv
from kvpool.states import Level
from kvpool_tools.cli.kvpoolctl import cli
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.layouts import Case, over
from tests.rigs.payload import payload_of, tokens_of
from tests.rigs.prompts import prompt, store

DRAM_CHUNKS = 40  # of which 30 %, 12, may be retained above the default priority
CHAIN = 4
CHUNK_TOKENS = SMALL.chunk_tokens

Start = Callable[..., Daemon]


@pytest.fixture
def small(start_daemon: Start) -> Daemon:
    """A daemon with little DRAM and no lower tier."""
    return start_daemon(dram__capacity=f"{DRAM_CHUNKS * SMALL.chunk_bytes}B")


def keys_of(pool: kv.Pool, number: int, chunks: int = CHAIN) -> kv.KeyChain:
    return prompt(pool, 6000 + number, chunks, tail=0)


def save(pool: kv.Pool, keys: kv.KeyChain, **options: Any) -> kv.SaveResult:
    result = pool.save(keys, from_=payload_of(keys, pool.layout), **options).commit()
    assert result.declined == 0
    return result


def press(pool: kv.Pool, chains: int, first: int = 500) -> None:
    """Store this many further chains."""
    for number in range(first, first + chains):
        assert store(pool, keys_of(pool, number)).declined == 0


def present(pool: kv.Pool, keys: kv.KeyChain) -> int:
    return pool.lookup(keys).chunks


def test_a_system_prompt_outlives_everything_else(small: Daemon) -> None:
    with small.connect() as pool:
        prompt = keys_of(pool, 1, 6)
        assert save(pool, prompt, retention=[kv.TokenRange(0, 3 * CHUNK_TOKENS, 100)]).clipped == 0
        press(pool, 3 * DRAM_CHUNKS // CHAIN)
        assert present(pool, prompt) == 3
    assert small.problems() == []


def test_decoded_chunks_are_retained_by_their_own_priority(small: Daemon) -> None:
    with small.connect() as pool:
        turn = keys_of(pool, 1, 6)
        save(
            pool,
            turn,
            retention=[kv.TokenRange(0, None, 80, 600.0)],
            prompt_tokens=4 * CHUNK_TOKENS - 5,
            decode_priority=0,
            decode_duration_s=600.0,
        )
        press(pool, DRAM_CHUNKS // CHAIN)
        assert present(pool, turn) == 4


def test_clipped_chunks_are_reported_and_evicted_like_the_rest(small: Daemon) -> None:
    with small.connect() as pool:
        keys = keys_of(pool, 1, 20)
        result = save(pool, keys, retention=[kv.TokenRange(0, None, 100)])
        assert (result.stored, result.clipped) == (20, 8)
        assert result.stored + result.present + result.declined == 20
        press(pool, 3 * DRAM_CHUNKS // CHAIN)
        assert present(pool, keys) == 12
        assert pool.retain(keys, [kv.TokenRange(0, None, 100)]) == kv.RetainResult(
            12, 0, 8, ("accepted",) * 12 + ("absent",) * 8
        )
        other = keys_of(pool, 2)
        save(pool, other)
        assert pool.retain(other, [kv.TokenRange(0, None, 36)]).clipped == CHAIN
        assert pool.retain(other, [kv.TokenRange(0, None, 1)]).accepted == CHAIN
    assert small.problems() == []


def test_a_later_save_does_not_change_priorities_that_it_does_not_name(small: Daemon) -> None:
    with small.connect() as pool:
        prompt = keys_of(pool, 1)
        save(pool, prompt, retention=[kv.TokenRange(0, None, 100)])
        longer = keys_of(pool, 1, 8)
        result = save(pool, longer, retention=[kv.TokenRange(CHAIN * CHUNK_TOKENS, None, 0)])
        assert (result.present, result.stored) == (CHAIN, 4)
        assert save(pool, prompt).present == CHAIN
        press(pool, DRAM_CHUNKS // CHAIN)
        assert present(pool, longer) == CHAIN


def test_retention_set_later_counts_from_then(small: Daemon) -> None:
    with small.connect() as pool:
        keys = keys_of(pool, 1)
        save(pool, keys)
        result = pool.retain(keys, [kv.TokenRange(0, 33, 100)])
        assert result == kv.RetainResult(2, 0, 0, ("accepted", "accepted", "", ""))
        press(pool, 2 * DRAM_CHUNKS // CHAIN)
        assert present(pool, keys) == 2
        assert pool.retain(keys, [kv.TokenRange(0, None, 35)]).accepted == 2
        press(pool, 2 * DRAM_CHUNKS // CHAIN, first=700)
        assert present(pool, keys) == 0
    assert small.problems() == []


@over("plain", "hybrid")
def test_a_scheduler_retains_on_every_rank_and_of_every_group(case: Case, start_daemon: Start) -> None:
    size = sum(part.stored_bytes * part.chunks_of(CHAIN) for part in case.layout.group_layouts)
    daemon = start_daemon(dram__capacity=f"{DRAM_CHUNKS // CHAIN * size}B")
    ranks = [daemon.connect(replace(case.layout, rank=rank, world=2)) for rank in range(2)]
    with daemon.connect(replace(case.layout, rank=None, world=2)) as scheduler:
        keys = prompt(scheduler, 9, CHAIN)
        for rank, found in zip(ranks, ((0, CHAIN), (CHAIN, 0)), strict=True):
            assert store(rank, prompt(rank, 9, CHAIN)).declined == 0
            retained = scheduler.retain(keys, [kv.TokenRange(0, None, 100)])
            assert (retained.accepted, retained.absent) == found
        press(ranks[0], 2 * DRAM_CHUNKS // CHAIN)
        assert present(scheduler, keys) == CHAIN
    for pool in ranks:
        pool.close()


@pytest.mark.parametrize("call", ["save", "retain"])
def test_a_callers_mistake_is_named(shared_daemon: Daemon, call: str) -> None:
    with shared_daemon.connect(model="another") as pool:
        keys = keys_of(pool, 1)
        wrong = [kv.TokenRange(0, None, 101)]
        verb = pool.retain if call == "retain" else partial(pool.save, from_=payload_of(keys, SMALL))
        with pytest.raises(kv.InvalidArgument, match=r"retention\[0\]\.priority is 101, expected 0\.\.100"):
            verb(keys, retention=wrong)


def _envelope(*kinds: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    actions = [
        {"action_id": f"a{number}", "action_type": kind, "action_version": "1.0", "payload": payload or {}}
        for number, kind in enumerate(kinds)
    ]
    return {"protocol_version": "0.1", "message_id": "m1", "actions": actions}


def test_hints_are_executed_and_answered(small: Daemon) -> None:
    with small.connect() as pool:
        keys = keys_of(pool, 1)
        save(pool, keys)
        report = pool.hint(_envelope("kv.pin", "kv.share", "kv.prefetch"), keys)
        assert [outcome.status for outcome in report.outcomes] == ["accepted", "rejected", "accepted"]
        assert report.retention == (kv.TokenRange(0, None, 100, 60.0),)
        press(pool, 2 * DRAM_CHUNKS // CHAIN)
        assert present(pool, keys) == CHAIN
        unknown = pool.hint(_envelope("kv.prefetch"), keys_of(pool, 999)).outcomes[0]
        assert (unknown.status, unknown.reason) == ("rejected", "nothing of it is stored")
        assert pool.stats()["hints_rejected"] == 2


def test_a_hint_before_the_save_is_for_the_save(small: Daemon) -> None:
    with small.connect() as pool:
        keys = keys_of(pool, 1, 6)
        directives = [{"end": 2 * CHUNK_TOKENS, "priority": 100}, {"covers_output": True, "priority": 90}]
        prompt = 3 * CHUNK_TOKENS
        report = pool.hint(_envelope("kv.retain", payload={"directives": directives}), keys, prompt_tokens=prompt)
        assert [outcome.reason for outcome in report.outcomes] == ["5 chunks are not stored yet"]
        assert report.outcomes[0].status == "accepted"
        save(
            pool,
            keys,
            retention=report.retention,
            prompt_tokens=prompt,
            decode_priority=report.decode_priority,
            decode_duration_s=report.decode_duration_s,
        )
        press(pool, 2 * DRAM_CHUNKS // CHAIN)
        assert present(pool, keys) == 6, "the output is kept, and with it all that precedes it"


def test_a_hint_beyond_the_share_is_clipped(small: Daemon) -> None:
    with small.connect() as pool:
        keys = keys_of(pool, 1, 20)
        save(pool, keys)
        outcome = pool.hint(_envelope("kv.retain", payload={"priority": 100}), keys).outcomes[0]
        assert outcome.status == "clipped"
        assert outcome.reason.startswith("8 chunks stay at the default priority")
        long = pool.hint(_envelope("kv.pin", payload={"end": 1, "duration": 1e6}), keys).outcomes[0]
        assert (long.status, long.reason) == ("clipped", "duration 1e+06 s is cut to 3600")


def _run(daemon: Daemon, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--socket", daemon.socket, "retain", *arguments], input="[1, 2, 3]")


def test_operators_retain_by_key_and_by_tokens(small: Daemon, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    with small.connect() as pool:
        keys = keys_of(pool, 1)
        save(pool, keys)
        by_key = _run(small, keys[0].hex(), "00" * 32, "--priority", "100", "--duration", "1h", "--json")
        assert by_key.exit_code == 0, by_key.stderr
        assert json.loads(by_key.stdout) == {
            "accepted": 1, "clipped": 0, "absent": 1, "priority": 100, "duration_s": 3600.0
        }  # fmt: skip
        prompt.write_text(json.dumps(tokens_of(6001, CHAIN * CHUNK_TOKENS).tolist()))
        by_tokens = _run(small, "--tokens-file", str(prompt), "--model", "test-model")
        assert by_tokens.exit_code == 0, by_tokens.stderr
        assert by_tokens.stdout == f"{CHAIN} chunks are kept at priority 100; 0 are not stored\n"
        press(pool, 2 * DRAM_CHUNKS // CHAIN)
        assert present(pool, keys) == CHAIN
        many = keys_of(pool, 2, 20)
        save(pool, many)
        prompt.write_text(" ".join(str(token) for token in tokens_of(6002, 20 * CHUNK_TOKENS)))
        clipped = _run(small, "--tokens-file", str(prompt), "--model", "test-model", "--priority", "60")
        assert clipped.exit_code == 1
        assert "12 clipped to the default" in clipped.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "name chunks by KEY"),
        (["zz"], 2, "expected 64 hexadecimal digits"),
        (["00" * 32, "--priority", "101"], 2, "101"),
        (["00" * 32, "--duration", "soon"], 2, "--duration"),
        (["00" * 32, "--duration", "0s"], 2, "expected more than 0"),
        (["--tokens-file", "-", "--model", "test-model"], 1, "there is no model test-model; models are "),
        (["--tokens-file", __file__, "--model", "test-model"], 2, "expected token ids: integers of 0 to 2147483647"),
        (["--tokens-file", __file__], 2, "--model M"),
        (["00" * 32], 1, ""),
    ],
)
def test_wrong_orders_are_named(shared_daemon: Daemon, arguments: list[str], code: int, message: str) -> None:
    done = _run(shared_daemon, *arguments)
    assert done.exit_code == code, done.stderr
    assert message in done.stderr


def test_retention_is_demoted_and_promoted_and_survives_a_restart(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(
        dram__capacity=f"{DRAM_CHUNKS * SMALL.chunk_bytes}B",
        ssd__path=str(tmp_path / "ssd"),
        ssd__capacity="64MiB",
    )
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    with daemon.connect() as pool:
        first, second = keys_of(pool, 1), keys_of(pool, 2)
        save(pool, first, retention=[kv.TokenRange(0, None, 80, 3600.0)])
        save(pool, second)
        with daemon.admin() as admin:
            assert admin.demote_all(60.0)["left"] == 0
        assert daemon.stats()["ssd.retained_chunks"] == CHAIN
        assert pool.retain(second, [kv.TokenRange(0, 2 * CHUNK_TOKENS, 90)]).accepted == 2
        assert daemon.stats()["ssd.retained_chunks"] == CHAIN + 2
        third = keys_of(pool, 3)
        save(pool, third)
        with daemon.admin() as admin:
            assert admin.demote_all(60.0)["left"] == 0
        assert save(pool, third, retention=[kv.TokenRange(0, 1, 70)]).present == CHAIN
        assert daemon.stats()["ssd.retained_chunks"] == CHAIN + 3
    assert daemon.stop() == 0
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open again")
    assert daemon.stats()["ssd.retained_chunks"] == CHAIN + 3
    with daemon.connect() as pool:
        for keys in (first, second):
            with pool.acquire(pool.lookup(keys)) as lease:
                assert lease.chunks == CHAIN
        wait_until(lambda: daemon.stats()["ssd.promotions_under_way"] == 0, "promotions have ended")
        press(pool, 2 * DRAM_CHUNKS // CHAIN)
        assert pool.lookup(first).tiers.tolist() == [Level.DRAM] * CHAIN
        assert pool.lookup(second).tiers.tolist() == [Level.DRAM] * 2 + [Level.SSD] * 2
    assert daemon.problems() == []
