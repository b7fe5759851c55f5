"""Answers about events: they fit a frame, however long the names in them are."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.events import Event, EventKind
from kvpool.index.namespaces import NAMESPACES_MAX
from kvpool.layout import Layout
from kvpool.protocol.records import events as em
from kvpool.protocol.records import messages as m
from kvpool.protocol.verbs import handlers_of
from kvpool.router_events.columns import unpack_events, unpack_namespaces
from kvpool.server.events.requests import EventVerbs
from tests.rigs.events.journal_rig import Rig

# With a name as long as there are.
LAYOUT = Layout(
    layers=1,
    kv_heads=1,
    head_dim=1,
    dtype="float8_e4m3fn",
    chunk_tokens=1 << 12,
    rank=1022,
    world=1023,
    format="f" * 256,
    block_tokens=1 << 12,
)


@pytest.mark.parametrize("is_engine", [False, True])
def test_events_of_many_namespaces_come_in_answers_that_fit_a_frame(*, is_engine: bool) -> None:
    rig = Rig()
    opened = [rig.namespaces.open(f"{number:0>512}", LAYOUT) for number in range(NAMESPACES_MAX - 1)]
    log = rig.journal._log
    for namespace in opened:
        log.append(Event(log.next_id, EventKind.STORED, namespace.id, os.urandom(32), os.urandom(32), tiers=1))
    pool: Any = SimpleNamespace(journal=rig.journal, namespaces=rig.namespaces)
    session: Any = SimpleNamespace(namespace_ids={namespace.id for namespace in opened[1::2]})
    role = m.ROLE_ENGINE if is_engine else m.ROLE_ADMIN
    _, ask_events = handlers_of(role, [EventVerbs(pool, session if is_engine else None)])[em.AskEvents.KIND]
    published: list[int] = []
    last = -1
    while last < log.next_id - 1:
        answer: Any = ask_events(em.AskEvents(b"", last, 0.0))
        assert len(m.encode(answer, 1)) < 1 << 20
        assert answer.last > last
        last = answer.last
        events = [event for event in unpack_events(answer.events) if event.namespace >= 0]
        assert {event.namespace for event in events} == set(unpack_namespaces(answer.namespaces))
        published += [event.namespace for event in events]
    assert published == [namespace.id for namespace in opened if not is_engine or namespace.id in session.namespace_ids]


def test_the_history_of_each_key_is_looked_for_in_a_turn_of_its_own() -> None:
    rig = Rig()
    pool: Any = SimpleNamespace(journal=rig.journal, namespaces=rig.namespaces)
    _, ask_history = handlers_of(m.ROLE_ADMIN, [EventVerbs(pool, None)])[em.AskChunkHistory.KIND]
    keys = [os.urandom(32) for _ in range(em.HISTORY_KEYS_MAX)]
    parts: Any = ask_history(em.AskChunkHistory(b"".join(keys)))
    for _ in keys[1:]:
        assert next(parts) is None
    with pytest.raises(StopIteration) as end:
        next(parts)
    assert [row["key"] for row in end.value.value.values["chunks"]] == [key.hex() for key in keys]
