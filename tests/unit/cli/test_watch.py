"""Lines of a watch: what fits a terminal, rates between two readings, hits of what was looked up between them."""

from typing import Any

import pytest

from kvpool.clock import NS_PER_S
from kvpool_tools.cli.watch import HEADER_EVERY, Watch


def _sections(**values: Any) -> dict[str, dict[str, Any]]:
    known = {
        **dict.fromkeys(("saved_chunks", "evicted_chunks", "leases", "reservations", "connections"), 0),
        **{f"dram.{name}": 0 for name in ("chunks", "used_bytes")},
        **{f"usage.{name}": 0 for name in ("loaded_bytes", "hit_tokens", "lookup_tokens")},
        "usage.hit_rate": 0.0,
    }
    given = {name.replace("__", "."): value for name, value in values.items()}
    return {"dram": {**known, **given}}


def test_a_line_has_totals_and_rates_and_the_hits_between_two_readings() -> None:
    watch = Watch(None, 80)
    first = watch.lines(_sections(saved_chunks=100, usage__hit_tokens=900, usage__lookup_tokens=1000), 0)
    assert [line.split() for line in first] == [
        ["chunks", "used", "saved/s", "evicted/s", "loaded/s", "hits", "leases", "saves", "clients"],
        ["0", "0", "B", "-", "-", "-", "-", "0", "0", "0"],
    ]
    later = _sections(
        dram__chunks=7,
        dram__used_bytes=3 << 30,
        saved_chunks=105,
        usage__loaded_bytes=4 << 20,
        usage__hit_tokens=950,
        usage__lookup_tokens=1200,
        leases=2,
    )
    (line,) = watch.lines(later, 2 * NS_PER_S)
    assert line.split() == ["7", "3.0", "GiB", "2.5", "0.0", "2.0", "MiB", "25.0%", "2", "0", "0"]
    assert len(line) <= 80


def test_the_header_comes_again_with_every_page() -> None:
    watch = Watch(None, 80)
    pages = [watch.lines(_sections(), number * NS_PER_S) for number in range(2 * HEADER_EVERY)]
    assert [number for number, lines in enumerate(pages) if len(lines) == 2] == [0, HEADER_EVERY]


@pytest.mark.parametrize("width", [1, 9, 20, 79, 80, 200])
def test_columns_that_do_not_fit_are_left_out(width: int) -> None:
    lines = Watch(None, width).lines(_sections(), 0)
    assert max(map(len, lines)) <= min(width, 80)
    assert bool(lines[0]) == (width >= 9)


def test_a_section_is_shown_whole_with_what_has_changed_in_a_second() -> None:
    watch = Watch("dram", 80)
    assert "dram.chunks:0" in watch.lines(_sections(), 0)
    lines = watch.lines(
        _sections(
            dram__chunks=3,
            dram__used_bytes=1 << 20,
            leases=-1,
            usage__hit_tokens=1,
            usage__lookup_tokens=4,
            usage__hit_rate=0.25,
        ),
        2 * NS_PER_S,
    )
    assert lines[0] == ""
    assert {
        "dram.chunks:3  +1.5/s",
        "dram.used_bytes:1048576  +512.0 KiB/s",
        "leases:-1  -0.5/s",
        "saved_chunks:0",
        "usage.hit_rate:0.25  25.0% since the line before",
    } <= set(lines)


def test_words_and_values_that_are_new_have_no_rate() -> None:
    watch = Watch("ssd", 20)
    watch.lines({"ssd": {"ssd.state": "ok"}}, 0)
    assert watch.lines({"ssd": {"ssd.state": "readonly", "ssd.chunks": 5}}, NS_PER_S) == [
        "",
        "ssd.state:readonly",
        "ssd.chunks:5",
    ]
