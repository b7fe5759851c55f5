"""The reader of slots' headers: its refusals, its results for damaged slots, and an unresponsive disk."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.config.config import load_config
from kvpool.tiers.ssd.headers import QUESTIONS_MAX, THREAD_NAME, SsdHeaders
from kvpool.tiers.ssd.plan import plan_ssd
from tests.rigs.daemon import wait_until

EPOCH = bytes(range(16))
PLACE = (bytes(32), bytes(32), 0, 1)
TIMEOUT_S = 20.0


@pytest.fixture
def headers(tmp_path: Path) -> Iterator[SsdHeaders]:
    options = [f"ssd.path={tmp_path}", "ssd.capacity=32MiB", "ssd.direct=false"]
    made = SsdHeaders(plan_ssd(load_config(None, options).ssd))
    made.epoch = EPOCH
    yield made
    made.close()
    wait_until(lambda: THREAD_NAME not in {thread.name for thread in threading.enumerate()}, "its thread has ended")


def test_before_the_tier_is_open_and_after_its_end_no_header_is_known(headers: SsdHeaders) -> None:
    headers.epoch = b""
    assert headers.request_headers([PLACE] * 3, is_urgent=False).result(0) == [b""] * 3
    headers.epoch = EPOCH
    headers.close()
    assert headers.request_headers([PLACE], is_urgent=True).result(0) == [b""]
    assert headers.stats() == {"events.read_headers": 0, "events.refused_headers": 2}


@pytest.mark.parametrize("content", [None, b"", bytes(4096), bytes(range(100)), b"KVPSLOT1" + bytes(4088)])
def test_files_that_are_not_there_or_hold_something_else_give_nothing(
    headers: SsdHeaders, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "segment-000000.kvs").write_bytes(content)
    assert headers.request_headers([PLACE, (*PLACE[:2], 1 << 40, 1)], is_urgent=False).result(TIMEOUT_S) == [b"", b""]
    assert headers.read_headers == 2


def test_a_disk_that_hangs_delays_only_its_own_thread(headers: SsdHeaders, tmp_path: Path) -> None:
    pipe = tmp_path / "segment-000000.kvs"
    os.mkfifo(pipe)  # opening it waits until somebody opens the other end
    hanging = headers.request_headers([PLACE], is_urgent=False)
    wait_until(lambda: headers._questions.empty(), "the thread has begun")
    waiting = [headers.request_headers([PLACE], is_urgent=False) for _ in range(QUESTIONS_MAX)]
    assert headers.request_headers([PLACE] * 2, is_urgent=False).result(0) == [b"", b""]
    assert headers.refused_questions == 1
    urgent = headers.request_headers([PLACE], is_urgent=True)
    order: list[str] = []
    urgent.add_done_callback(lambda _: order.append("urgent"))
    waiting[0].add_done_callback(lambda _: order.append("patient"))
    assert not hanging.cancel(), "it is being read"
    given_up = waiting.pop()
    assert given_up.cancel()
    headers.close()
    other_end = os.open(pipe, os.O_RDWR)
    assert [answer.result(TIMEOUT_S) for answer in (hanging, urgent, *waiting)] == [[b""]] * (1 + QUESTIONS_MAX)
    os.close(other_end)
    assert order == ["urgent", "patient"]
