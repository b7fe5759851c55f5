"""Simulation of a model with windows: hits against a plain model, bounds of room, the command's rows and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.config.config import load_config
from kvpool.errors import InvalidArgument
from kvpool_tools.cli.kvpoolctl import cli
from kvpool_tools.cli.simulation.group_options import GroupOptions
from kvpool_tools.sim.cells import Cell, run_cell
from kvpool_tools.sim.grouped_cell import GroupedCell, run_grouped
from kvpool_tools.sim.traces import BLOCK_TOKENS
from kvpool_tools.sim.workload import Workload
from tests.rigs.real_traces import real_trace
from tests.rigs.simulations import load, random_prompts, workload_of

COLUMNS = {
    "window_tokens",
    "full_share",
    "hit_blocks_groups",
    "hit_rate_groups",
    "holes_groups",
    "us_per_reference_groups",
}


def _cell(
    blocks: int, *, window_blocks: int = 2, policy: str = "lru", full_layers: int = 1, layers: int = 4
) -> GroupedCell:
    return GroupedCell(policy, blocks, window_blocks, full_layers, layers)


def _hits(workload: Workload, cell: GroupedCell) -> int:
    outcome = run_grouped(workload, cell, load_config(None, ()))
    assert outcome.holes == 0
    return outcome.hits


def _expected_hits(workload: Workload, window_blocks: int) -> int:
    """Hits with room for everything, by sets."""
    full: set[int] = set()
    window: set[int] = set()
    hits = 0
    for chain in workload.chains():
        run = next((depth for depth, block in enumerate(chain) if block not in full), len(chain))
        ends = (end for end in range(run, 0, -1) if window.issuperset(chain[max(0, end - window_blocks) : end]))
        hits += next(ends, 0)
        full.update(chain)
        for end in (run, len(chain)):
            window.update(chain[max(0, end - window_blocks) : end])
    return hits


def test_a_prompt_goes_on_at_ends_and_at_a_junction_from_its_third_use_on() -> None:
    shared = [f"s{depth}" for depth in range(6)]
    long = [*shared, *(f"a{depth}" for depth in range(4))]
    prompts = [long, [*shared, "b"], [*shared, "c"], long, [*long, "d"]]
    assert _hits(workload_of(prompts), _cell(100)) == 0 + 0 + 6 + 10 + 10
    assert run_cell(workload_of(prompts), Cell("lru", 100, 0), load_config(None, ())).hits == 0 + 6 + 6 + 10 + 10


@pytest.mark.parametrize("window_blocks", [1, 3, 50])
@pytest.mark.parametrize("policy", ["lru", "class-queues"])
def test_with_room_for_everything_hits_are_those_of_plain_sets(seed: int, policy: str, window_blocks: int) -> None:
    workload = workload_of(random_prompts(seed, 80))
    hits = _hits(workload, _cell(4000, window_blocks=window_blocks, policy=policy))
    assert hits == _expected_hits(workload, window_blocks) > 0


def test_a_window_of_whole_prompts_hits_as_full_layers_do(seed: int) -> None:
    """Where nothing is evicted and every block is stored, both ways find the same, but for junctions."""
    workload = workload_of([[f"{number}.{depth}" for depth in range(5)] for number in range(6)] * 2)
    everything = run_cell(workload, Cell("lru", 4000, 0), load_config(None, ())).hits
    assert _hits(workload, _cell(4000, window_blocks=50)) == everything == 30


def test_equal_bytes_hold_more_prompts_by_groups() -> None:
    prompts = [[f"{number}.{depth}" for depth in range(40)] for number in range(20)] * 3
    workload = workload_of(prompts)
    room = 20 * 40 // 3
    everything = run_cell(workload, Cell("lru", room, 0), load_config(None, ())).hits
    groups = [_hits(workload, _cell(room, window_blocks=1, full_layers=full)) for full in (1, 3)]
    assert everything == 0, "least recently used of a loop that is larger than the room"
    assert groups[0] > groups[1] == 0
    assert _hits(workload, _cell(1, window_blocks=1)) == 0


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests that share prefixes."""
    path, names = tmp_path / "chat.jsonl", dict[str, int]()
    lines = []
    for number, prompt in enumerate(random_prompts(1, 40)):
        ids = [names.setdefault(name, len(names)) for name in prompt]
        fields = {"timestamp": number, "input_length": len(ids) * BLOCK_TOKENS, "output_length": 1, "hash_ids": ids}
        lines.append(json.dumps(fields) + "\n")
    path.write_text("".join(lines))
    return path


def _run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli(["simulate", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("most_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_have_both_ways_side_by_side_in_one_process_and_in_two(
    trace: Path, capsys: pytest.CaptureFixture[str], most_processes: int
) -> None:
    asked = (trace, "--capacity", "20%,300%", "--window", 1000, "--full-share", "0.3333", "--json")
    rows: list[list[dict[str, Any]]] = []
    for processes in range(1, most_processes + 1):
        assert _run(*asked, "--processes", processes) == 0
        rows.append(json.loads(capsys.readouterr().out)["rows"])
    times = {"us_per_reference", "us_per_reference_groups"}
    stable = [[{name: row[name] for name in set(row) - times} for row in some] for some in rows]
    assert all(found == stable[0] for found in stable)
    assert _run(*asked[:3], "--json", "--processes", 1) == 0
    plain = json.loads(capsys.readouterr().out)["rows"][0]
    assert set(rows[0][0]) == set(plain) | COLUMNS
    last = rows[0][-1]
    assert (last["window_tokens"], last["full_share"]) == (1000, pytest.approx(1 / 3, abs=1e-6))
    assert last["hit_blocks_groups"] == _expected_hits(load(trace), 2)
    assert last["hit_rate_groups"] == pytest.approx(last["hit_blocks_groups"] / last["references"], abs=1e-6)


def test_the_table_shows_the_difference(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(trace, "--capacity", "30%", "--window", 512, "--full-share", "0.25", "--processes", 1) == 0
    shown = capsys.readouterr().out
    for word in ("25 % of the layers full", "window of 512 tokens", "by groups", "all layers"):
        assert word in shown


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--window", 512), "--full-share"),
        (("--full-share", 0.5), "--window"),
        (("--window", 512, "--full-share", 0), "--full-share is 0"),
        (("--window", 512, "--full-share", 1), "--full-share is 1"),
        (("--window", 512, "--full-share", "nan"), "nan"),
        (("--window", 0, "--full-share", 0.5), "--window"),
        (("--window", 512, "--full-share", 0.5, "--nodes", 2), "--nodes"),
        (("--window", 512, "--full-share", 0.5, "--tiers", "dram,ssd"), "--tiers ssd"),
        (("--window", 512, "--full-share", 0.5, "--tiers", "dram:5%,hbm:1%"), "--tiers hbm"),
    ],
)
def test_options_without_meaning_are_refused_by_name(
    trace: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], word: str
) -> None:
    assert _run(trace, *options) == 2
    assert word in capsys.readouterr().err


def test_a_share_becomes_few_layers() -> None:
    options = GroupOptions.parse(512, 1 / 3)
    assert options is not None
    assert (options.full_layers, options.layers) == (1, 3)
    with pytest.raises(InvalidArgument, match="--full-share"):
        GroupOptions.parse(512, 0.001)
    assert GroupOptions.parse(None, None) is None


@pytest.mark.slow
def test_a_published_trace_hits_more_by_groups_at_the_same_size() -> None:
    """The row of docs/sizing.md, of the first requests alone."""
    workload = load(real_trace("mooncake_conversation_trace.jsonl.gz"), tails="left-out")
    few = Workload(
        at_ns=workload.at_ns[:1500],
        first=workload.first[:1501],
        blocks=workload.blocks,
        storable=workload.storable[:1500],
        unique=workload.unique,
        session=workload.session[:1500],
    )
    everything = run_cell(few, Cell("lru", 2048, 0), load_config(None, ())).hits
    assert everything < _hits(few, _cell(2048)) < int(np.sum(few.storable))
