"""Orchestrators' envelopes: what is read, what is rejected and why. No content of an envelope may raise."""

import json
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.states import TokenRange
from kvpool_client.hint_envelope import (
    ACTIONS_MAX,
    DIRECTIVES_MAX,
    PIN_S,
    PIN_S_MAX,
    Action,
    Hints,
    Outcome,
    hints_of_transfer_params,
    parse_hints,
)


def action(kind: str, payload: Any, **fields: Any) -> dict[str, Any]:
    return {"action_id": "a1", "action_type": kind, "action_version": "1.0", "payload": payload, **fields}


def envelope(*actions: Any, **fields: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m1", "actions": list(actions), **fields}


def good(kind: str, payload: Any) -> Action:
    (entry,) = parse_hints(envelope(action(kind, payload))).actions
    assert isinstance(entry, Action), entry
    return entry


def rejected(given: Any) -> str:
    (entry,) = parse_hints(given).actions
    assert isinstance(entry, Outcome)
    assert entry.status == "rejected"
    return entry.reason


def test_a_retain_has_directives_or_is_one() -> None:
    read = good(
        "kv.retain",
        {
            "scope": "alice",
            "directives": [
                {"start": 0, "end": 32, "priority": 80, "duration": 60.0},
                {"start": 32, "end": None, "priority": 40},
                {"covers_output": True, "priority": 70, "duration": 5.0},
            ],
        },
    )
    assert read.ranges == (TokenRange(0, 32, 80, 60.0), TokenRange(32, None, 40))
    assert read.output == TokenRange(0, None, 70, 5.0)
    assert good("kv.retain", {"priority": 3, "ttl_seconds": 2.5}).ranges == (TokenRange(0, None, 3, 2.5),)
    assert good("Retain", {"directives": []}).ranges == ()


def test_a_pin_is_bounded() -> None:
    assert good("kv.pin", {}).ranges == (TokenRange(0, None, 100, PIN_S),)
    assert good("kv.pin", {"end": 100, "ttl_seconds": 5}).ranges == (TokenRange(0, 100, 100, 5),)
    long = good("kv.pin", {"duration": PIN_S_MAX * 2})
    assert long.ranges == (TokenRange(0, None, 100, PIN_S_MAX),)
    assert "is cut to" in long.note


def test_prefetch_and_demote_name_ranges() -> None:
    assert good("kv.prefetch", {}).ranges == (TokenRange(0, None),)
    assert good("kv.demote", {"start": 512, "end": 1024}).ranges == (TokenRange(512, 1024),)


def test_objects_and_json_are_envelopes_too() -> None:
    plain = envelope(action("kv.pin", {"end": 7}))
    as_object = SimpleNamespace(**{**plain, "actions": [SimpleNamespace(**plain["actions"][0])]})
    assert parse_hints(plain) == parse_hints(json.dumps(plain)) == parse_hints(json.dumps(plain).encode())
    assert parse_hints(plain) == parse_hints(as_object)


def test_earlier_actions_win_and_rejected_ones_do_not_count() -> None:
    hints = parse_hints(
        envelope(
            action("kv.retain", {"directives": [{"start": 0, "priority": 101}]}),
            action("kv.retain", {"priority": 10, "end": 100}),
            action("kv.pin", {}),
            action("kv.retain", {"directives": [{"covers_output": True, "priority": 1}]}),
        )
    )
    assert hints.retention == (TokenRange(0, 100, 10), TokenRange(0, None, 100, PIN_S))
    assert hints.output == TokenRange(0, None, 1)


@pytest.mark.parametrize(
    ("directive", "reason"),
    [
        ({"start": 0, "end": 16}, "has no priority"),
        ({"start": 0, "end": 16, "priority": 101}, "priority is 101"),
        ({"start": 0, "end": 16, "priority": True}, "priority is True"),
        ({"start": -1, "end": 16, "priority": 10}, "start is -1"),
        ({"start": 16, "end": 16, "priority": 10}, "end is 16, expected None or more than start"),
        ({"start": "0", "priority": 10}, "start is '0'"),
        ({"priority": 10, "duration": -1.0}, "duration_s is -1.0"),
        ({"priority": 10, "duration": float("nan")}, "duration_s is nan"),
        ({"priority": 10, "duration": 10**400}, "duration is int, expected a number"),
        ({"priority": 10, "duration": "5"}, "duration_s is '5'"),
        ({"priority": 10, "duration": 5, "ttl_seconds": 5}, "given twice"),
        ({"priority": 10, "bogus": 1}, "bogus"),
        ({"covers_output": "false", "priority": 10}, "covers_output is false"),
        ({"covers_output": True, "start": 0, "priority": 10}, "start"),
        ("not a map", "expected a map"),
        (dict.fromkeys(range(17), 1), "at most 16 fields"),
        ({"priority": 10, "start": "x" * 1000}, "start is xxx"),
        ({"priority": 10, "end": [[1] * 1000]}, "end is list, expected a number"),
        ({"priority": 10, "start": {"x" * 1000: 1}}, "start is dict, expected a number"),
        (None, "expected a map"),
    ],
)
def test_bad_directives_are_rejected(directive: Any, reason: str) -> None:
    assert reason in rejected(envelope(action("kv.retain", {"directives": [directive]})))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "protocol_version is missing"),
        (17, "protocol_version is missing"),
        ([], "protocol_version is missing"),
        ("{", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        ("[" * 50_000, "no JSON"),
        ("x" * (2 << 20), "bytes of JSON"),
        (envelope(protocol_version="2.0"), "expected 0.x or 1.x"),
        (envelope(protocol_version=1), "protocol_version is 1"),
        (envelope(message_id=""), "message_id is"),
        (envelope(message_id="m" * 1000), "at most 512 characters"),
        (envelope(actions={}), "actions is"),
        (envelope(actions="abc"), "actions is abc"),
        (envelope(actions=[{}] * (ACTIONS_MAX + 1)), f"at most {ACTIONS_MAX}"),
        (envelope(None), "action_id is missing"),
        (envelope(action("kv.retain", {}, action_version="7")), "action_version is 7"),
        (envelope(action("kv.retain", [])), "payload is []"),
        (envelope(action("kv.retain", {})), "no priority"),
        (envelope(action("kv.retain", {"directives": {}})), "directives is {}"),
        (envelope(action("kv.retain", {"directives": [], "x": 1})), "beside its directives"),
        (
            envelope(action("kv.retain", {"directives": [{"priority": 1}] * (DIRECTIVES_MAX + 1)})),
            f"at most {DIRECTIVES_MAX} in all",
        ),
        (envelope(action("kv.pin", {str(n): n for n in range(17)})), "at most 16 fields"),
        (envelope(action("kv.retain", {"priority": 1, "block_hashes": ["1"]})), "cannot find chunks by"),
        (envelope(action("kv.demote", {"session_id": "s"})), "the pool has no sessions"),
        (envelope(action("kv.share", {})), "other nodes"),
        (envelope(action("kv.fetch", {})), "other nodes"),
        (envelope(action("kv.explode", {})), "expected kv.retain"),
        (envelope(action("kv.pin", {"priority": 5})), "priority"),
        (envelope(action("kv.prefetch", {"start": 5, "end": 5})), "end is 5"),
    ],
)
def test_bad_actions_are_rejected_with_a_reason(given: Any, reason: str) -> None:
    assert reason in rejected(given)


def test_one_bad_action_leaves_the_others() -> None:
    first, second = parse_hints(envelope(action("kv.share", {}), action("kv.pin", {}))).actions
    assert isinstance(first, Outcome)
    assert isinstance(second, Action)


def test_directives_are_bounded_over_all_actions_whether_they_are_good_or_not() -> None:
    half = [{"priority": 1}] * (DIRECTIVES_MAX // 2)
    spilt = [*half[1:], {"priority": 101}]
    first, bad, beyond, pin = parse_hints(
        envelope(
            action("kv.retain", {"directives": half}),
            action("kv.retain", {"directives": spilt}),
            action("kv.retain", {"priority": 1}),
            action("kv.pin", {}),
        )
    ).actions
    assert isinstance(first, Action)
    assert isinstance(bad, Outcome)
    assert isinstance(beyond, Outcome)
    assert isinstance(pin, Action)
    assert "priority is 101" in bad.reason
    assert beyond.reason == f"1 directives where 0 are left, expected at most {DIRECTIVES_MAX} in all"


@pytest.mark.timed
@pytest.mark.parametrize("name", ["retention", "decode_priority", "kv_hints"])
def test_the_largest_transfer_params_are_read_within_little_time(name: str) -> None:
    many = [{"start": at, "end": at + 1, "priority": 50, "duration": 3.0} for at in range(256)]
    given: dict[str, Any] = {
        "retention": many * 100,
        "decode_priority": [many] * 10_000,
        "kv_hints": envelope(*[action("kv.retain", {"directives": many[: 1 + at]}) for at in range(ACTIONS_MAX)]),
    }
    before = time.thread_time()
    for _ in range(10):
        hints_of_transfer_params({name: given[name]})
    # Measured: 1 ms at most for each.
    assert time.thread_time() - before < 10 * 0.01


def test_transfer_params_may_set_retention_beside_an_envelope() -> None:
    params = {
        "kv_hints": envelope(action("kv.retain", {"directives": [{"covers_output": True, "priority": 1}]})),
        "retention": [{"start": 0, "end": 100, "priority": 100}],
        "decode_priority": 20,
        "decode_duration_s": 10.0,
        "remote_engine_id": "somebody else's",
    }
    hints, ranges, output = hints_of_transfer_params(params)
    assert len(hints.actions) == 1
    assert ranges == (TokenRange(0, 100, 100),)
    assert output == TokenRange(0, None, 20, 10.0)
    assert hints_of_transfer_params(None) == (Hints("", ()), (), None)
    assert hints_of_transfer_params({"other": 1}) == (Hints("", ()), (), None)


@pytest.mark.parametrize(
    "params",
    [
        {"retention": "x"},
        {"retention": [{"start": 0}]},
        {"retention": 5},
        {"decode_priority": "high"},
        {"decode_priority": 300},
        {"decode_duration_s": 5},
    ],
)
def test_bad_transfer_params_are_a_result(params: Any) -> None:
    hints, ranges, output = hints_of_transfer_params(params)
    assert [entry.status for entry in hints.actions if isinstance(entry, Outcome)] == ["rejected"]
    assert ranges == ()
    assert output is None


def test_the_envelope_in_the_document_is_accepted() -> None:
    text = (Path(__file__).parents[3] / "docs" / "events.md").read_text()
    given = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert given is not None
    hints = parse_hints(given[1])
    assert hints.retention == (TokenRange(0, 1000, 100, 600.0),)
    assert hints.output == TokenRange(0, None, 20)


def test_no_envelope_raises() -> None:
    seed = 20261121
    print(f"seed {seed}")
    chance = random.Random(seed)
    words = ["start", "end", "priority", "duration", "covers_output", "directives", "kv.pin", "kv.retain", "1.0", "a"]

    def anything(depth: int) -> Any:
        dice = chance.randrange(12 if depth else 8)
        if dice < 8:
            return (None, True, -1, 10**30, 0.5, float("inf"), chance.choice(words), b"\xff")[dice]
        if dice < 10:
            return [anything(depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice([*words, 5, None]): anything(depth - 1) for _ in range(chance.randrange(4))}

    for _ in range(3000):
        payload = {chance.choice(words): anything(3) for _ in range(chance.randrange(4))}
        hints = parse_hints(envelope(action(chance.choice(["kv.retain", "kv.pin", "kv.demote"]), payload)))
        assert len(hints.actions) == 1
        parse_hints(anything(4))
        hints_of_transfer_params({chance.choice(["kv_hints", "retention", "decode_priority"]): anything(4)})
