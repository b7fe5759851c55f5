"""The publisher's source over a journal driven by hand: what is read where the publisher is, and what on the loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.events import EventKind
from kvpool.ids import NamespaceId
from kvpool.index.namespaces import Namespace
from kvpool.server.events.source import EventSource
from tests.rigs.events.journal_rig import LAYOUT, Rig


def test_events_are_read_while_the_loop_stands_and_models_on_it_once_they_are_new() -> None:
    async def run() -> None:
        rig = Rig()
        source = EventSource(asyncio.get_running_loop(), rig.journal, rig.namespaces)
        assert (await asyncio.to_thread(source.since, -1)).models == {"model"}
        rig.store([1, 2])
        rig.journal.take_changes()
        found = source.since(0)  # the loop cannot answer meanwhile
        assert [(event.kind, event.id) for event in found.slice.events] == [(EventKind.STORED, 1)]
        assert found.namespaces == {rig.namespace.id: ("model", LAYOUT)}
        assert found.models == frozenset()
        rig.store([3])
        assert source.since(1).slice.events == (), "what is not recorded yet"
        rig.namespaces.open("another", LAYOUT)
        assert (await asyncio.to_thread(source.since, 1)).models == {"model", "another"}
        assert source.since(1).models == frozenset()

    asyncio.run(run())


def test_no_number_is_reused_while_the_namespaces_of_events_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.store([1])
    rig.journal.take_changes()
    is_reading, may_go_on, is_forgotten = threading.Event(), threading.Event(), threading.Event()
    by_id = rig.namespaces.by_id

    def read_slowly(number: NamespaceId) -> Namespace:
        is_reading.set()
        assert may_go_on.wait(10.0)
        return by_id(number)

    def forget() -> None:
        rig.journal.forget_namespaces()
        is_forgotten.set()

    monkeypatch.setattr(rig.namespaces, "by_id", read_slowly)
    with ThreadPoolExecutor(2) as threads:
        read = threads.submit(rig.journal.recorded, 0)
        assert is_reading.wait(10.0)
        threads.submit(forget)
        assert not is_forgotten.wait(0.05)
        may_go_on.set()
        found, named = read.result()
        assert is_forgotten.wait(10.0)
    assert [event.kind for event in found.events] == [EventKind.STORED]
    assert named == {rig.namespace.id: rig.namespace}
    assert rig.journal.recorded(found.last)[0].is_gap
    assert rig.journal.verify() == []
