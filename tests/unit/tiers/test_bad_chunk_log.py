"""Bad chunks in the log: one line at once, one a minute for all further ones, and none left unlogged at the end."""

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest

from kvpool import log_pace
from kvpool.tiers.bad_chunk_log import BadChunkLog
from tests.rigs.clock import HandClock

FIRST = (
    "a chunk is bad in the ssd tier, and no engine gets it: "
    "chunk 0000000000000000 at offset 0 of segment-000001.kvs: bad_checksum"
)


@pytest.fixture(autouse=True)
def _levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield


def _note(bad_chunks: BadChunkLog, numbers: range) -> None:
    for number in numbers:
        bad_chunks.note_bad_chunk(
            number.to_bytes(8, "big") * 4, "bad_checksum", f"offset {4096 * number} of segment-000001.kvs"
        )


async def _see(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_hundreds_of_chunks_of_one_file_are_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        clock = HandClock()
        bad_chunks = BadChunkLog("ssd", clock)
        _note(bad_chunks, range(457))
        assert [record.getMessage() for record in caplog.records] == [FIRST]
        bad_chunks.close()
        bad_chunks.close()

    asyncio.run(play())
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "456 more chunks were bad in the ssd tier, and no engine gets them, the latest: "
        "chunk 00000000000001c8 at offset 1867776 of segment-000001.kvs: bad_checksum"
    ]


def test_the_number_of_further_ones_is_logged_when_the_minute_is_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pace, "INTERVAL_S", 0.01)

    async def play() -> None:
        bad_chunks = BadChunkLog("ssd", HandClock())  # which stands, however long the two take
        _note(bad_chunks, range(1))
        _note(bad_chunks, range(1))
        await asyncio.wait_for(_see(lambda: len(caplog.records) == 2), 60.0)

    asyncio.run(play())
    assert caplog.records[1].getMessage().startswith("1 more chunks were bad in the ssd tier")


def test_a_bad_chunk_after_a_quiet_minute_is_a_first_one(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    bad_chunks = BadChunkLog("ssd", clock)
    _note(bad_chunks, range(1))
    clock.advance(log_pace.INTERVAL_S)
    _note(bad_chunks, range(1))
    assert [record.getMessage() for record in caplog.records] == [FIRST] * 2
