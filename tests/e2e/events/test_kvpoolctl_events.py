"""`kvpoolctl events` and `why` against the real daemon: their output and exit codes."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.keys import salt_tag
from tests.rigs.daemon import SMALL, Daemon, Start, wait_until
from tests.rigs.kvpoolctl import PROGRAM, ctl, ctl_json
from tests.rigs.payload import store, tokens_of

CHUNK = SMALL.chunk_tokens
OTHER = kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=16)


def test_events_are_printed_for_people_and_machines_and_in_trtllms_form(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNK * 3))
        store(pool, keys)
        with daemon.admin() as admin:
            admin.flush(None, None)
        plain = ctl(daemon, "events").stdout.splitlines()
        assert [line.split()[1] for line in plain] == ["created", "stored", "removed"]
        assert plain[1].split()[2:] == ["3", "test-model", "-", "->", "dram", keys[0].hex()[:16], "stored"]
        assert plain[2].split()[2:] == ["3", "test-model", "dram", "->", "-", keys[2].hex()[:16], "flushed"]
        rows = ctl_json(daemon, "events", "--since", "0")
        assert [row["id"] for row in rows] == [1, 2]
        assert rows[0]["keys"] == [keys[number].hex() for number in range(3)]
        (stored,) = json.loads(ctl(daemon, "events", "--format", "trtllm", "--since", "0", "--count", "1").stdout)
        assert stored["event_id"] == 1
        assert [block["tokens"][0]["token_id"] for block in stored["data"]["blocks"]] == tokens_of(1, CHUNK * 3)[
            ::CHUNK
        ].tolist()


def test_another_priority_has_no_cause(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNK))
        store(pool, keys)
        pool.retain(keys, [kv.TokenRange(0, None, 80)])
    line = ctl(daemon, "events").stdout.splitlines()[2]
    assert line.endswith(f"dram -> dram  {keys[0].hex()[:16]}  priority 35 -> 80")
    assert [row["cause"] for row in ctl_json(daemon, "events", "--since", "0")] == ["stored", ""]


def test_adapter_and_salt_tag_are_shown_and_the_salt_is_not(daemon: Daemon) -> None:
    with daemon.connect(salt=b"the tenant") as pool:
        store(pool, pool.keys(tokens_of(1, CHUNK), adapter="sql"))
        store(pool, pool.keys(tokens_of(1, CHUNK)))
    tag = salt_tag(b"the tenant").hex()
    lines = ctl(daemon, "events").stdout.splitlines()
    assert f"adapter sql  salt {tag[:16]}" in lines[1]
    assert "adapter" not in lines[2]
    rows = ctl_json(daemon, "events", "--since", "0")
    assert [(row["adapter"], row["salt_tag"]) for row in rows] == [("sql", tag), ("", tag)]
    printed = ctl(daemon, "events", "--format", "trtllm", "--since", "0").stdout
    assert [event["data"]["blocks"][0]["cache_salt"] for event in json.loads(printed)] == [tag, tag]
    assert "the tenant" not in "".join((*lines, json.dumps(rows), printed, daemon.log()))


def test_events_are_followed_as_they_happen(daemon: Daemon) -> None:
    command = [*PROGRAM, "--socket", daemon.socket, "events", "--follow", "--json", "--count", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["kind"] == "created"
        with daemon.connect() as pool:
            store(pool, pool.keys(tokens_of(1, CHUNK * 2)))
            assert len(json.loads(follower.stdout.readline())["keys"]) == 2
        assert follower.wait(60) == 0


def test_missing_events_are_reported_and_the_rest_is_printed(start_daemon: Start) -> None:
    daemon = start_daemon(events__buffer="64KiB")
    with daemon.connect() as pool:
        for number in range(60):
            store(pool, pool.keys(tokens_of(number, CHUNK * 8)))
    wait_until(lambda: int(daemon.stats()["events.dropped"]) > 0, "some are forgotten")
    printed = ctl(daemon, "events")
    assert "a gap: what happened before event" in printed.stderr
    assert printed.exit_code == 0
    assert len(printed.stdout.splitlines()) == daemon.stats()["events.buffered"]


@pytest.mark.parametrize(
    "arguments",
    [("--since", "-2"), ("--count", "0"), ("--format", "xml"), ("--block-tokens", "-1"), ("--block-tokens", "16")],
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...]) -> None:
    assert ctl(None, "events", *arguments).exit_code == 2


def test_why_reports_the_history_of_a_key(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNK * 2))
        store(pool, keys)
        first, second = keys[0].hex(), keys[1].hex()
        assert "stored in dram, priority 35" in ctl(daemon, "why", first).stdout
        assert "no chunk of other: namespace mismatch: stored" in ctl(daemon, "why", first, "--model", "other").stdout
        with daemon.admin() as admin:
            admin.flush(None, None)
        output = ctl(daemon, "why", first, second, "0" * 64).stdout.splitlines()
        assert "left dram" in output[0]
        assert "at priority 35: flushed by order" in output[1]
        assert "never stored" in output[2]
        (row,) = ctl_json(daemon, "why", second)
        assert (row["state"], row["reason"], row["tier"]) == ("removed", "flushed", "dram")


def test_why_reports_that_an_engine_had_its_share(start_daemon: Start) -> None:
    daemon = start_daemon(dram__connection_quota="0.000001")
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNK))
        assert store(pool, keys).reasons == {"quota": 1}
    assert "dram.connection_quota" in ctl(daemon, "why", keys[0].hex()).stdout


def test_why_reports_the_history_of_a_prompt(daemon: Daemon, tmp_path: Path) -> None:
    tokens = tokens_of(1, CHUNK * 3 + 5)
    path = tmp_path / "tokens"
    path.write_text(json.dumps(tokens.tolist()))
    with daemon.connect(salt=b"\x01\x02") as pool, daemon.connect(OTHER, model="third") as third:
        store(pool, pool.keys(tokens, adapter="lora"))
        store(third, third.keys(tokens))
        ask = ("why", "--tokens-file", str(path))
        salted = ("--model", "test-model", "--salt", "hex:0102", "--adapter", "lora")
        rows = ctl_json(daemon, *ask, *salted)
        assert [(row["chunk"], row["state"]) for row in rows] == [(0, "stored"), (1, "stored"), (2, "stored")]
        output = ctl(daemon, *ask, "--model", "test-model").stdout.splitlines()
        assert [line.endswith("to be known") for line in output] == [True] * 3 + [False] * 6
        assert all("(third) is no chunk of test-model: namespace mismatch: stored" in line for line in output[3:])
        spaced = "\n".join(str(token) for token in tokens)
        everywhere = ctl(daemon, "why", "--tokens-file", "-", answer=spaced).stdout.splitlines()
        assert len(everywhere) == 3 + 6
        nothing = ctl(daemon, *ask, "--model", "nobody's")
        assert "chunk 0" in nothing.stdout
        assert "namespace mismatch" in nothing.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "name one or more KEYs"),
        (("00",), "KEY is '00', expected 64 hexadecimal digits"),
        (("x" * 64,), "expected 64 hexadecimal digits"),
        (("0" * 64, "--tokens-file", "-"), "name one or more KEYs"),
        (("--tokens-file", "-", "--salt", "hex:xyz"), "--salt is 'hex:xyz', expected hexadecimal digits"),
    ],
)
def test_why_refuses_wrong_usage(arguments: tuple[str, ...], text: str) -> None:
    refused = ctl(None, "why", *arguments, answer="[1]")
    assert refused.exit_code == 2
    assert text in refused.output


@pytest.mark.parametrize(
    "text", ['{"a": 1}', "[1.5]", "[true]", "[-1]", "[4294967296]", '["1"]', "[[1]]", "[]", "1 2 x"]
)
def test_why_refuses_invalid_token_ids(text: str) -> None:
    refused = ctl(None, "why", "--tokens-file", "-", answer=text)
    assert refused.exit_code == 2
    assert "expected token ids" in refused.output


@pytest.mark.parametrize("salt", ["the tenant", "hex:7468652074656e616e74"])
def test_why_and_retain_take_the_salt_as_the_engine_gives_it(daemon: Daemon, salt: str) -> None:
    with daemon.connect(salt=b"the tenant") as pool:
        store(pool, pool.keys(tokens_of(1, CHUNK)))
    given = ("--tokens-file", "-", "--model", "test-model", "--salt", salt)
    prompt = ", ".join(map(str, tokens_of(1, CHUNK)))
    assert "stored in dram" in ctl(daemon, "why", *given, answer=prompt).stdout
    assert ctl(daemon, "retain", *given, answer=prompt).stdout.startswith("1 chunks are kept at priority 100")


def test_retain_reaches_the_chunks_of_every_rank_and_layout_of_a_model(daemon: Daemon) -> None:
    staged = replace(SMALL, layers=2, world=300, stages=(2, 1) * 10)
    with daemon.connect(replace(staged, rank=None)), daemon.connect(staged.for_rank(299)) as last:
        store(last, last.keys(tokens_of(1, CHUNK)))
    prompt = ", ".join(map(str, tokens_of(1, CHUNK)))
    answer = ctl(daemon, "retain", "--tokens-file", "-", "--model", "test-model", answer=prompt)
    assert answer.stdout == "1 chunks are kept at priority 100; 299 are not stored\n"


def test_why_finds_chunks_whose_keys_an_engine_hashes_by_their_token_ids(daemon: Daemon) -> None:
    prompt = tokens_of(1, CHUNK * 3)
    other = [*prompt[:CHUNK], *tokens_of(2, CHUNK * 2)]
    with daemon.connect() as pool:
        for number, tokens in enumerate((prompt, other)):
            hashes = [bytes([number, chunk]) * 16 for chunk in range(1, 4)]
            store(pool, pool.keys_from_hashes(hashes[: 2 + number], CHUNK, tokens=tokens))
        stored = pool.keys_from_hashes([b"\0\1" * 16, b"\0\2" * 16], CHUNK, tokens=prompt)
    given = ("why", "--tokens-file", "-", "--model", "test-model")
    text = " ".join(map(str, prompt))
    rows = ctl_json(daemon, *given, answer=text)
    assert [(row["key"], row["state"]) for row in rows] == [
        *((stored[chunk].hex(), "stored") for chunk in range(2)),
        ("", "unknown"),
    ]
    assert "known by its KEY alone" in ctl(daemon, *given, answer=text).stdout.splitlines()[2]
    salted = ctl(daemon, *given, "--salt", "another", answer=text).stdout
    assert salted.count("never stored") == 3


def test_why_reports_a_prompt_without_a_whole_chunk(daemon: Daemon) -> None:
    daemon.connect().close()
    short = ctl(daemon, "why", "--tokens-file", "-", answer="[1, 2, 3]")
    assert short.exit_code == 1
    assert "no whole chunk" in short.stderr


def test_why_names_the_models_that_there_are(daemon: Daemon) -> None:
    daemon.connect(revision="5f0b").close()
    unknown = ctl(daemon, "why", "--tokens-file", "-", "--model", "test-model", answer=str([*range(CHUNK)]))
    assert unknown.exit_code == 1
    assert "there is no model test-model; models are test-model@5f0b (" in unknown.stderr
