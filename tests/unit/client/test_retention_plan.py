"""Token ranges as priorities and durations of chunks, as a table; the worked examples of TensorRT-LLM's post among them."""

from typing import Any

import numpy as np
import pytest

from kvpool.errors import InvalidArgument
from kvpool.states import KEEP_PRIORITY, TokenRange
from kvpool_client.retention import DURATION_S_MAX, plan_retention, ranges_of_blocks

N = KEEP_PRIORITY
CHUNK = 16


def planned(retention: list[TokenRange], chunks: int, **fields: Any) -> list[tuple[int, int]]:
    planned = plan_retention(retention, chunks=chunks, chunk_tokens=CHUNK, **fields)
    return list(zip(planned.priorities.tolist(), planned.durations_ms.tolist(), strict=True))


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], []),  # nothing is asked for
        ([TokenRange(0, 17, 80)], [80, 80, N, N]),  # it touches the second chunk with one token
        ([TokenRange(0, 16, 80)], [80, N, N, N]),
        ([TokenRange(15, 16, 80)], [80, N, N, N]),
        ([TokenRange(16, 17, 80)], [N, 80, N, N]),
        ([TokenRange(5, None, 80)], [80, 80, 80, 80]),
        ([TokenRange(48, None, 0)], [N, N, N, 0]),
        ([TokenRange(64, None, 80)], [N, N, N, N]),  # behind all that there is
        ([TokenRange(0, 1 << 40, 100)], [100] * 4),
        ([TokenRange(0, 20, 10), TokenRange(0, None, 90)], [10, 10, 90, 90]),  # earlier ranges win
        ([TokenRange(0, None, 90), TokenRange(0, 20, 10)], [90, 90, 90, 90]),
        ([TokenRange(20, 40, 1), TokenRange(0, 21, 2)], [2, 1, 1, N]),
        ([TokenRange(0)], [35] * 4),  # the default, asked for
    ],
)
def test_ranges_cover_the_chunks_that_they_touch(ranges: list[TokenRange], expected: list[int]) -> None:
    assert [priority for priority, _ in planned(ranges, 4)] == expected


def test_numbers_may_be_numpys() -> None:
    entry = TokenRange(np.int64(0), np.int32(20), np.uint8(80), np.float32(1.5))  # type: ignore[arg-type]
    assert planned([entry], 4, prompt_tokens=np.int64(18)) == [(80, 1500), (80, 1500), (N, 0), (N, 0)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (0, [70] * 4),
        (16, [80, 70, 70, 70]),
        (17, [80, 80, 70, 70]),  # decoding begins in the second chunk, which is the prompt's
        (64, [80] * 4),
        (1000, [80] * 4),
    ],
)
def test_decoding_begins_at_the_prompts_end(prompt: int, expected: list[int]) -> None:
    found = planned([TokenRange(0, None, 80)], 4, prompt_tokens=prompt, decode_priority=70)
    assert [priority for priority, _ in found] == expected


def test_a_range_ends_with_the_prompt() -> None:
    assert planned([TokenRange(0, 64, 80)], 4, prompt_tokens=20) == [(80, 0), (80, 0), (N, 0), (N, 0)]


@pytest.mark.parametrize(("seconds", "milliseconds"), [(None, 0), (1e-9, 1), (0.0011, 2), (30, 30_000), (30.0, 30_000)])
def test_durations_are_rounded_up_to_milliseconds(seconds: float | None, milliseconds: int) -> None:
    assert planned([TokenRange(0, None, 80, seconds)], 1) == [(80, milliseconds)]


def test_a_one_off_request_goes_first() -> None:
    found = planned([TokenRange(0, None, 0)], 6, prompt_tokens=50, decode_priority=0)
    assert found == [(0, 0)] * 6


def test_context_is_retained_for_30_s_and_decoded_tokens_for_10() -> None:
    found = planned([TokenRange(0, None, 35, 30.0)], 10, prompt_tokens=100, decode_priority=35, decode_duration_s=10.0)
    assert found == [(35, 30_000)] * 7 + [(35, 10_000)] * 3


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([TokenRange(0, None, 101)], {}, r"retention\[0\]\.priority is 101, expected 0\.\.100"),
    ([TokenRange(0, None, -1)], {}, r"retention\[0\]\.priority is -1"),
    ([TokenRange(0), TokenRange(0, None, True)], {}, r"retention\[1\]\.priority is True"),
    ([TokenRange(0, None, 3.5)], {}, r"priority is 3\.5"),  # type: ignore[arg-type]
    ([TokenRange(-1)], {}, r"start is -1, expected a token's index"),
    ([TokenRange(5, 5)], {}, r"retention\[0\]\.end is 5, expected None or more than start 5"),
    ([TokenRange(5, 4)], {}, r"end is 4"),
    ([TokenRange(0, None, 35, 0)], {}, r"duration_s is 0, expected None or seconds above 0"),
    ([TokenRange(0, None, 35, -2.0)], {}, r"duration_s is -2\.0"),
    ([TokenRange(0, None, 35, float("nan"))], {}, r"duration_s is nan"),
    ([TokenRange(0, None, 35, float("inf"))], {}, r"duration_s is inf"),
    ([TokenRange(0, None, 35, DURATION_S_MAX + 1)], {}, r"at most 4294967"),
    ([(0, 5, 35)], {}, r"retention\[0\] is tuple, expected a TokenRange"),
    ("ranges", {}, r"retention is str"),
    (None, {}, r"retention is NoneType"),
    ([TokenRange(0)] * 5000, {}, r"at most 4096"),
    ([], {"decode_priority": 101, "prompt_tokens": 1}, r"decode_priority is 101"),
    ([], {"decode_priority": 35}, r"without prompt_tokens: where does decoding begin"),
    ([], {"decode_duration_s": 1.0}, r"without a decode_priority"),
    ([], {"decode_priority": 35, "decode_duration_s": 0, "prompt_tokens": 1}, r"decode_duration_s is 0"),
    ([], {"prompt_tokens": -1}, r"prompt_tokens is -1"),
]


@pytest.mark.parametrize(("retention", "fields", "message"), BAD)
def test_wrong_input_is_named(retention: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        plan_retention(retention, chunks=4, chunk_tokens=CHUNK, **fields)


def test_columns_are_empty_without_retention() -> None:
    retention = plan_retention([TokenRange(32, None, 7, 1.0)], chunks=4, chunk_tokens=CHUNK)
    assert retention.columns(0, 2) == (b"", b"")
    assert retention.columns(1, 2) == (bytes([N, 7]), (0).to_bytes(4, "little") + (1000).to_bytes(4, "little"))
    assert retention.covered.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("priorities", "expected"),
    [
        ([], ()),
        ([None, None], ()),
        ([35, 35], ()),
        ([35, 36, 35], (TokenRange(16, 32, 36),)),
        ([100, 100, 0], (TokenRange(0, 32, 100), TokenRange(32, 48, 0))),
        ([None, 50, None, 50], (TokenRange(16, 32, 50), TokenRange(48, 64, 50))),
        ([400, -3], (TokenRange(0, 16, 100), TokenRange(16, 32, 0))),
    ],
)
def test_priorities_of_blocks_become_ranges(priorities: list[int | None], expected: tuple[TokenRange, ...]) -> None:
    assert ranges_of_blocks(priorities, CHUNK) == expected


def test_priorities_of_later_blocks_are_ranges_behind_them() -> None:
    found = ranges_of_blocks([90, 90, 35], CHUNK, first_block=3, duration_s=60.0)
    assert found == (TokenRange(48, 80, 90, 60.0),)
