"""The operator's command against the real daemon: its output and exit codes."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import kvpool_native
from kvpool_tools.bench.disk import has_disk
from kvpool_tools.bench.peer.engine_ways import ENGINE_WAYS
from kvpool_tools.bench.peer.peer import QUICK_SIZES, STREAMS
from tests.rigs import prompts
from tests.rigs.daemon import SMALL, Daemon, Start, wait_until
from tests.rigs.kvpoolctl import PROGRAM, ctl, ctl_json, execute
from tests.rigs.layouts import CHUNK, HYBRID
from tests.rigs.payload import store, tokens_of
from tests.rigs.transfer.engine_daemons import NIXL_REASON, REASON

COPIES = ("copy_save", "copy_load")


def test_info_lists_what_is_in_use(shared_daemon: Daemon) -> None:
    daemon = shared_daemon
    plain = execute("--socket", daemon.socket, "info")
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.startswith("# Info\n")
    values = ctl_json(daemon, "info")
    assert values["dram_capacity_bytes"] == 16 << 20
    assert (values["write_mode"], values["staging_bytes"]) == ("in-place", 0)
    assert f"epoch:{values['epoch']}\n" in plain.stdout
    assert "\nhealth:ready\nproblems:\n" in plain.stdout
    assert (values["health"], values["problems"]) == ("ready", [])


@pytest.mark.slow
def test_info_names_the_copy_variants_chosen_for_this_processor(daemon: Daemon) -> None:
    wait_until(lambda: not any("not measured" in daemon.info()[name] for name in COPIES), "the copies are measured")
    values = ctl_json(daemon, "info")
    for name in COPIES:
        assert values[name] == "no variants" or all(size in values[name] for size in ("4 KiB", "8 KiB", "32 KiB"))


def test_stats_count_what_was_stored(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        store(pool, pool.keys(tokens_of(1, 3 * 32)))
        sections = ctl_json(daemon, "stats")
        assert sections["dram"]["dram.chunks"] == 3
        assert sections["server"]["connections"] == 2
        plain = ctl(daemon, "stats", "dram").stdout
        assert f"dram.used_bytes:{3 * SMALL.chunk_bytes}\n" in plain
        assert "# Chunks" not in plain


def test_watch_prints_a_line_for_each_interval_within_the_terminals_width(shared_daemon: Daemon) -> None:
    watched = ctl(shared_daemon, "stats", "--watch", "--interval", "10ms", "--count", "22").stdout
    lines = watched.splitlines()
    assert len(lines) == 24
    assert lines[0] == lines[21]
    assert " ".join(lines[0].split()) == "chunks used saved/s evicted/s loaded/s hits leases saves clients"
    assert max(map(len, lines)) <= 80


def test_watch_shows_a_section_and_refuses_an_unknown_one(shared_daemon: Daemon) -> None:
    ask = ("--socket", shared_daemon.socket, "stats", "dram", "--watch", "--interval", "10ms", "--count", "2")
    blocks = ctl(None, *ask).stdout.split("\n\n")
    assert len(blocks) == 2
    assert all("dram.chunks:" in block and "connections:" not in block for block in blocks)
    rows = [json.loads(line) for line in ctl(None, *ask, "--json").stdout.splitlines()]
    assert [list(row) for row in rows] == [["dram"], ["dram"]]
    refused = ctl(shared_daemon, "stats", "tape", "--watch")
    assert refused.exit_code == 2
    assert "'tape' is no section, expected one of server" in refused.stderr


@pytest.mark.parametrize("option", [("--count", "2"), ("--interval", "1s")])
def test_what_goes_with_watch_alone_is_refused_without(shared_daemon: Daemon, option: tuple[str, str]) -> None:
    refused = ctl(shared_daemon, "stats", *option)
    assert (refused.exit_code, f"{option[0]} goes with --watch" in refused.stderr) == (2, True)


@pytest.mark.parametrize("command", ["stats --watch", "events --follow"])
def test_what_goes_on_until_it_is_interrupted_then_ends_well(shared_daemon: Daemon, command: str) -> None:
    line = [*PROGRAM, "--socket", shared_daemon.socket, *command.split()]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=60)
    assert (watching.returncode, errors) == (0, "")


def test_flush_asks_and_prints_what_it_did(shared_daemon: Daemon) -> None:
    daemon = shared_daemon
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 3 * 32))
        store(pool, keys)
        refused = ctl(daemon, "flush", "--all", answer="n\n")
        assert refused.exit_code == 1
        unasked = ctl(daemon, "flush", "--all")
        assert (unasked.exit_code, "nothing was dropped: --yes does it" in unasked.stderr) == (1, True)
        assert pool.lookup(keys).chunks == 3
        assert ctl(daemon, "flush", "--older-than", "1h", "--yes").stdout.startswith("dropped 0 ")
        done = ctl(daemon, "flush", "--model", "test-model", answer="y\n")
        assert done.exit_code == 0
        assert (
            done.stdout.splitlines()[-1]
            == f"dropped 3 chunks, {3 * SMALL.chunk_bytes / 1024:.1f} KiB; 0 are held and stay"
        )
        assert pool.lookup(keys).chunks == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["flush"],
        ["flush", "--all", "--model", "m"],
        ["flush", "--older-than", "soon"],
        ["flush", "--tier", "tape"],
        ["nonsense"],
        [],
    ],
)
def test_wrong_usage_exits_with_2(shared_daemon: Daemon, arguments: list[str]) -> None:
    assert ctl(shared_daemon, *arguments, "--yes" if "flush" in arguments else "--bad").exit_code == 2


def test_a_strict_check_is_good_only_if_all_is_well(start_daemon: Start, tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    daemon = start_daemon(ssd__path=str(path), ssd__capacity="64MiB", ssd__create="false")
    loose = ctl(daemon, "check", "--strict")
    assert loose.exit_code == 1
    assert "health: degraded, expected ready" in loose.stdout
    assert f"ssd: offline, expected ok: {path}: there is no such directory" in loose.stdout
    path.mkdir(mode=0o700)
    daemon.wait_open()
    strict = ctl(daemon, "check", "--strict")
    assert (strict.exit_code, strict.stdout) == (0, "0 problems, 0 chunks (dram: 0, ssd: 0)\n")
    assert ctl(daemon, "drain").exit_code == 0
    assert ctl(daemon, "check").exit_code == 0
    drained = ctl(daemon, "check", "--strict", "--json")
    assert drained.exit_code == 1
    assert json.loads(drained.stdout)["problems"] == ["health: draining, expected ready"]


@pytest.mark.parametrize("command", ["info", "stats", "flush", "check", "bench"])
def test_help_reads_like_a_manual_page(command: str) -> None:
    text = ctl(None, command, "--help").stdout
    assert text.startswith(f"Usage: kvpoolctl {command}")
    assert "Examples:" in text
    assert "3  daemon unreachable" in text


LATENCY = {"p50_us", "p99_us", "p50_spread_us", "times_floor", "times_floor_spread", "cpu_us", "daemon_cpu_us"}
RATE = {"save_gb_per_s", "load_gb_per_s", "memcpy_gb_per_s", "load_ratio", "save_ratio", "cpu_seconds"}

SHARES = {"memcpy_gb_per_s", "shards_gb_per_s", "by_one_ratio", "by_two_ratio_spread", "by_two_cpu_seconds_per_gb"}
FLOORS = {"gather_gb_per_s", "scatter_gb_per_s", "save_gather_ratio", "load_scatter_ratio", "save_gather_ratio_spread"}


@pytest.mark.slow
def test_bench_writes_rows_of_every_kind_that_name_their_units(tmp_path: Path) -> None:
    trace, out = tmp_path / "one.jsonl", tmp_path / "bench.json"
    trace.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n')
    run = execute("--json", "bench", "all", str(trace), "--quick", "--out", str(out))
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document == json.loads(out.read_text())
    assert set(document) == {"command", "version", "is_quick", "machine", "rows", "notes", "compared"}
    rows = document["rows"]
    ways = ["socket", "stream", *(["encrypted"] if kvpool_native.tls_library() else []), "shared memory"]
    engine_ways = [*([] if REASON else ENGINE_WAYS), *([] if NIXL_REASON else ["kvpool over NIXL"])]
    peer_rows = len([*ways, *engine_ways]) * len(QUICK_SIZES) * len(STREAMS)
    expected = [
        *[RATE | FLOORS | {"write_mode", "ratio", "load_ratio_spread", "save_daemon_cpu_seconds_per_gb"}] * 6,
        *[SHARES] * 4,
        *[LATENCY] * 21,
        *[{"requests_per_s", "requests_spread_per_s", "ratio", "ratio_spread", "daemon_cpu_us"}] * 2,
        {"ready_s", "ready_spread_s", "ready_times_floor", "rss_mib", "idle_cpu_seconds", "arena_mib"},
        {
            "ready_s",
            "ready_spread_s",
            "ready_bar_s",
            "found_s",
            "found_bar_s",
            "ready_empty_s",
            "cpu_seconds",
            "wrong_bytes",
        },
        *[{"hit_rate", "hit_rate_unkilled", "hit_ratio", "wrong_bytes"}] * 3,
        *([{"part", "wrong_bytes"}] * 11 if has_disk(None) else []),
        {"build_gb_per_cpu_s", "build_bar_gb_per_cpu_s"},
        *[{"threads", "recall_ms", "step_ms", "ratio", "ratio_spread"}] * min(2, len(os.sched_getaffinity(0))),
        *[{"way", "streams", "gb_per_s", "ratio", "cpu_seconds_per_gb", "first_extent_us"}] * peer_rows,
        *[{"round_trips", "round_trips_spread", "round_trips_bar", "p50_us"}] * 2,
        RATE | {"hit_rate", "ideal_hit_rate", "wrong_bytes", "load_spread_gb_per_s", "acquire_p99_us"},
    ]
    assert [sorted(keys - set(row)) for row, keys in zip(rows, expected, strict=True)] == [[]] * len(rows)


@pytest.mark.slow
def test_bench_measures_a_shared_daemon_time_and_again_and_leaves_nothing_there(
    start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVPOOL_TRACES", raising=False)
    daemon = start_daemon(dram__capacity="256MiB")
    for _ in range(2):
        run = execute("bench", "all", "--quick", "--socket", daemon.socket)
        assert run.returncode == 0, run.stderr
        assert (
            "engines, footprint, restart, ssd, sparse and peer are left out: they do not measure the daemon of --socket"
            in run.stdout
        )
        assert "replay is left out: name traces" in run.stdout
    assert daemon.stats()["dram.chunks"] == 0


def test_bench_ends_with_failure_where_a_figure_is_slower_than_in_an_earlier_document(tmp_path: Path) -> None:
    out, before = tmp_path / "now.json", tmp_path / "before.json"
    measure = ("bench", "engines", "--quick")
    assert execute(*measure, "--out", str(before)).returncode == 0
    full = execute(*measure, "--out", "/dev/full")
    line = "kvpoolctl: /dev/full cannot be written: No space left on device\n"
    assert (full.returncode, full.stderr.endswith(line)) == (1, True), full.stderr
    document = json.loads(before.read_text())
    for row in document["rows"]:
        row |= {"ratio": 100.0, "ratio_spread": [99.0, 101.0]}
    before.write_text(json.dumps(document))
    run = execute(*measure, "--out", str(out), "--against", str(before))
    assert run.returncode == 1
    assert f"slower than in {before}: " in run.stderr
    found = {(one["row"], one["figure"]): one for one in json.loads(out.read_text())["compared"]}
    assert {figure for _, figure in found} == {"ratio", "daemon_cpu_us"}
    assert {one["verdict"] for (_, figure), one in found.items() if figure == "ratio"} == {"slower"}
    document["machine"]["processor"] = "6502"
    before.write_text(json.dumps(document))
    run = execute(*measure, "--against", str(before))
    assert run.returncode == 0, run.stderr
    assert f"nothing is compared with {before}: its processor is 6502" in run.stdout


@pytest.mark.timed
def test_an_idle_daemon_is_small_and_sleeps() -> None:
    run = execute("bench", "footprint", "--quick", "--json", "--capacity", "256MiB")
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(run.stdout)["rows"]
    assert row["rss_mib"] <= row["rss_bar_mib"] == 45
    assert row["idle_cpu_seconds"] <= row["idle_cpu_bar_seconds"]
    assert row["arena_mib"] >= 256


def test_an_empty_model_is_no_order_to_drop_everything(shared_daemon: Daemon) -> None:
    daemon = shared_daemon
    refused = ctl(daemon, "flush", "--model", "", "--yes")
    assert refused.exit_code == 2
    assert "--model is empty" in refused.stderr


def test_a_model_that_there_is_not_is_a_failure_that_lists_those_that_there_are(daemon: Daemon) -> None:
    unknown = ctl(daemon, "flush", "--model", "nobody", "--yes")
    assert unknown.exit_code == 1
    assert unknown.stderr == (
        "kvpoolctl: there is no model nobody; models are none (a model with a revision is model@revision)\n"
    )
    with daemon.connect(model="llama", revision="5f0b"), daemon.connect(model="qwen"):
        unknown = ctl(daemon, "flush", "--model", "llama", "--yes")
        assert unknown.exit_code == 1
        assert "there is no model llama; models are llama@5f0b, qwen (" in unknown.stderr
        assert ctl(daemon, "flush", "--model", "qwen", "--yes").stdout.startswith("dropped 0 ")


def test_why_names_the_group_and_where_windows_are_stored(daemon: Daemon, tmp_path: Path) -> None:
    tokens = tokens_of(1, 4 * CHUNK + 1)
    with daemon.connect(HYBRID) as pool:
        assert prompts.store(pool, pool.keys(tokens)).declined == 0
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(tokens.tolist()))
    done = ctl(daemon, "why", "--tokens-file", str(prompt))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 4
    assert sum(line.startswith("full, chunk") and "stored in dram" in line for line in lines) == 4
    windows = [line for line in lines if line.startswith("window 59, chunk")]
    found = [("stored at boundaries only" in line, "stored in dram" in line) for line in windows]
    assert found == [(True, False)] * 2 + [(False, True)] * 2
