"""`bench sparse`: each number of threads, resident set and budget has a row beside its floor, and so have instruction sets."""

import json

import pytest

import kvpool_client as kv
from kvpool_tools.bench.lookup_attention.choice import QUICK_ROUNDS, Choice, Sizes, parse_configs
from kvpool_tools.bench.lookup_attention.device_steps import measure_device, missing_device
from kvpool_tools.bench.lookup_attention.measured_sequence import MeasuredSequence
from tests.rigs.kvpoolctl import ctl

SMALL = ("--quick", "--tokens", "8k", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--layers", "2")
STEPS = [
    (threads, name)
    for threads in (1, 2)
    for name in ("5 % of 128+1024", "20 % of 128+1024", "5 % of 0+512", "20 % of 0+512")
]


def test_rows_have_their_floors_spreads_and_bytes() -> None:
    done = ctl(None, "--json", "bench", "sparse", *SMALL, "--resident", "128+1024,0+512", "--threads", "1,2", "--paths")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["command"] == "bench sparse"
    assert document["machine"]["processor"]
    built, *rest = document["rows"]
    assert (built["name"], built["pages"], built["blocks"]) == ("clusters7", 32, 128)
    assert built["build_gb_per_s"] > 0
    assert built["read_gb_per_s"] > 0
    steps, paths = rest[: len(STEPS)], [row for row in rest[len(STEPS) :] if "device" not in row]
    assert [(row["threads"], row["name"]) for row in steps] == STEPS
    for row in steps:
        assert row["rounds"] == QUICK_ROUNDS
        assert 0 < row["read_spread_gb_per_s"][0] <= row["read_gb_per_s"] <= row["read_spread_gb_per_s"][1]
        for part in ("dense", "recall", "choice", "attention", "step"):
            assert row[f"{part}_ms"] > 0
        assert row["ratio"] > 0
        assert row["ratio_bar"] is None, "bars are for the default sizes"
        assert row["attended_mib"] < row["dense_read_mib"] == 4
        assert row["dense_heads"] == 0
    assert "portable" in [row["name"] for row in paths]
    assert all(row["build_gb_per_s"] > 0 and row["dense_ms"] > 0 for row in paths)
    assert document["notes"][0].startswith("2 layers of 4.0 MiB in turn")
    if (reason := missing_device()) is not None:
        assert document["notes"][1] == f"no steps on a device: {reason}"
    else:
        assert all(row["staging_hit_rate"] > 0 for row in rest if "device" in row)


def test_steps_on_a_device_report_what_was_staged() -> None:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    sizes = Sizes(8192, heads=4, kv_heads=2, head_dim=32, layers=4)
    choice = Choice(sizes, parse_configs("128+1024", "5,20", sizes.tokens), threads=(1,), rounds=3)
    with kv.connect("/nonexistent/kvpool.sock", model="bench-sparse", layout=sizes.layout) as pool:
        sequence = MeasuredSequence(pool, sizes)
        for _ in sequence.fill():
            pass
        for number in range(sequence.pages):
            sequence.summarise_page(number)
        rows = measure_device(sequence, choice, "cpu", lambda parts: None)
        sequence.close()
    expected = [(name, steps) for name in ("5 % of 128+1024", "20 % of 128+1024") for steps in (2.0, 0.5)]
    assert [(row["name"], row["staged_steps"]) for row in rows] == expected
    for row in rows:
        assert row["rounds"] == 3
        shares = [row[share] for share in ("staging_hit_rate", "prefetch_share_of_hits", "overlap")]
        assert all(isinstance(share, float) and 0 <= share <= 1 for share in shares)
        assert shares[0] != 0
        is_kept = row["staged_steps"] == 2.0
        assert (shares[1] == 0) is is_kept, "a prefetch brings only what the other layers have displaced"


def test_what_it_does_not_measure_is_refused_in_words() -> None:
    for options, words in (
        (("--socket", "/tmp/none.sock", "bench", "sparse"), "sparse uses no daemon"),
        (("bench", "sparse", "--tokens", "many"), "'many' is no number of tokens"),
        (("bench", "sparse", "--tokens", "4k"), "nothing to look up of 4096 tokens"),
        (("bench", "sparse", "--head-dim", "48", "--tokens", "16k"), "head_dim is 48"),
    ):
        done = ctl(None, *options)
        assert done.exit_code == 2, done.output
        assert words in done.output
