"""Comparison with an earlier document: which figures, which verdict, and which documents say nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import InvalidArgument
from kvpool_tools.bench.compare import COUNTS, TIMES, Earlier, Terms
from kvpool_tools.bench.machine import describe_machine

COUNT = {"name": "daemon: acquire, 4 chunks", "instructions": 1000, "spread": [900, 2000]}
ACQUIRE = {
    "name": "acquire",
    "p50_us": 100.0,
    "p50_spread_us": [90.0, 110.0],
    "times_floor": 4.0,
    "times_floor_spread": [3.8, 4.2],
    "daemon_cpu_us": 50.0,
    "daemon_cpu_spread_us": [48.0, 52.0],
}


def document(path: Path, row: dict[str, Any] = COUNT, is_quick: bool = False, **machine: Any) -> str:
    path.write_text(json.dumps({"machine": {**describe_machine(), **machine}, "rows": [row], "is_quick": is_quick}))
    return str(path)


def verdicts(path: Path, before: dict[str, Any], now: dict[str, Any], terms: Terms = TIMES) -> dict[str, str]:
    earlier = Earlier(document(path, before), terms, describe_machine())
    return {one["figure"]: one["verdict"] for one in earlier.compare([now])}


@pytest.mark.parametrize(
    ("terms", "other", "fault"),
    [
        (TIMES, {"processor": "6502"}, "its processor is 6502"),
        (TIMES, {"cores": 4096}, "its cores is 4096"),
        (TIMES, {"python": "2.7.18"}, "its python is 2.7"),
        (COUNTS, {"python": "2.7.18"}, "its python is 2.7"),
        (COUNTS, {"architecture": "vax"}, "its architecture is vax"),
    ],
)
def test_documents_of_another_machine_say_nothing(
    tmp_path: Path, terms: Terms, other: dict[str, Any], fault: str
) -> None:
    earlier = Earlier(document(tmp_path / "other.json", **other), terms, describe_machine())
    assert fault in earlier.fault
    assert earlier.compare([COUNT | {"instructions": 9999}]) == []


def test_counts_of_another_processor_are_compared(tmp_path: Path) -> None:
    path = document(tmp_path / "other.json", processor="6502", cores=4096, kernel="1.0", load_average_before=9.0)
    earlier = Earlier(path, COUNTS, describe_machine())
    assert earlier.fault == ""
    assert len(earlier.compare([COUNT])) == 1


def test_a_document_of_few_rounds_says_nothing_about_a_whole_run(tmp_path: Path) -> None:
    path = document(tmp_path / "quick.json", is_quick=True)
    assert "--quick" in Earlier(path, TIMES, describe_machine()).fault
    assert Earlier(path, TIMES, describe_machine(), is_quick=True).fault == ""


@pytest.mark.parametrize(
    "text", ["", "[]", '{"rows": []}', '{"machine": {"python": "3.11.1"}, "rows": [{"name": 1}]}', '{"rows": [1]}']
)
def test_a_file_that_is_no_document_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "counts.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"counts\.json, expected a document"):
        Earlier(str(tmp_path / "counts.json"), TIMES, describe_machine())


def test_a_request_needs_more_instructions_beyond_five_hundredths_whatever_its_spread(tmp_path: Path) -> None:
    for count, verdict in ((1051, "slower"), (1050, "same"), (953, "same"), (952, "faster")):
        now = COUNT | {"instructions": count}
        assert verdicts(tmp_path / "counts.json", COUNT, now, COUNTS) == {"instructions": verdict}


def test_rows_are_compared_by_their_ratio_to_a_floor_and_by_cpu_time(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    busier = ACQUIRE | {"p50_us": 900.0, "p50_spread_us": [800.0, 1000.0]}
    assert verdicts(path, ACQUIRE, busier) == {"times_floor": "same", "daemon_cpu_us": "same"}
    slower = ACQUIRE | {"times_floor": 5.0, "times_floor_spread": [4.5, 5.5]}
    assert verdicts(path, ACQUIRE, slower) == {"times_floor": "slower", "daemon_cpu_us": "same"}
    assert verdicts(path, slower, ACQUIRE)["times_floor"] == "faster"


@pytest.mark.parametrize(
    ("value", "spread"),
    [
        (4.3, [4.25, 4.35]),  # within the bound
        (5.0, [3.9, 6.0]),  # what it was is within its spread
        (4.1, [4.05, 4.15]),  # it is within what it was
    ],
)
def test_a_figure_within_the_bound_or_a_spread_is_the_same(tmp_path: Path, value: float, spread: list[float]) -> None:
    now = ACQUIRE | {"times_floor": value, "times_floor_spread": spread}
    assert verdicts(tmp_path / "bench.json", ACQUIRE, now)["times_floor"] == "same"


def test_of_rates_and_ratios_more_is_better_and_of_times_less(tmp_path: Path) -> None:
    path, twice = tmp_path / "bench.json", {"gb_per_s": 2.0, "spread_gb_per_s": [2.0, 2.0]}
    for name, spread, verdict in (
        ("gb_per_s", "spread_gb_per_s", "faster"),
        ("requests_per_s", "requests_spread_per_s", "faster"),
        ("save_ratio", "save_ratio_spread", "faster"),
        ("ready_s", "ready_spread_s", "slower"),
        ("recall_ms", "recall_spread_ms", "slower"),
        ("cpu_seconds_per_gb", "cpu_spread_seconds_per_gb", "slower"),
    ):
        before = {"way": "stream", name: 1.0, spread: [1.0, 1.0]}
        assert verdicts(path, before, {"way": "stream", name: 2.0, spread: [2.0, 2.0]}) == {name: verdict}
    assert verdicts(path, {"way": "socket", **twice}, {"way": "stream", **twice}) == {}


def test_rows_and_figures_that_the_earlier_document_has_not_are_left_out(tmp_path: Path) -> None:
    path = document(tmp_path / "bench.json", ACQUIRE | {"times_floor": None, "daemon_cpu_us": 0.0})
    earlier = Earlier(path, TIMES, describe_machine())
    assert earlier.compare([ACQUIRE, ACQUIRE | {"name": "commit"}]) == []
