"""`kvpoolctl bench replay` against real daemons: its counts, wrong bytes found, exit codes, nothing left behind."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.config.config import SSD_CAPACITY_MIN
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool_tools.bench.daemon import REVISION
from kvpool_tools.bench.disk import has_disk
from kvpool_tools.bench.payload import Payload
from kvpool_tools.bench.replay import clients as bench_clients
from kvpool_tools.bench.replay.client import MODEL, ReplaySettings, RequestResult, replay_layout
from kvpool_tools.bench.replay.clients import Clients
from kvpool_tools.bench.replay.replay import parse_capacity, plan_replay
from kvpool_tools.sim.traces import BLOCK_TOKENS, Trace
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.kvpoolctl import PROGRAM, ctl, execute
from tests.rigs.real_traces import real_traces
from tests.rigs.runs.processes import descendants_of, is_running

CHUNK_BYTES = 16 << 10
LAYOUT = replay_layout(CHUNK_BYTES, BLOCK_TOKENS)
SALT = "a-salt-of-the-test"
SMALL = ("--chunk-bytes", "16KiB")


def _trace(path: Path, *requests: list[int]) -> Path:
    """A trace whose requests have these full blocks, and seven tokens more."""
    lines = []
    for number, ids in enumerate(requests):
        tokens = len(ids) * BLOCK_TOKENS + 7
        fields = {"timestamp": number, "input_length": tokens, "output_length": 1, "hash_ids": [*ids, 10**6 + number]}
        lines.append(json.dumps(fields) + "\n")
    path.write_text("".join(lines))
    return path


def _conversations(path: Path, count: int, turns: int) -> Path:
    """Conversations over one system prompt of two blocks, their turns in a mixed order, each two blocks longer."""
    requests = [
        [0, 1, *(100 * (number + 1) + block for block in range(2 * turn))]
        for turn in range(1, turns + 1)
        for number in range(count)
    ]
    return _trace(path, *requests)


_run = partial(execute, "bench", "replay")


def _rows(run: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    document = json.loads(run.stdout)
    assert set(document) == {"command", "version", "is_quick", "machine", "rows", "notes", "compared"}
    assert document["command"] == "bench replay"
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def _keys(pool: kv.Pool, ids: list[int]) -> kv.KeyChain:
    hashes = [kvpool_native.blake3(value.to_bytes(8, "little")) for value in ids]
    return pool.keys_from_hashes(hashes, BLOCK_TOKENS)


def _own_pool(daemon: Daemon) -> kv.Pool:
    """A Pool that makes the keys of a replay with `SALT`."""
    return daemon.connect(LAYOUT, model=MODEL, revision=REVISION, salt=SALT.encode())


def test_one_client_with_room_for_all_hits_what_an_infinite_cache_would(tmp_path: Path) -> None:
    trace = _conversations(tmp_path / "chat.jsonl", 3, 4)
    run = _run(trace, "--json", "--clients", 1, "--capacity", "400%", *SMALL)
    assert run.returncode == 0, run.stderr
    (row,) = _rows(run)
    assert (row["trace"], row["requests"], row["clients"]) == ("chat", 12, 1)
    assert row["hit_rate"] == row["ideal_hit_rate"]
    unique = 2 + 3 * 8
    asked = sum(2 + 2 * turn for turn in range(1, 5)) * 3
    assert row["unique_bytes"] == unique * CHUNK_BYTES
    assert (row["saved_chunks"], row["verified_chunks"]) == (unique, asked - unique)
    tokens = asked * BLOCK_TOKENS + 12 * 7
    assert row["hit_rate"] == pytest.approx((asked - unique) * BLOCK_TOKENS / tokens, abs=1e-4)
    assert row["wrong_bytes"] == 0
    assert (row["loads_short"], row["saves_declined"], row["evicted_chunks"]) == ({}, {}, 0)
    assert (row["ssd_capacity_bytes"], row["hit_tokens_ssd"], row["ssd_written_per_hit_byte"]) == (0, 0, None)
    for name in ("load_p50_us", "save_p99_us", "acquire_p50_us"):
        assert row[name] > 0, name
    # A busy machine's rate of so few bytes may be rounded to nothing.
    assert {"load_gb_per_s", "save_gb_per_s", "memcpy_gb_per_s"} <= set(row)
    assert row["cpu_seconds"] == pytest.approx(row["daemon_cpu_seconds"] + row["client_cpu_seconds"], abs=0.011)


@pytest.mark.slow
def test_several_clients_in_a_tight_arena_lose_chunks_and_no_bytes(tmp_path: Path) -> None:
    trace = _conversations(tmp_path / "chat.jsonl", 12, 8)
    run = _run(trace, "--json", "--clients", 3, "--capacity", "20%", *SMALL)
    assert run.returncode == 0, run.stderr
    (row,) = _rows(run)
    assert (row["requests"], row["clients"], row["wrong_bytes"]) == (96, 3, 0)
    assert row["capacity_bytes"] == parse_capacity("20%", row["unique_bytes"])
    assert row["evicted_chunks"] > 0
    assert 0 < row["hit_rate"] < row["ideal_hit_rate"]


@pytest.mark.slow
def test_an_ssd_tier_serves_chunks_that_dram_has_no_room_for(tmp_path: Path) -> None:
    if not has_disk(str(tmp_path)):
        pytest.skip("the folder for temporary files is on no disk")
    trace = _conversations(tmp_path / "chat.jsonl", 12, 8)
    disk = tmp_path / "disk"
    disk.mkdir()
    run = _run(trace, "--json", "--clients", 2, "--capacity", "20%", "--ssd-ratio", 8, "--path", disk, *SMALL)
    assert run.returncode == 0, run.stderr
    (row,) = _rows(run)
    assert (row["wrong_bytes"], row["checksum_failures"]) == (0, 0)
    assert row["hit_tokens_ssd"] > 0
    assert row["hit_tokens_dram"] > 0
    assert row["hit_rate"] == pytest.approx(row["hit_rate_dram"] + row["hit_rate_ssd"], abs=2e-4)
    assert row["hit_rate"] <= row["ideal_hit_rate"]
    assert row["hit_tokens_dram"] + row["hit_tokens_ssd"] == row["verified_chunks"] * BLOCK_TOKENS
    assert row["ssd_hit_bytes"] == row["hit_tokens_ssd"] // BLOCK_TOKENS * CHUNK_BYTES
    assert row["ssd_written_per_hit_byte"] == pytest.approx(row["ssd_written_bytes"] / row["ssd_hit_bytes"], abs=1e-3)
    assert 0 < row["ssd_capacity_bytes"] <= SSD_CAPACITY_MIN
    assert list(disk.iterdir()) == []


def test_wrong_bytes_exit_with_1_and_print_the_key(daemon: Daemon, tmp_path: Path) -> None:
    """A chunk that some client stored with other bytes than its key asks for: only comparing contents finds it."""
    trace = _trace(tmp_path / "t.jsonl", [0, 1, 2])
    with _own_pool(daemon) as pool:
        keys = _keys(pool, [0, 1])
        rows = np.zeros((2, CHUNK_BYTES), np.uint8)
        Payload(LAYOUT).fill(rows, keys, 0)
        rows[1, LAYOUT.layer_bytes + 5] ^= 1
        result = pool.save(keys, from_=rows).commit()
        assert result is not None
        assert result.stored == 2
        run = _run(trace, "--json", "--socket", daemon.socket, "--salt", SALT, *SMALL)
        key = keys[1].hex()
    assert run.returncode == 1
    (row,) = _rows(run)
    assert (row["wrong_bytes"], row["wrong_keys"]) == (1, [f"{key} layer 1"])
    assert f"{key} layer 1" in run.stderr


@pytest.mark.slow
def test_wrong_usage_is_refused_with_a_remedy(tmp_path: Path) -> None:
    trace = _conversations(tmp_path / "chat.jsonl", 1, 1)
    for arguments, message in (
        ((), "name traces, or the folder they are in by KVPOOL_TRACES=FOLDER"),
        ((trace, "--capacity", "2 barrels"), "'2 barrels' is no size"),
        ((trace, "--capacity", "-3%"), "'-3%' is no share"),
        ((trace, "--chunk-bytes", "5000"), "expected a multiple of 4096"),
        ((trace, "--socket", "/nowhere/kvpool.sock", "--capacity", "1GiB"), "leave it or --socket out"),
        (
            (trace, "--socket", "/nowhere/kvpool.sock", "--ssd-ratio", 8),
            "--ssd-ratio is for a daemon of the benchmark's own",
        ),
        ((trace, "--ssd-ratio", 8, "--path", "/nowhere"), "/nowhere is no folder that can be written"),
        ((trace, "--out", "/nowhere/bench.json"), "expected a file that can be written"),
        ((trace, "--out", ""), "--out is '.', expected a file that can be written"),
        ((trace, "--times", "/nowhere/times"), "--times is for one trace with --settled"),
        ((trace, trace, "--settled", "--times", "/nowhere/times"), "--times is for one trace with --settled"),
        ((trace, "--settled", "--times", "/nowhere/times"), "expected a file that can be written"),
    ):
        refused = _run(*arguments)
        assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
        assert message in refused.stderr
    assert _run(trace, "--clients", 0).returncode == 2
    assert _run(trace, "--socket", "/nowhere/kvpool.sock").returncode == 3


def test_a_bad_trace_is_refused_before_a_daemon_starts(tmp_path: Path) -> None:
    trace = _conversations(tmp_path / "chat.jsonl", 1, 2)
    with trace.open("a") as file:
        file.write('{"timestamp": 1, "input_length": "many", "output_length": 1, "hash_ids": []}\n')
    refused = ctl(None, "bench", "replay", trace)
    assert refused.exit_code == 2
    assert f"{trace}: line 3: input_length is 'many', expected an integer 1.." in refused.stderr
    assert "Traceback" not in refused.stderr
    tiny = _trace(tmp_path / "tiny.jsonl", [], [])
    assert "no prompt of 2 has a full block of 512 tokens" in ctl(None, "bench", "replay", tiny).stderr


def test_a_plan_counts_what_an_infinite_cache_hits(tmp_path: Path) -> None:
    trace = Trace(_trace(tmp_path / "t.jsonl", [0, 1, 2], [0, 1, 3, 2], [7], [0, 1, 3]))
    plan = plan_replay(trace, None, CHUNK_BYTES)
    assert (plan.requests, plan.chunks, plan.unique_chunks, plan.chunks_max) == (4, 11, 5, 4)
    assert plan.ideal_tokens == (0 + 2 + 0 + 3) * BLOCK_TOKENS
    assert plan.input_tokens == 11 * BLOCK_TOKENS + 4 * 7
    assert plan_replay(trace, 2, CHUNK_BYTES).ideal_tokens == 2 * BLOCK_TOKENS
    assert plan_replay(trace, None, 30 << 30).requests == 1, "a run that nobody counted is bounded by its bytes"


def test_a_capacity_is_a_size_or_a_share() -> None:
    assert parse_capacity("64MiB", 0) == 64 << 20
    assert parse_capacity("12.5%", 800) == 100
    for text in ("0%", "nan%", "%", "10001%", "much"):
        with pytest.raises(InvalidArgument):
            parse_capacity(text, 800)


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path: a socket's path has 107 bytes at most."""
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def running(short: Path, tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Starts a replay of some ten seconds, for tests that act in the middle of it."""
    trace = _conversations(tmp_path / "chat.jsonl", 80, 40)
    started: list[subprocess.Popen[bytes]] = []

    def start() -> "subprocess.Popen[bytes]":
        command = [*PROGRAM, "bench", "replay", str(trace)]
        environment = {**os.environ, "TMPDIR": str(short)}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        started.append(process)
        wait_until(lambda: process.poll() is not None or len(descendants_of(process.pid)) == 3, "it runs", 120.0)
        assert process.poll() is None, "a daemon and two clients run"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_the_command(
    running: Callable[[], "subprocess.Popen[bytes]"], short: Path, number: signal.Signals
) -> None:
    process = running()
    children = descendants_of(process.pid)
    process.send_signal(number)
    assert process.wait(120.0) == (-number if number == signal.SIGKILL else 1)
    wait_until(lambda: not any(is_running(pid) for pid in children), "all of its processes have ended")
    if number != signal.SIGKILL:
        assert not list(short.glob("kvpool-bench-*"))


def test_a_client_that_is_killed_fails_the_run(running: Callable[[], "subprocess.Popen[bytes]"]) -> None:
    process = running()
    children = descendants_of(process.pid)
    client = next(
        pid for pid in children if b"kvpool_tools.bench.replay.client" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(client, signal.SIGKILL)
    assert process.wait(120.0) == 1
    assert not any(is_running(pid) for pid in children)


def test_a_client_that_sends_nothing_is_given_up(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ReplaySettings(daemon.socket, SALT, CHUNK_BYTES, BLOCK_TOKENS, 4)
    served: list[RequestResult] = []
    others = descendants_of(os.getpid())
    with Clients(settings, 1) as clients:
        (child,) = descendants_of(os.getpid()) - others
        os.kill(child, signal.SIGSTOP)
        monkeypatch.setattr(bench_clients, "ANSWER_TIMEOUT_S", 0.2)
        monkeypatch.setattr(bench_clients, "STOP_TIMEOUT_S", 0.2)
        with pytest.raises(KVPoolError, match="1 client processes gave no answer"):
            clients.serve(iter([(1, 2, 3)]), served.append)
    assert served == []
    assert not is_running(child)


@pytest.mark.slow
@pytest.mark.skipif(real_traces() is None, reason="no traces: name their folder by KVPOOL_TRACES")
def test_real_traces_load_right_bytes() -> None:
    run = _run("--quick", "--json", KVPOOL_TRACES=str(real_traces()))
    assert run.returncode == 0, run.stderr
    rows = _rows(run)
    assert rows
    for row in rows:
        assert row["wrong_bytes"] == 0, row
        assert row["verified_chunks"] > 0, row
        assert row["hit_rate"] <= row["ideal_hit_rate"], row
