"""Golden files of every form in which events are published: a changed file is a changed format.

`python -m tests.golden.test_event_formats` writes them. A reader of the wire that shares no code with the daemon is in
`tests/rigs/events/router.py`, and reads the same bytes here.
"""

import ast
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpool_native
from kvpool.events import Cause, Event, EventKind
from kvpool.keys import salt_tag
from kvpool.layout import Layout
from kvpool.router_events.block_hashes import block_hashes, blocks_of
from kvpool.router_events.columns import pack_events, unpack_events
from kvpool.router_events.trtllm_format import trtllm_event
from kvpool.router_events.vllm_format import DYNAMO_SALT, EventForm, batches
from kvpool.states import Level
from tests.rigs.events import router
from tests.rigs.events.router import decode

HERE = Path(__file__).parent
LAYOUT = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=4)
KEYS = [kvpool_native.blake3(bytes([number])) for number in range(10)]
TAG = salt_tag(b"tenant-a")
TOKENS = struct.pack("<8i", 1, 2, 3, 50_000, -1, 0, 127, 128)
DRAM, SSD, PEER, STORE = 1 << Level.DRAM, 1 << Level.SSD, 1 << Level.PEER, 1 << Level.STORE
EVENTS = (
    Event(0, EventKind.CREATED, capacities=(0, 100, 800, 0)),
    Event(1, EventKind.STORED, 0, KEYS[0] + KEYS[1], b"", TOKENS, tiers=DRAM),
    Event(2, EventKind.STORED, 0, KEYS[2], KEYS[1], TOKENS[:16], tiers=DRAM, priority=80, priority_before=80),
    Event(3, EventKind.STORED, 0, KEYS[3], KEYS[2], b"", tiers=DRAM),
    Event(4, EventKind.UPDATED, 0, KEYS[0], b"", TOKENS[:16], tiers=DRAM | SSD, tiers_before=DRAM),
    Event(5, EventKind.UPDATED, 0, KEYS[0], b"", b"", tiers=SSD, tiers_before=DRAM | SSD, cause=Cause.OWN_CLASS),
    Event(6, EventKind.UPDATED, 0, KEYS[2], KEYS[1], b"", DRAM, DRAM, priority=35, priority_before=80),
    Event(7, EventKind.REMOVED, 0, KEYS[2] + KEYS[1], b"", b"", tiers_before=DRAM, cause=Cause.FLUSHED),
    Event(8, EventKind.STORED, 0, KEYS[4] + KEYS[5], b"", TOKENS, tiers=DRAM, adapter="sql-lora", salt_tag=TAG),
    Event(9, EventKind.STORED, 0, KEYS[6], KEYS[5], TOKENS[:16], tiers=DRAM, adapter="sql-lora", salt_tag=TAG),
    Event(10, EventKind.STORED, 0, KEYS[7], b"", TOKENS[:16], tiers=SSD, salt_tag=TAG),
    Event(11, EventKind.STORED, 0, KEYS[8] + KEYS[9], b"", TOKENS, tiers=DRAM, adapter="sql-lora"),
    Event(
        12, EventKind.UPDATED, 0, KEYS[8], b"", TOKENS[:16], tiers=DRAM | STORE, tiers_before=DRAM, adapter="sql-lora"
    ),
    Event(13, EventKind.UPDATED, 0, KEYS[8], b"", b"", tiers=DRAM, tiers_before=DRAM | STORE, cause=Cause.DROPPED),
)
NAMES = {0: ("model", LAYOUT)}
WALL_TIME_S = 1_700_000_000.5


def _payloads(form: EventForm) -> bytes:
    published = [("kv@host@model", form.events_of(event, "model", LAYOUT)) for event in EVENTS]
    published.append(("kv@host@model", [form.all_cleared()]))
    return b"".join(
        struct.pack(">I", len(payload)) + payload
        for payload in (batch.payload(WALL_TIME_S) for batch in batches(published))
    )


FORMS: dict[str, Callable[[], bytes]] = {
    "events_map.bin": lambda: _payloads(EventForm()),
    "events_map_blocks.bin": lambda: _payloads(EventForm(block_tokens=2)),
    "events_positional.bin": lambda: _payloads(EventForm(is_positional=True)),
    "events_trtllm.json": lambda: _json([trtllm_event(event, NAMES) for event in EVENTS]),
    "events_trtllm_blocks.json": lambda: _json([trtllm_event(event, NAMES, 2) for event in EVENTS]),
    "events_column.bin": lambda: pack_events(EVENTS),
}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _write() -> None:
    for name, make in FORMS.items():
        (HERE / name).write_bytes(make())


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_unchanged(name: str) -> None:
    assert FORMS[name]() == (HERE / name).read_bytes()


def test_a_column_decodes_to_its_events() -> None:
    assert unpack_events((HERE / "events_column.bin").read_bytes()) == EVENTS


def _messages(name: str) -> list[bytes]:
    data, found = (HERE / name).read_bytes(), []
    while data:
        (size,) = struct.unpack_from(">I", data)
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def test_both_forms_have_the_same_content() -> None:
    """The positional one but for `cache_salt`, for which it has a place of Dynamo's among `extra_keys`."""
    maps = [decode(payload) for payload in _messages("events_map.bin")]
    positional = [decode(payload) for payload in _messages("events_positional.bin")]
    assert all((ts, rank) == (WALL_TIME_S, 0) for ts, _, rank in maps)
    events = [event for _, events, _ in maps for event in events]
    assert [event.pop("cache_salt", "") for event in events] == [""] * 5 + [TAG.hex()] * 3 + [""] * 4
    assert [_without_dynamos(event) for _, events, _ in positional for event in events] == events
    assert [(event["type"], event.get("medium")) for event in events] == [
        ("BlockStored", "CPU"),
        ("BlockStored", "CPU"),
        ("BlockStored", "STORAGE"),
        ("BlockRemoved", "CPU"),
        ("BlockRemoved", "CPU"),
        ("BlockStored", "CPU"),
        ("BlockStored", "CPU"),
        ("BlockStored", "STORAGE"),
        ("BlockStored", "CPU"),
        ("BlockStored", "EXTERNAL"),
        ("BlockRemoved", "EXTERNAL"),
        ("AllBlocksCleared", None),
    ]
    assert events[0]["block_hashes"] == [int.from_bytes(key[-8:], "big") for key in KEYS[:2]]
    assert events[1]["parent_block_hash"] == events[0]["block_hashes"][1]
    assert events[0]["token_ids"] == [1, 2, 3, 50_000, -1, 0, 127, 128]
    assert len(maps) == len(positional) == 1


def _without_dynamos(event: dict[str, Any]) -> dict[str, Any]:
    """An event without the salt where Dynamo reads it: of the first block of every event."""
    if "extra_keys" not in event:
        return event
    first, *rest = event["extra_keys"]
    return {**event, "extra_keys": [[name for name in first if not name.startswith(DYNAMO_SALT)] or None, *rest]}


@pytest.mark.parametrize(
    ("name", "dynamos"), [("events_map.bin", []), ("events_positional.bin", [DYNAMO_SALT + TAG.hex()])]
)
def test_adapter_and_salt_are_where_vllm_and_dynamo_read_them(name: str, dynamos: list[str]) -> None:
    """The salt as a tag, for the first block of a prompt; the adapter for each block."""
    events = [event for payload in _messages(name) for event in decode(payload)[1]]
    assert [(event["lora_name"], event.get("extra_keys")) for event in events[5:9]] == [
        ("sql-lora", [["sql-lora", TAG.hex(), *dynamos], ["sql-lora"]]),
        ("sql-lora", [["sql-lora", *dynamos]]),
        (None, [[TAG.hex(), *dynamos]]),
        ("sql-lora", [["sql-lora"], ["sql-lora"]]),
    ]
    assert all("extra_keys" not in event for event in events[:3])
    assert all(event["lora_id"] is None for event in events[5:9])
    assert all(b"tenant-a" not in (HERE / form).read_bytes() for form in FORMS)


def test_maps_say_where_a_block_is_where_that_is_asked_for() -> None:
    form = EventForm(has_places=True)
    events = [wire for event in EVENTS for wire in form.events_of(event, "model", LAYOUT)]
    places = [(event["locality"], event["ownership"]) for event in events if isinstance(event, dict)]
    assert places == [("LOCAL", "kvpool")] * 9 + [("REMOTE", "kvpool")] * 2


def test_what_other_nodes_have_is_not_published() -> None:
    gained = Event(1, EventKind.UPDATED, 0, KEYS[0], b"", TOKENS[:16], tiers=DRAM | PEER, tiers_before=DRAM)
    lost = Event(2, EventKind.UPDATED, 0, KEYS[0], b"", b"", tiers=DRAM, tiers_before=DRAM | PEER)
    for form in (EventForm(), EventForm(is_positional=True), EventForm(has_places=True), EventForm(block_tokens=2)):
        assert [form.events_of(event, "model", LAYOUT) for event in (gained, lost)] == [[], []]


def test_the_tag_of_a_salt_is_unchanged() -> None:
    """Routers compute it: a changed tag is a changed format."""
    assert TAG.hex() == "67af85094a29a5a027a25acc42269173"
    assert len({salt_tag(salt) for salt in (b"", b"a", b"b", b"a\0")}) == 4
    assert salt_tag(b"") == b""


def test_the_router_of_the_tests_shares_no_code_with_the_daemon() -> None:
    imported = [
        node for node in ast.walk(ast.parse(Path(router.__file__).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    assert not [
        node.module for node in imported if node.module and node.module.split(".")[0] in ("kvpool", "kvpool_client")
    ]


def test_the_envelope_begins_as_vllms_does() -> None:
    assert _messages("events_map.bin")[0][:2] == b"\x93\xcb"
    assert _messages("events_map.bin")[0][10:].startswith(b"\x9c\x88\xa4type\xabBlockStored\xacblock_hashes")
    assert _messages("events_positional.bin")[0][10:].startswith(b"\x9c\x98\xabBlockStored\x92\xcf")


def test_blocks_of_a_chunk_end_with_its_key_and_are_all_different() -> None:
    hashes = block_hashes(KEYS[0], 64)
    assert len(set(hashes)) == 64
    assert hashes[-1] == int.from_bytes(KEYS[0][-8:], "big")
    assert block_hashes(KEYS[0], 1) == hashes[-1:]
    assert [blocks_of(256, tokens) for tokens in (0, 16, 256, 24, 512)] == [1, 16, 1, 1, 1]


if __name__ == "__main__":
    _write()
