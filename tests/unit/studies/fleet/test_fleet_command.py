"""The fleet as a command: its rows, its table and its refusals."""

import json
import resource
from pathlib import Path
from typing import Any

import click
import pytest

from kvpool.errors import InvalidArgument
from kvpool_tools.cli.kvpoolctl import cli
from kvpool_tools.sim.traces import BLOCK_TOKENS
from studies.fleet import node_options
from studies.fleet.__main__ import fleet
from studies.fleet.node_options import allow_files
from tests.rigs.simulations import random_prompts

# Names that programs rely on; new ones are added, none is renamed.
ROW_NAMES = {
    *("trace", "policy", "router", "nodes", "seed", "peers", "capacity_fraction", "capacity_blocks"),
    *(
        "ssd_capacity_blocks",
        "store_capacity_blocks",
        "requests",
        "sessions",
        "references",
        "unique_blocks",
        "nodes_used",
    ),
    *("hit_blocks_dram", "hit_blocks_ssd", "hit_blocks_peer", "hit_blocks_store", "missed_blocks"),
    *("hit_rate", "hit_rate_local", "hit_rate_dram", "hit_rate_ssd", "hit_rate_peer", "hit_rate_store"),
    *(
        "stale_blocks",
        "slow_blocks",
        "pulls",
        "network_bytes_peer",
        "network_bytes_from_store",
        "network_bytes_to_store",
    ),
    *("network_busiest_share", "ssd_blocks_written", "index_entries", "index_bytes", "index_forgotten"),
    *("published_changes_per_s", "published_events_per_s", "received_changes_per_s", "received_events_per_s"),
    *("received_changes_peak", "recompute_seconds", "saved_seconds", "saved_share", "us_per_reference", "holes"),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of sixty-one requests, one a millisecond, that share prefixes."""
    path, names = tmp_path / "chat.jsonl", dict[str, int]()
    lines = []
    for number, prompt in enumerate(random_prompts(1, 60)):
        ids = [names.setdefault(name, len(names)) for name in prompt]
        fields = {"timestamp": number, "input_length": len(ids) * BLOCK_TOKENS, "output_length": 1, "hash_ids": ids}
        lines.append(json.dumps(fields) + "\n")
    path.write_text("".join(lines))
    return path


def _simulate(*arguments: object, command: click.Command = fleet) -> int:
    with pytest.raises(SystemExit) as ended:
        command([*map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def _rows(
    capsys: pytest.CaptureFixture[str], *arguments: object, command: click.Command = fleet
) -> list[dict[str, Any]]:
    assert _simulate(*arguments, "--json", command=command) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"command", "version", "machine", "rows"}
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def test_json_has_a_row_for_each_router_capacity_and_number(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routers = "session-affine,round-robin"
    more = ("--store", "50%", "--tiers", "dram,ssd", "--processes", 1)
    rows = _rows(capsys, trace, "--nodes", "1,3", "--capacity", "10%,20", "--router", routers, *more)
    assert [(row["router"], row["capacity_fraction"], row["nodes"]) for row in rows[:3]] == [
        *(("session-affine", 0.1, 1), ("session-affine", 0.1, 3)),
        ("session-affine", pytest.approx(20 / rows[0]["unique_blocks"], abs=1e-6), 1),
    ]
    assert len(rows) == 8
    for row in rows:
        assert set(row) == ROW_NAMES
        assert (row["trace"], row["policy"], row["requests"], row["holes"], row["seed"]) == (
            "chat",
            "class-queues",
            61,
            0,
            0,
        )
        blocks = ("dram", "ssd", "peer", "store")
        assert sum(row[f"hit_blocks_{name}"] for name in blocks) + row["missed_blocks"] == row["references"]
        assert row["index_bytes"] == 32 * row["index_entries"]
        assert row["network_bytes_peer"] == row["hit_blocks_peer"] * 64 << 20


def test_a_fleet_of_one_node_has_the_hits_of_that_node(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = (trace, "--capacity", "5%,20%", "--tiers", "dram,ssd", "--policy", "class-queues,lru", "--processes", 1)
    same = (
        "policy",
        "capacity_blocks",
        "ssd_capacity_blocks",
        "hit_blocks_dram",
        "hit_blocks_ssd",
        "ssd_blocks_written",
    )
    alone = [[row[name] for name in same] for row in _rows(capsys, "simulate", *more, command=cli)]
    assert alone == [[row[name] for name in same] for row in _rows(capsys, *more, "--nodes", 1)]


@pytest.mark.slow
def test_two_processes_find_what_one_finds(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_rows(capsys, trace, "--nodes", "1,2,5", "--router", "kv-aware", "--processes", count) for count in (1, 2)]
    for row in (*runs[0], *runs[1]):
        row.pop("us_per_reference")
    assert runs[0] == runs[1]


def test_a_capacity_of_all_nodes_is_divided(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--capacity", 40, "--tiers", "dram,ssd", "--ssd-ratio", 2, "--processes", 1)
    rows = _rows(capsys, trace, "--nodes", "1,4,100", "--capacity-of", "all", *more)
    assert [(row["capacity_blocks"], row["ssd_capacity_blocks"]) for row in rows] == [(40, 80), (10, 20), (1, 1)]


def test_the_table_names_the_seed_and_what_is_between_the_nodes(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--capacity", 40, "--store", "1GiB", "--seed", 11, "--processes", 1)
    assert _simulate(trace, "--nodes", "1,2", *more) == 0
    text = capsys.readouterr().out
    for word in ("61 requests", "sessions", "peer", "store", "changes/s in", "time saved", "holes"):
        assert word in text
    assert "peers with an index of 128.0 MiB, a store of 1GiB (used-again), seed 11" in text
    assert _simulate(trace, "--nodes", "2", "--peers", "off", "--processes", 1) == 0
    assert "no peers, no store, seed 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_picture_is_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "nodes.png"
    more = ("--router", "round-robin,kv-aware", "--capacity", "5%,10%", "--processes", 1)
    assert _simulate(trace, "--nodes", "1,2", "--png", picture, *more) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "0"), "--nodes has '0', expected numbers 1..4096"),
        (("--nodes", "1,4097"), "--nodes has '4097', expected numbers 1..4096"),
        (("--nodes", "two"), "--nodes has 'two', expected numbers"),
        (("--nodes", "1,,2"), "--nodes is '1,,2', expected entries"),
        (
            ("--nodes", "2", "--router", "random"),
            "--router has 'random', expected session-affine, kv-aware, round-robin",
        ),
        (("--router", "kv-aware"), "Missing option '--nodes'"),
        (("--nodes", "2", "--tiers", "hbm:1,dram"), "has hbm, which has no meaning for many nodes"),
        (("--nodes", "2", "--store", "much"), "--store has 'much', expected a share"),
        (("--nodes", "2", "--store-publish", "all"), "--store-publish goes with --store"),
        (("--nodes", "2", "--network-latency", "1"), "--network-latency: '1' is no duration"),
        (("--nodes", "2", "--disk-latency", "soon"), "--disk-latency: 'soon' is no duration"),
        (("--nodes", "2", "--event-delay", "-1s"), "--event-delay: '-1s' is no duration"),
        (("--nodes", "2", "--peer-index", "31B"), "--peer-index is '31B', expected 32B, one entry, at least"),
        (("--nodes", "2", "--peer-index", "big"), "--peer-index: 'big' is no size"),
        (("--nodes", "2", "--peers", "off", "--peer-index", "1MiB"), "--peer-index goes with --peers on"),
        (("--nodes", "2", "--network-gb-per-s", "0"), "Invalid value for '--network-gb-per-s'"),
        (("--nodes", "2", "--seed", "-1"), "Invalid value for '--seed'"),
        (("--nodes", "2", "--prefill-tokens-per-s", "nan"), "Invalid value for '--prefill-tokens-per-s': nan"),
    ],
)
def test_wrong_options_are_named(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert _simulate(trace, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


def test_more_nodes_than_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = [(100, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    with pytest.raises(InvalidArgument, match="--nodes 1000 needs 1064 open files, and the hard limit is 1000"):
        allow_files(1000)
    allow_files(900)
    allow_files(20)
    assert limits == [(100, 1000), (964, 1000)]


def test_every_default_is_an_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert _simulate("--help") == 0
    text = capsys.readouterr().out
    for name in node_options.DEFAULTS:
        assert f"--{name.replace('_', '-')} " in text
