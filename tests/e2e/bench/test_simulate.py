"""`kvpoolctl simulate` as a command: its output, its refusals, and a live daemon that has the same hits."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool_tools.bench.disk import has_disk
from kvpool_tools.cli.simulation.options import parse_blocks
from kvpool_tools.sim.pool import POLICIES
from kvpool_tools.sim.replay_times import write_times
from kvpool_tools.sim.traces import BLOCK_TOKENS
from tests.rigs.kvpoolctl import ctl, execute
from tests.rigs.simulations import random_prompts

# Names that programs rely on, in their order; new ones are added at the end of a group, none is renamed.
ROW_NAMES = {
    *("trace", "policy", "capacity_fraction", "capacity_blocks", "hit_rate", "belady_hit_rate", "lru_hit_rate"),
    *("holes", "us_per_reference", "hit_rate_dram", "hit_rate_ssd", "ssd_blocks_written"),
    *("ssd_capacity_blocks", "requests", "references", "unique_blocks", "hit_blocks_dram", "hit_blocks_ssd"),
    *("of_belady", "delta_lru_points"),
    *("hbm_capacity_blocks", "hit_blocks_hbm", "hit_rate_hbm", "hbm_blocks_promoted", "hbm_blocks_returned"),
    "blocks_moved_per_hit",
}


def _trace(path: Path, prompts: list[list[str]], tail: bool = False) -> Path:
    names: dict[str, int] = {}
    lines = []
    for number, prompt in enumerate(prompts):
        ids = [names.setdefault(name, len(names)) for name in prompt]
        tokens = len(ids) * BLOCK_TOKENS + 7
        fields = {"timestamp": number, "input_length": tokens, "output_length": 1}
        lines.append(json.dumps({**fields, "hash_ids": [*ids, 10**9 + number] if tail else ids}) + "\n")
    path.write_text("".join(lines))
    return path


def _simulate(*arguments: object) -> Result:
    """In this process, and in no other one."""
    alone = () if "--processes" in arguments else ("--processes", 1)
    return ctl(None, "simulate", *arguments, *alone)


def _rows(run: "subprocess.CompletedProcess[str] | Result", command: str = "simulate") -> list[dict[str, Any]]:
    assert (run.exit_code if isinstance(run, Result) else run.returncode) == 0, run.stderr
    document = json.loads(run.stdout)
    own = set(document) - {"notes", "is_quick", "compared"}  # a replay has these too
    assert own == {"command", "version", "machine", "rows"}
    assert document["command"] == command
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def test_json_has_a_row_for_each_capacity_and_policy(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(1, 60))
    rows = _rows(execute("simulate", trace, "--json", "--capacity", "10%,0.5,20", "--processes", 1))
    assert [(row["policy"], row["capacity_fraction"]) for row in rows[: len(POLICIES)]] == [(n, 0.1) for n in POLICIES]
    assert len(rows) == 3 * len(POLICIES)
    for row in rows:
        assert set(row) == ROW_NAMES
        assert (row["trace"], row["requests"], row["holes"]) == ("chat", 60 + 1, 0)
        assert row["hit_rate"] <= row["belady_hit_rate"]
        assert (row["hit_rate_ssd"], row["ssd_blocks_written"], row["ssd_capacity_blocks"]) == (0, 0, 0)
        assert row["hit_rate_dram"] == row["hit_rate"]
        if row["policy"] == "lru":
            assert row["hit_rate"] == row["lru_hit_rate"]
            assert row["delta_lru_points"] == 0
    last = rows[-1]
    assert last["capacity_blocks"] == 20
    assert last["capacity_fraction"] == pytest.approx(20 / last["unique_blocks"], abs=1e-6)


def test_one_process_finds_what_two_find(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(2, 40))
    asked = (trace, "--json", "--tiers", "dram,ssd", "--policy", "lru,class-queues")
    runs = [_rows(_simulate(*asked, "--processes", count)) for count in (1, 2)]
    for row in (*runs[0], *runs[1]):
        row.pop("us_per_reference")
        assert row["hit_rate"] == pytest.approx(row["hit_rate_dram"] + row["hit_rate_ssd"], abs=2e-6)
        assert row["ssd_capacity_blocks"] == 8 * row["capacity_blocks"]
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_sizes_in_tiers_are_those_of_the_other_options(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(2, 60))
    asked = ("simulate", trace, "--json", "--policy", "class-queues")
    two = _rows(execute(*asked, "--tiers", "dram,ssd", "--capacity", "10%", "--ssd-capacity", "50"))
    same = _rows(execute(*asked, "--tiers", "dram:10%,ssd:50"))
    three = _rows(execute(*asked, "--tiers", "hbm:8,dram:10%,ssd:50"))
    for (row,) in (two, same, three):
        row.pop("us_per_reference")
    assert two == same
    assert [row["hbm_capacity_blocks"] for row in (*same, *three)] == [0, 8]
    assert three[0]["hit_rate"] >= two[0]["hit_rate"]
    assert three[0]["hit_blocks_hbm"] > 0
    assert 0 < three[0]["hbm_blocks_promoted"] <= 8 + 1.5 * three[0]["hit_blocks_hbm"]
    shown = execute(*asked[:2], "--tiers", "hbm:8,dram:10%,ssd:50").stdout
    for word in ("from HBM", "from DRAM", "from SSD", "to HBM/hit there", "moved/hit"):
        assert word in shown


@pytest.mark.slow
def test_partial_blocks_are_counted_and_not_stored_unless_asked(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(3, 30), tail=True)
    of = {
        tails: next(
            row
            for row in _rows(
                execute("simulate", trace, "--json", "--capacity", "16", "--requests", 20, "--tails", tails)
            )
            if row["policy"] == "lru"
        )
        for tails in ("counted", "stored", "left-out")
    }
    assert of["counted"]["references"] == of["stored"]["references"] == of["left-out"]["references"] + 20
    assert of["counted"]["unique_blocks"] == of["stored"]["unique_blocks"] == of["left-out"]["unique_blocks"] + 20
    assert of["stored"]["hit_blocks_dram"] < of["left-out"]["hit_blocks_dram"], "what is never used again takes room"
    assert of["counted"]["hit_blocks_dram"] == of["left-out"]["hit_blocks_dram"]
    assert of["counted"]["lru_hit_rate"] == of["stored"]["lru_hit_rate"] == of["stored"]["hit_rate"]


def test_a_document_that_finds_no_room_is_one_line_and_a_failure(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(4, 30))
    run = _simulate(trace, "--capacity", "50%", "--policy", "lru", "--out", "/dev/full")
    assert (run.exit_code, run.stderr) == (1, "kvpoolctl: /dev/full cannot be written: No space left on device\n")
    with pytest.raises(InvalidArgument, match="--times /dev/full cannot be written: No space left on device"):
        write_times(Path("/dev/full"), [1.0])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_picture_that_finds_no_room_is_one_line_and_a_failure(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(4, 30))
    run = _simulate(trace, "--capacity", "50%", "--policy", "lru", "--png", "/dev/full")
    assert (run.exit_code, run.stderr) == (1, "kvpoolctl: /dev/full cannot be written: No space left on device\n")


def test_the_human_readable_output_is_a_table_and_a_document(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(4, 30))
    out = tmp_path / "rows.json"
    run = _simulate(trace, "--capacity", "50%", "--tiers", "dram,ssd", "--ssd-capacity", "200%", "--out", out)
    assert run.exit_code == 0, run.stderr
    for word in ("chat: 31 requests", "from DRAM", "from SSD", "of optimum", "to LRU, points", "holes"):
        assert word in run.stdout
    for policy in POLICIES:
        assert f"{policy}: " in run.stdout
    assert len(json.loads(out.read_text())["rows"]) == len(POLICIES)


def test_a_picture_is_drawn_or_the_extra_is_named(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(5, 30))
    picture = tmp_path / "hits.png"
    run = _simulate(trace, "--tiers", "dram,ssd", "--policy", "lru", "--capacity", "10%,50%", "--png", picture)
    if importlib.util.find_spec("matplotlib") is None:
        assert run.exit_code == 2
        assert "pip install 'kvpool[plot]'" in run.stderr
    else:
        assert run.exit_code == 0, run.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(5, 5))
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = _simulate(trace, "--png", tmp_path / "hits.png")
    assert (run.exit_code, run.stdout) == (2, "")
    assert "--png needs matplotlib, which is not installed: pip install 'kvpool[plot]'" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/nowhere/chat.jsonl",), "/nowhere/chat.jsonl: No such file or directory"),
        (("chat.txt",), "chat.txt: name of no known form"),
        (("TRACE", "--policy", "lru,fifo"), "--policy has 'fifo', expected "),
        (("TRACE", "--policy", ""), "--policy is '', expected entries"),
        (("TRACE", "--capacity", "0"), "--capacity has '0', 0 blocks"),
        (("TRACE", "--capacity", "0%"), "--capacity has '0%', expected a share"),
        (("TRACE", "--capacity", "1%,many"), "--capacity has 'many', expected a share"),
        (("TRACE", "--capacity", "1MiB"), "--capacity has '1MiB', 0 blocks of 64.0 MiB"),
        (("TRACE", "--token-bytes", "none"), "--token-bytes: 'none' is no size"),
        (("TRACE", "--ssd-capacity", "9"), "--ssd-capacity goes with --tiers dram,ssd"),
        (("TRACE", "--tiers", "hbm:1%,ssd:9"), "--tiers is 'hbm:1%,ssd:9', expected dram among them"),
        (("TRACE", "--tiers", "hbm,dram"), "--tiers is 'hbm,dram', expected a size of hbm"),
        (("TRACE", "--tiers", "dram,tape"), "--tiers is 'dram,tape', expected dram, hbm and ssd"),
        (("TRACE", "--tiers", "dram,dram:3"), "--tiers is 'dram,dram:3', expected dram, hbm and ssd"),
        (("TRACE", "--tiers", "dram:"), "--tiers is 'dram:', expected dram, hbm and ssd"),
        (("TRACE", "--tiers", "hbm:0,dram"), "--tiers hbm has '0', 0 blocks"),
        (("TRACE", "--tiers", "dram:5%", "--capacity", "1%"), "has a size of dram: leave --capacity out"),
        (("TRACE", "--tiers", "dram,ssd:5%", "--ssd-ratio", "2"), "has a size of ssd: leave --ssd-ratio out"),
        (("TRACE", "--tiers", "dram,ssd:x"), "--ssd-capacity has 'x'"),
        (("TRACE", "--ssd-ratio", "nan", "--tiers", "dram,ssd"), "Invalid value for '--ssd-ratio': nan is no number"),
        (
            ("TRACE", "--capacity", "1000000", "--tiers", "dram,ssd", "--ssd-ratio", "1000"),
            "expected 268435456 at most",
        ),
        (("TRACE", "--set", "dram.capacity=1GiB"), "--set dram.capacity has no meaning in a simulation"),
        (("TRACE", "--set", "ssd.watermark=7"), "ssd.watermark is '7', expected"),
        (("TRACE", "--png", "/nowhere/a.png"), "--png is '/nowhere/a.png'"),
        (("TRACE", "--socket", "/run/kvpool.sock"), "simulate uses no daemon"),
        (("TRACE", "TRACE", "--times", "/nowhere/times"), "--times is for one trace"),
        (("TRACE", "--times", "/nowhere/times"), "--times /nowhere/times: [Errno 2]"),
    ],
)
def test_wrong_input_is_named(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(5, 5))
    refused = ctl(None, "simulate", *(trace if argument == "TRACE" else argument for argument in arguments))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert message in refused.stderr


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(5, 5))
    trace.write_text(trace.read_text() + "{broken\n")
    run = _simulate(trace)
    assert run.exit_code == 2
    assert f"{trace}: line 7: no JSON" in run.stderr


@pytest.mark.parametrize(
    ("text", "blocks"), [("5%", 50), ("0.05", 50), ("7", 7), ("64MiB", 1), ("1GiB", 16), ("100%", 1000), ("1.5GiB", 24)]
)
def test_a_capacity_is_a_share_or_blocks_or_bytes(text: str, blocks: int) -> None:
    assert parse_blocks(text, 1000, 64 << 20) == blocks


@pytest.mark.parametrize("text", ["-1", "1001%", "nan%", "11.0", "5 %%", "99999999TiB"])
def test_other_capacities_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="capacity"):
        parse_blocks(text, 1000, 64 << 20)


def _replayed_and_simulated(trace: Path, disk: Path | None, *options: object) -> list[tuple[int, ...]]:
    """(hits from DRAM, hits from SSD, blocks written) of a live daemon with real bytes, and of its simulation at its times."""
    times = ("--times", trace.with_suffix(".times"))
    ssd = ("--ssd-ratio", 8, "--path", disk) if disk else ()
    small = ("--chunk-bytes", "4KiB", "--capacity", "512KiB", "--set", "dram.policy=lru")
    run = execute("bench", "replay", trace, "--settled", *times, "--json", *small, *ssd, *options)
    assert run.returncode == 0, run.stderr
    (row,) = _rows(run, "bench replay")
    assert row["wrong_bytes"] == 0
    written = row["ssd_written_bytes"] // (row["chunk_bytes"] + kvpool_native.SSD_HEADER_BYTES)
    live = (row["hit_tokens_dram"] // BLOCK_TOKENS, row["hit_tokens_ssd"] // BLOCK_TOKENS, written)
    sizes = ("--capacity", row["capacity_chunks"], "--policy", "lru", *times)
    slower = ("--tiers", "dram,ssd", "--ssd-capacity", row["ssd_capacity_chunks"]) if disk else ()
    (cell,) = _rows(execute("simulate", trace, "--tails", "left-out", "--json", *sizes, *slower, *options))
    assert cell["unique_blocks"] > row["capacity_chunks"] + row["ssd_capacity_chunks"], "nothing had to go"
    return [live, (cell["hit_blocks_dram"], cell["hit_blocks_ssd"], cell["ssd_blocks_written"])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "window", "has_tiers", "options"),
    [
        (300, 60, False, ()),
        (900, 400, True, ("--set", "ssd.write_through=true")),  # writes that do not depend on the speed of the disk
        (900, 400, True, ()),
    ],
    ids=["dram", "write-through", "as dram fills"],
)
def test_a_daemon_hits_what_its_simulation_hits(
    tmp_path: Path, requests: int, window: int, has_tiers: bool, options: tuple[str, ...]
) -> None:
    if has_tiers and not has_disk(str(tmp_path)):
        pytest.skip("the folder for temporary files is on no disk")
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(6, requests, window=window))
    live, simulated = _replayed_and_simulated(trace, tmp_path if has_tiers else None, *options)
    assert live == simulated
    assert min(live[: 3 if has_tiers else 1]) > 0


@pytest.mark.parametrize(
    ("written", "message"),
    [("", "0 times"), ("1\n-1\n", "none below 0"), ("soon\n", "expected seconds"), ("1\n" * 8, "8 times, ")],
)
def test_invalid_times_are_refused(tmp_path: Path, written: str, message: str) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(5, 6))
    times = tmp_path / "times"
    times.write_text(written)
    run = _simulate(trace, "--times", times)
    assert (run.exit_code, run.stdout) == (2, "")
    assert message in run.stderr


def test_a_simulation_at_the_times_of_a_replay_has_its_requests_alone(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "chat.jsonl", random_prompts(5, 6))
    times = tmp_path / "times"
    times.write_text("1\n2\n9.5\n")
    (row,) = _rows(_simulate(trace, "--times", times, "--capacity", "50%", "--policy", "lru", "--json"))
    assert row["requests"] == 3
