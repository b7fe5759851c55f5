"""Frames that SGLang's batches cost, and batches that are refused in part or meet a daemon without their state."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from tests.engines.conftest import TIMEOUT_S
from tests.engines.sglang.standin import Controller, HostPool, page_keys
from tests.rigs.daemon import Daemon, wait_until

Start = Callable[..., Controller]
PAGES = 48


class Frames:
    """The frames that clients of this process have sent since the last call."""

    def __init__(self) -> None:
        self.calls: list[type[Any]] = []
        self.notes = 0

    def take(self) -> tuple[list[type[Any]], int]:
        calls, notes = self.calls, self.notes
        self.calls, self.notes = [], 0
        return calls, notes


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    seen, call, notify = Frames(), BlockingConnection.call, BlockingConnection.notify

    def counted(self: BlockingConnection, request: object, answer: type[Any], timeout_s: float | None = None) -> Any:
        if not isinstance(request, m.Renew):  # sent by the clock, not by a batch
            seen.calls.append(type(request))
        return call(self, request, answer, timeout_s)

    def noted(self: BlockingConnection, frame: bytes) -> bool:
        seen.notes += 1
        return notify(self, frame)

    monkeypatch.setattr(BlockingConnection, "call", counted)
    monkeypatch.setattr(BlockingConnection, "notify", noted)
    return seen


@pytest.fixture
def large(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon(dram__capacity="64MiB")


def _filled(controller: Controller, keys: list[str]) -> None:
    for number, key in enumerate(keys):
        controller.pool.fill(number, key)


def test_a_batch_takes_two_round_trips_to_save_and_one_to_load(
    large: Daemon, start_sglang: Start, frames: Frames
) -> None:
    controller, keys = start_sglang(large, HostPool(pages=PAGES)), page_keys(1, PAGES)
    _filled(controller, keys)
    frames.take()
    assert controller.backup(keys, range(PAGES)) == PAGES
    calls, notes = frames.take()
    assert calls == [bm.Batch, bm.Batch]
    assert notes <= 2, "the other frames are usage reports"
    assert controller.prefetch(keys, range(PAGES)) == PAGES
    calls, notes = frames.take()
    assert calls == [bm.Batch]
    assert notes <= 3
    wait_until(lambda: large.stats()["leases"] == 0, "the leases have ended")
    assert all(controller.pool.holds(number, key) for number, key in enumerate(keys))


def test_pages_beyond_a_connections_saves_are_declined_and_the_others_stored(
    start_daemon: Callable[..., Daemon], start_sglang: Start
) -> None:
    daemon = start_daemon(server__max_reservations=7)
    controller, keys = start_sglang(daemon), page_keys(3, 16)
    _filled(controller, keys)
    results = controller.backend.batch_set_v1(keys, controller.pool.slots(range(16)))
    assert results == [True] * 7 + [False] * 9
    assert controller.backend.batch_exists(keys) == 7
    assert daemon.problems() == []


@pytest.mark.parametrize(
    ("requests", "word"),
    [
        ([], "batch has 0"),
        ([b""] * (bm.BATCH_MAX + 1), "batch has 257"),
        (["text"], "str"),
        ([b"\xc1"], "msgpack"),
        ([m.encode(one_way.DropLease(1), 0)[4:]], "kind 18"),
        ([m.encode(bm.Batch([]), 0)[4:]], "kind 60"),
        ([m.encode(m.Acquire(b"short"), 0)[4:]], "keys column"),
    ],
)
def test_a_batch_that_breaks_the_protocol_ends_only_its_connection(
    shared_daemon: Daemon, start_sglang: Start, requests: list[Any], word: str
) -> None:
    from kvpool.errors import Refused
    from kvpool_client.sglang import Shard, describe_host_pool

    controller, keys = start_sglang(shared_daemon), page_keys(4, 2)
    layout = describe_host_pool(HostPool(), Shard())[0].layout
    hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, "tiny", layout.to_wire())
    connection = BlockingConnection(shared_daemon.socket, hello, TIMEOUT_S)
    try:
        with pytest.raises(Refused, match=word):
            connection.call(bm.Batch(requests), bm.Batched)
    finally:
        connection.close()
    _filled(controller, keys)
    assert controller.backup(keys, range(2)) == 2
    assert shared_daemon.problems() == []
