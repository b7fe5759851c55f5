"""vLLM's form of events: the bytes of a message are those of its events with their token ids as lists."""

from typing import Any

import msgpack
import numpy as np
import pytest

from kvpool.events import Event, EventKind
from kvpool.layout import Layout
from kvpool.router_events.vllm_format import EventForm, TokenIds, WireEvent, batches
from kvpool.states import Level

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=16, chunk_tokens=16)
DRAM, BOTH = 1 << Level.DRAM, 1 << Level.DRAM | 1 << Level.SSD
TOKENS = np.arange(-3, 29, dtype="<i4") * 70_000
STORED = Event(
    1,
    EventKind.STORED,
    namespace=0,
    keys=bytes(range(64)),
    parent=bytes(range(32, 64)),
    tokens=TOKENS.tobytes(),
    tiers=DRAM,
)
REMOVED = Event(2, EventKind.REMOVED, namespace=0, keys=bytes(range(64)), tiers_before=BOTH)


def plain(event: WireEvent) -> Any:
    """An event as msgpack packs it, with a list for its token ids."""
    if isinstance(event, dict):
        return {name: plain_value(value) for name, value in event.items()}
    return [plain_value(value) for value in event]


def plain_value(value: object) -> object:
    return value.tolist() if isinstance(value, TokenIds) else value


@pytest.mark.parametrize("is_positional", [False, True])
@pytest.mark.parametrize("has_places", [False, True])
@pytest.mark.parametrize("scope", [("", b""), ("adapter", b""), ("adapter", b"1" * 16)])
def test_a_message_has_the_bytes_of_its_events(is_positional: bool, has_places: bool, scope: tuple[str, bytes]) -> None:
    form = EventForm(is_positional=is_positional, block_tokens=8, has_places=has_places)
    adapter, salt_tag = scope
    stored = STORED._replace(adapter=adapter, salt_tag=salt_tag)
    moved = stored._replace(
        kind=EventKind.UPDATED, keys=stored.keys[:32], tokens=TOKENS[:16].tobytes(), tiers=BOTH, tiers_before=DRAM
    )
    events = [found for event in (stored, moved, REMOVED) for found in form.events_of(event, "model", LAYOUT)]
    events.append(form.all_cleared())
    assert len(events) == 5
    (batch,) = batches([("topic", events)])
    packed: bytes = msgpack.packb([1.5, [plain(event) for event in events], 0], use_bin_type=True)
    assert batch.payload(1.5) == packed
