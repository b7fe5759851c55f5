"""Wire form of what nodes report about their keys: there and back, impossible values, answers to something else."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from kvpool.peers.control import records as r
from kvpool.peers.control import wire

KEYS = bytes(range(64))
ASK = r.AskChanges(7, 2000, 3)
CHANGES = r.Changes(9, 12, False, KEYS, KEYS[:32], 4)
GAP = r.Changes(12, 12, True, b"", b"", 0)
ASK_KEYS = r.AskKeys(1 << 32)
PAGE = r.Keys(KEYS, 9, (1 << 32) + 2)


@pytest.mark.parametrize("record", [ASK, ASK_KEYS], ids=lambda one: type(one).__name__)
def test_requests_go_there_and_back(record: Any) -> None:
    assert wire.decode_request([wire.encode_message(record, 5)]) == (5, record)
    with pytest.raises(wire.WireFault):
        wire.decode_answer([wire.encode_message(record, 5)])


@pytest.mark.parametrize("record", [CHANGES, GAP, PAGE, r.Keys(b"", -1, -1)], ids=lambda one: type(one).__name__)
def test_answers_go_there_and_back(record: Any) -> None:
    assert wire.decode_answer([wire.encode_message(record, 5)]) == (5, record)
    with pytest.raises(wire.WireFault):
        wire.decode_request([wire.encode_message(record, 5)])


def test_the_wire_is_as_documented() -> None:
    assert msgpack.unpackb(wire.encode_message(ASK, 1)) == [30, 1, 7, 2000, 3]
    assert msgpack.unpackb(wire.encode_message(CHANGES, 1)) == [31, 1, 9, 12, False, KEYS, KEYS[:32], 4]
    assert msgpack.unpackb(wire.encode_message(ASK_KEYS, 1)) == [32, 1, 1 << 32]
    assert msgpack.unpackb(wire.encode_message(PAGE, 1)) == [33, 1, KEYS, 9, (1 << 32) + 2]


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (ASK, {"last": -2}),
        (ASK, {"last": 1 << 63}),
        (ASK, {"wait_ms": -1}),
        (ASK, {"wait_ms": r.WAIT_MS_MAX + 1}),
        (ASK, {"last": b""}),
        (ASK, {"saves": -1}),
        (ASK_KEYS, {"cursor": -1}),
        (ASK_KEYS, {"cursor": 1 << 63}),
    ],
)
def test_impossible_requests_are_refused(record: Any, change: dict[str, Any]) -> None:
    with pytest.raises(wire.WireFault):
        wire.decode_request([wire.encode_message(replace(record, **change), 4)])


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (CHANGES, {"last": -2}),
        (CHANGES, {"last": 13}),
        (CHANGES, {"newest": 1 << 63}),
        (CHANGES, {"saves": -1}),
        (CHANGES, {"stored": KEYS[:33]}),
        (CHANGES, {"removed": KEYS[:31]}),
        (CHANGES, {"is_gap": True}),
        (CHANGES, {"is_gap": 0}),
        (CHANGES, {"stored": bytes(32 * r.FOLLOW_KEYS_MAX)}),  # with those that were removed too many
        (PAGE, {"keys": KEYS[:33]}),
        (PAGE, {"keys": bytes(32 * (r.FOLLOW_KEYS_MAX + 1))}),
        (PAGE, {"as_of": -2}),
        (PAGE, {"cursor": -2}),
        (PAGE, {"cursor": 1 << 63}),
    ],
)
def test_impossible_answers_are_refused(record: Any, change: dict[str, Any]) -> None:
    with pytest.raises(wire.WireFault):
        wire.decode_answer([wire.encode_message(replace(record, **change), 4)])


def test_an_answer_never_goes_back() -> None:
    wire.check_follow(ASK, CHANGES)
    wire.check_follow(ASK, GAP)
    wire.check_follow(ASK, replace(GAP, last=3))  # a former life's events
    wire.check_follow(ASK, r.Changes(7, 7, False, b"", b"", 3))
    wire.check_follow(ASK, replace(CHANGES, last=7))  # of a save under way: keys, and no event
    wire.check_follow(ASK_KEYS, PAGE)
    wire.check_follow(ASK_KEYS, r.Keys(b"", 9, 1 << 32))
    wire.check_follow(ASK_KEYS, r.Keys(KEYS, 9, r.NO_MORE_KEYS))
    faults: list[tuple[r.AskFollow, object]] = [
        (ASK, replace(CHANGES, last=6)),
        (ASK_KEYS, replace(PAGE, cursor=1 << 32)),
        (ASK_KEYS, replace(PAGE, cursor=0)),
        (ASK, PAGE),
        (ASK_KEYS, CHANGES),
        (ASK, r.Pong(bytes(16))),
    ]
    for ask, answer in faults:
        with pytest.raises(wire.WireFault):
            wire.check_follow(ask, answer)
