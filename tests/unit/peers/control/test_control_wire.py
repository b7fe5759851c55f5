"""Wire form of control records: every record there and back, everything else refused with a code."""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest

from kvpool.ids import MODEL_BYTES_MAX
from kvpool.layout import Layout
from kvpool.layouts.groups import WINDOW, GroupRole
from kvpool.peers.control import records as r
from kvpool.peers.control import wire
from tests.rigs.nodes.peers import LAYOUT, identity_of, offer_to, pull_of, stage_of, staged_of

HELLO = identity_of("node").hello()
PULL = pull_of(7, 3, 5000)
ALONE = replace(PULL, are_alone=True)
RUN = replace(PULL, layout=replace(LAYOUT, group=GroupRole(WINDOW, 64, 0)).to_wire())
OFFER = offer_to(PULL)
STAGE = stage_of(7, 3)
STAGE_INTO = r.StageInto(7, 1, b"", 0, 3, "nixl-tcp", 100, b"description", 1 << 40, bytes(8))
STAGED = staged_of(STAGE)
ASK_NEAR = r.AskNear(7, bytes(16))
NEAR = r.Near(7, "/run/kvpool/kvpool.sock", bytes(16), bytes(24), bytes(24), bytes(24))
KEYS = bytes(range(64))
ASK_CHANGES = r.AskChanges(7, 2000, 3)
CHANGES = r.Changes(9, 12, False, KEYS, KEYS[:32], 4)
GAP = r.Changes(12, 12, True, b"", b"", 0)
ASK_KEYS = r.AskKeys(1 << 32)
PAGE = r.Keys(KEYS, 9, (1 << 32) + 2)
WRONG = r.Wrong("llama", LAYOUT.to_wire(), PULL.keys[:32], PULL.keys[32:64])
FOLLOWS: list[Any] = [ASK_CHANGES, ASK_KEYS]
REQUESTS: list[Any] = [
    *(HELLO, PULL, ALONE, RUN, STAGE, stage_of(7, 0, 0), STAGE_INTO, ASK_NEAR, r.Release(7), WRONG, r.Ping()),
    *FOLLOWS,
]
ANSWERS: list[Any] = [
    *(
        HELLO,
        OFFER,
        offer_to(PULL, 0),
        offer_to(ALONE),
        replace(offer_to(ALONE), present=b"\1\0\1\1"),
        STAGED,
        staged_of(STAGE, 0),
        NEAR,
        r.Refused("busy", "later"),
        r.Pong(bytes(16)),
    ),
    *(CHANGES, GAP, PAGE, r.Keys(b"", -1, -1)),
]


def _request(record: Any, sequence: int = 1) -> wire.Message:
    return wire.decode_request([memoryview(wire.encode_message(record, sequence))])


def _fault(parts: list[bytes], **options: int) -> wire.WireFault:
    with pytest.raises(wire.WireFault) as refusal:
        wire.decode_request(parts, **options)
    assert len(str(refusal.value).encode()) <= r.TEXT_BYTES_MAX
    return refusal.value


@pytest.mark.parametrize("record", REQUESTS, ids=lambda one: type(one).__name__)
def test_requests_go_there_and_back(record: Any) -> None:
    assert _request(record, 9) == (9, record)


@pytest.mark.parametrize("record", [PULL, WRONG], ids=lambda one: type(one).__name__)
def test_a_model_may_have_every_name_that_an_engine_may_give_it(record: Any) -> None:
    for name in ("m" * MODEL_BYTES_MAX, "line\nend", "\u202eright to left"):
        assert _request(replace(record, model=name)).record == replace(record, model=name)


@pytest.mark.parametrize("record", ANSWERS, ids=lambda one: type(one).__name__)
def test_answers_go_there_and_back(record: Any) -> None:
    assert wire.decode_answer([wire.encode_message(record, 3)]) == (3, record)


def test_the_wire_is_as_documented() -> None:
    assert msgpack.unpackb(wire.encode_message(PULL, 5)) == [
        *(10, 5, 7, "llama", LAYOUT.to_wire(), b"", 0, PULL.keys, 5000, False)
    ]
    assert wire.encode_message(r.Ping(), 1) == b"\x92\x14\x01"
    assert msgpack.unpackb(wire.encode_message(ASK_CHANGES, 1)) == [30, 1, 7, 2000, 3]
    assert msgpack.unpackb(wire.encode_message(CHANGES, 1)) == [31, 1, 9, 12, False, KEYS, KEYS[:32], 4]
    assert msgpack.unpackb(wire.encode_message(ASK_KEYS, 1)) == [32, 1, 1 << 32]
    assert msgpack.unpackb(wire.encode_message(PAGE, 1)) == [33, 1, KEYS, 9, (1 << 32) + 2]


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (HELLO, {"magic": b"KVPL"}),
        (HELLO, {"version": 0}),
        (HELLO, {"oldest": r.NEWEST_VERSION + 1}),
        (HELLO, {"node": ""}),
        (HELLO, {"node": "n" * 257}),
        (HELLO, {"node": "a\nb"}),
        (HELLO, {"incarnation": b"short"}),
        (HELLO, {"domain": b""}),
        (HELLO, {"stream": "ipc:///tmp/x"}),
        (HELLO, {"stream": "tcp://example.org:1"}),
        (HELLO, {"stream": "off"}),
        (STAGE_INTO, {"rows": r.STAGE_ROWS_MAX + 1}),
        (STAGE_INTO, {"agent": b""}),
        (STAGE_INTO, {"agent": bytes(r.AGENT_BYTES_MAX + 1)}),
        (STAGE_INTO, {"address": 0}),
        (STAGE_INTO, {"address": -1}),
        (STAGE_INTO, {"mark": bytes(7)}),
        (PULL, {"pull": 0}),
        (PULL, {"pull": -1}),
        (PULL, {"model": "m" * (MODEL_BYTES_MAX + 1)}),
        (WRONG, {"model": "m" * (MODEL_BYTES_MAX + 1)}),
        (PULL, {"layout": []}),
        (PULL, {"layout": [1, 1, 8, "bfloat16", 16, 2, -1, 2, "", 0]}),
        (PULL, {"layout": [[[]]]}),
        (PULL, {"scope": b"x"}),
        (PULL, {"first": -1}),
        (PULL, {"first": len(PULL.keys) // 32}),
        (PULL, {"keys": b""}),
        (PULL, {"keys": b"x" * 33}),
        (PULL, {"keys": bytes(32 * (r.PULL_KEYS_MAX + 1))}),
        (RUN, {"first": 1}),
        (RUN, {"keys": pull_of(7, r.RUN_KEYS_MAX + 1).keys}),
        (RUN, {"keys": PULL.keys + PULL.keys[:32]}),
        (ALONE, {"first": 1}),
        (ALONE, {"keys": pull_of(7, r.SET_KEYS_MAX + 1).keys}),
        (ALONE, {"keys": PULL.keys + PULL.keys[:32]}),
        (replace(RUN, are_alone=True), {"keys": PULL.keys + PULL.keys[:32]}),
        (PULL, {"deadline_ms": 0}),
        (PULL, {"deadline_ms": r.DEADLINE_MS_MAX + 1}),
        (STAGE, {"pull": 0}),
        (STAGE, {"part": -1}),
        (STAGE, {"part": 1 << 32}),
        (STAGE, {"ended": b"abc"}),
        (STAGE, {"ended": bytes(4 * (r.STAGE_PARTS_MAX + 1))}),
        (STAGE, {"first": -1}),
        (STAGE, {"rows": -1}),
        (STAGE, {"rows": r.STAGE_ROWS_MAX + 1}),
        (STAGE, {"protocol": "p" * 17}),
        (STAGE, {"wait_ms": r.STAGE_WAIT_MS_MAX + 1}),
        (ASK_NEAR, {"pull": 0}),
        (ASK_NEAR, {"host": bytes(15)}),
        (r.Release(1), {"pull": 0}),
        (ASK_CHANGES, {"last": -2}),
        (ASK_CHANGES, {"last": 1 << 63}),
        (ASK_CHANGES, {"wait_ms": -1}),
        (ASK_CHANGES, {"wait_ms": r.WAIT_MS_MAX + 1}),
        (ASK_CHANGES, {"last": b""}),
        (ASK_CHANGES, {"saves": -1}),
        (ASK_KEYS, {"cursor": -1}),
        (ASK_KEYS, {"cursor": 1 << 63}),
        (WRONG, {"key": b""}),
        (WRONG, {"key": bytes(64)}),
        (WRONG, {"parent": bytes(31)}),
        (WRONG, {"layout": RUN.layout}),
        (WRONG, {"layout": replace(LAYOUT, rank=None, world=2).to_wire()}),
    ],
)
def test_impossible_values_are_refused(record: Any, change: dict[str, Any]) -> None:
    fault = _fault([wire.encode_message(replace(record, **change), 4)])
    assert (fault.code, fault.sequence) == (r.RefusalCode.PROTOCOL, 4)


def test_a_run_may_name_as_many_keys_as_its_bound_says() -> None:
    full = replace(RUN, keys=pull_of(7, r.RUN_KEYS_MAX).keys)
    assert _request(full).record == full


def test_a_node_is_asked_for_as_many_chunks_as_one_pull_may_name() -> None:
    assert r.pulled_chunks_max(Layout.from_wire(RUN.layout)) == r.RUN_KEYS_MAX
    assert r.pulled_chunks_max(LAYOUT) == r.offered_chunks_max(LAYOUT.extents)


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (OFFER, {"chunks": 3, "ticket": b""}),
        (OFFER, {"connections": 0}),
        (OFFER, {"connections": 65}),
        (OFFER, {"address": ""}),
        (OFFER, {"address": "tcp://host:1"}),
        (OFFER, {"checks": bytes(r.CHECKS_BYTES_MAX + 1)}),
        (OFFER, {"chunks": -1}),
        (OFFER, {"present": b"\3"}),
        (OFFER, {"present": bytes(r.SET_KEYS_MAX + 1)}),
        (STAGED, {"server": ""}),
        (STAGED, {"server": "host:1"}),
        (STAGED, {"server": "192.0.2.1"}),
        (STAGED, {"life": b"short"}),
        (STAGED, {"address": -1}),
        (STAGED, {"checks": bytes(4)}),
        (STAGED, {"gone": bytes(4)}),
        (STAGED, {"part": -1}),
        (NEAR, {"pull": 0}),
        (NEAR, {"socket": ""}),
        (NEAR, {"socket": "run/kvpool.sock"}),
        (NEAR, {"socket": "/run/a\nb"}),
        (NEAR, {"socket": "/" + "s" * r.SOCKET_BYTES_MAX}),
        (NEAR, {"epoch": bytes(15)}),
        (NEAR, {"offsets": b"", "slots": b"", "generations": b""}),
        (NEAR, {"offsets": bytes(23)}),
        (NEAR, {"slots": bytes(16)}),
        (NEAR, {"generations": bytes(32)}),
        (NEAR, {name: bytes(8 * (r.PULL_KEYS_MAX + 1)) for name in ("offsets", "slots", "generations")}),
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


def test_places_of_the_most_chunks_of_an_offer_fit_a_message() -> None:
    column = bytes(8 * r.PULL_KEYS_MAX)
    most = replace(NEAR, offsets=column, slots=column, generations=column)
    assert wire.decode_answer([wire.encode_message(most, 3)]) == (3, most)


def test_places_have_to_answer_the_pull() -> None:
    wire.check_near(ASK_NEAR, NEAR)
    with pytest.raises(wire.WireFault):
        wire.check_near(ASK_NEAR, replace(NEAR, pull=8))


def test_staged_rows_have_to_answer_the_stage() -> None:
    wire.check_staged(STAGE, STAGED)
    wire.check_staged(STAGE, staged_of(STAGE, 1))
    for change in ({"pull": 8}, {"part": 2}, {"gone": bytes(4), "checks": bytes(16)}):
        with pytest.raises(wire.WireFault):
            wire.check_staged(STAGE, replace(STAGED, **change))


def test_an_offer_has_to_answer_the_pull() -> None:
    wire.check_offer(PULL, OFFER)
    wire.check_offer(PULL, offer_to(PULL, 2))
    for change in ({"pull": 8}, {"chunks": 4}, {"checks": OFFER.checks + bytes(4)}):
        with pytest.raises(wire.WireFault):
            wire.check_offer(PULL, replace(OFFER, **change))
    with pytest.raises(wire.WireFault, match="not alone"):
        wire.check_offer(PULL, replace(OFFER, present=bytes([1]) * 3))


def test_an_offer_of_chunks_alone_names_as_many_as_it_has() -> None:
    whole = offer_to(ALONE)
    wire.check_offer(ALONE, whole)
    wire.check_offer(ALONE, replace(offer_to(ALONE, 2), present=bytes([1, 0, 1])))
    wire.check_offer(ALONE, replace(offer_to(ALONE, 1), present=bytes([1])))
    wire.check_offer(ALONE, replace(offer_to(ALONE, 0), present=bytes(2)))
    wire.check_offer(ALONE, replace(offer_to(ALONE, 1), present=bytes([2, 1, 2])))
    wire.check_offer(ALONE, offer_to(ALONE, 0))
    for present in (b"", bytes([1, 1, 0]), bytes([1]) * 4, bytes([1, 1, 1, 0])):
        with pytest.raises(wire.WireFault, match="as present"):
            wire.check_offer(ALONE, replace(whole, present=present))


def test_sizes_are_checked_before_anything_is_decoded() -> None:
    assert "expected 2.." in str(_fault([b"\xc1" * (wire.MESSAGE_BYTES_MAX + 1)]))
    assert "expected 2..1024" in str(_fault([wire.encode_message(pull_of(1, 64), 1)], bytes_max=wire.HELLO_BYTES_MAX))
    assert "2 parts" in str(_fault([b"xx", b"xx"]))
    assert "0 parts" in str(_fault([]))
    assert "0 bytes" in str(_fault([b""]))


def test_unknown_kinds_and_other_directions_are_named() -> None:
    for record in (r.Pong(bytes(16)), OFFER, r.Refused("a", "b"), CHANGES, GAP, PAGE):
        assert _fault([wire.encode_message(record, 2)]).code == r.RefusalCode.KIND
    fault = _fault([msgpack.packb([99, 6])])
    assert (fault.code, fault.sequence, str(fault)) == (r.RefusalCode.KIND, 6, "kind 99 is not known here")
    for record in (PULL, *FOLLOWS):
        with pytest.raises(wire.WireFault):
            wire.decode_answer([wire.encode_message(record, 2)])


def test_versions_that_do_not_meet_are_refused_with_the_side_to_update() -> None:
    assert wire.choose_version(replace(HELLO, version=9)) == r.NEWEST_VERSION
    with pytest.raises(wire.WireFault, match="update this node") as refusal:
        wire.choose_version(replace(HELLO, version=9, oldest=8))
    assert refusal.value.code == r.RefusalCode.VERSION
    # Of 1 the streams, of 2 the pulls and offers have another format.
    for version in (1, 2):
        with pytest.raises(
            wire.WireFault, match=f"speaks versions 1 to {version}, this node 3 to 3: update the puller"
        ):
            wire.choose_version(replace(HELLO, version=version, oldest=1))


def test_wrong_types_and_numbers_of_fields_are_refused() -> None:
    for record in REQUESTS[:3]:
        values = [getattr(record, field.name) for field in fields(record)]
        for at in range(len(values)):
            wrong: Any
            for wrong in (None, 1.5, 1 if isinstance(values[at], bool) else True, [[]], {"a": 1}):
                assert _fault([msgpack.packb([record.KIND, 1, *values[:at], wrong, *values[at + 1 :]])])
        assert _fault([msgpack.packb([record.KIND, 1, *values[:-1]])])
        assert _fault([msgpack.packb([record.KIND, 1, *values, 1])])


def _refusal_of(decode: Callable[[list[bytes]], wire.Message], message: bytes) -> wire.WireFault | None:
    try:
        decode([message])
    except wire.WireFault as fault:
        return fault
    return None


def test_random_and_damaged_messages_are_refused_or_valid_and_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    valid = [wire.encode_message(record, 1) for record in (*REQUESTS, *ANSWERS)]
    refused = 0
    for _ in range(10_000):
        message = bytearray(chance.choice(valid) if chance.random() < 0.9 else chance.randbytes(chance.randrange(80)))
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(message) or 1)
            message[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        for decode in (wire.decode_request, wire.decode_answer):
            fault = _refusal_of(decode, bytes(message))
            if fault is not None:
                refused += 1
                assert str(fault).isprintable()
                wire.encode_message(r.Refused(fault.code, str(fault)), fault.sequence)
    assert refused > 5_000


def test_an_offer_has_checksums_of_summaries_too() -> None:
    layout = replace(LAYOUT, head_dim=32, summaries="mean")
    assert layout.extents == layout.layers + 1
    pull, chunks = replace(PULL, layout=layout.to_wire()), 1
    offer = replace(OFFER, pull=PULL.pull, chunks=chunks, checks=bytes(4 * layout.extents * chunks))
    wire.check_offer(pull, offer)
    with pytest.raises(wire.WireFault, match="checks"):
        wire.check_offer(pull, replace(offer, checks=bytes(4 * layout.layers * chunks)))


def test_an_answer_never_goes_back() -> None:
    wire.check_follow(ASK_CHANGES, CHANGES)
    wire.check_follow(ASK_CHANGES, GAP)
    wire.check_follow(ASK_CHANGES, replace(GAP, last=3))  # a former life's events
    wire.check_follow(ASK_CHANGES, r.Changes(7, 7, False, b"", b"", 3))
    wire.check_follow(ASK_CHANGES, replace(CHANGES, last=7))  # of a save under way: keys, and no event
    wire.check_follow(ASK_KEYS, PAGE)
    wire.check_follow(ASK_KEYS, r.Keys(b"", 9, 1 << 32))
    wire.check_follow(ASK_KEYS, r.Keys(KEYS, 9, r.NO_MORE_KEYS))
    faults: list[tuple[r.AskFollow, object]] = [
        (ASK_CHANGES, replace(CHANGES, last=6)),
        (ASK_KEYS, replace(PAGE, cursor=1 << 32)),
        (ASK_KEYS, replace(PAGE, cursor=0)),
        (ASK_CHANGES, PAGE),
        (ASK_KEYS, CHANGES),
        (ASK_CHANGES, r.Pong(bytes(16))),
    ]
    for ask, answer in faults:
        with pytest.raises(wire.WireFault):
            wire.check_follow(ask, answer)
