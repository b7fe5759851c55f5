"""Engines that report without end, or what is not theirs: they are bounded, and nobody else's events change."""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import KVPoolError, Refused
from kvpool.events import Event, EventKind
from kvpool.journal.engine_chunks import CHUNK_BYTES
from kvpool.journal.event_log import EVENT_BYTES
from kvpool.keys import DEFAULT_DOMAIN, pack_scope, root_key
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import engine_chunks as ec
from kvpool.router_events.columns import unpack_events
from kvpool.server.events.engine_reports import BURST_BYTES
from kvpool.states import Level, ReportState
from tests.hostile.rigs.raw_clients import MODEL, engine, hello_of
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import tokens_of

TAKEN, _, NO_PARENT, FOREIGN = map(int, ReportState)
HBM, DRAM = 1 << Level.HBM, 1 << Level.DRAM
# Chunks of many token ids.
WIDE = kv.Layout(layers=1, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=2048)


def root(model: str = MODEL, layout: kv.Layout = SMALL) -> bytes:
    return root_key(DEFAULT_DOMAIN, model=model, adapter="", salt=b"", layout=layout)


def keys_of(tokens: np.ndarray, layout: kv.Layout = SMALL, start: bytes = b"") -> bytes:
    """The packed keys of a prompt."""
    return kvpool_native.chain_keys(
        start or root(layout=layout), kvpool_native.hash_leaves(tokens, layout.chunk_tokens)
    )


def report_of(prompt: np.ndarray, layout: kv.Layout = SMALL, start: bytes = b"", **changed: Any) -> ec.ReportChunks:
    """A report that a prompt is there; `changed`: fields that are otherwise."""
    count = len(prompt) // layout.chunk_tokens
    start = start or root(layout=layout)
    parents = (start + keys_of(prompt, layout, start))[: 32 * count]
    fields: dict[str, Any] = {
        "source": 0,
        "is_anew": False,
        "removed": b"",
        "parents": parents,
        "firsts": b"\1" + bytes(count - 1) if count else b"",
        "tokens": prompt.astype("<i4").tobytes(),
        "scopes": [b""] if count else [],
        "scope_of": bytes(2 * count),
    }
    return ec.ReportChunks(**{**fields, **changed})


def nothing(**changed: Any) -> ec.ReportChunks:
    return report_of(np.empty(0, np.int32), **changed)


def states(connection: BlockingConnection, report: ec.ReportChunks) -> list[int]:
    return list(connection.call(report, ec.ChunksTaken).states)


def events(daemon: Daemon) -> list[Event]:
    """All events but the first."""
    with daemon.admin() as admin:
        found: list[Event] = []
        while more := unpack_events(admin.events(b"", found[-1].id if found else 0).events):
            found += more
        return found


@contextmanager
def good(daemon: Daemon) -> Iterator[BlockingConnection]:
    """An honest engine whose chunks stay as they are: checked at the end."""
    with engine(daemon) as connection:
        assert states(connection, report_of(tokens_of(1, 96))) == [TAKEN] * 3
        before = events(daemon)
        assert [(event.kind, event.tiers, len(event.chunks)) for event in before] == [(EventKind.STORED, HBM, 3)]
        yield connection
        mine = set(before[0].chunks)
        assert [event for event in events(daemon) if mine & set(event.chunks)] == before
        assert daemon.problems() == []


def test_reports_without_end_crowd_nobodys_events_out(daemon: Daemon) -> None:
    with good(daemon) as honest, engine(daemon, WIDE) as hostile:
        refusal, reports = "", 0
        while not refusal and reports < 1000:
            report = report_of(tokens_of(100 + reports, WIDE.chunk_tokens * 100), WIDE, is_anew=bool(reports % 2))
            try:
                assert set(states(hostile, report)) == {TAKEN}
            except Refused as error:
                refusal = str(error)
            reports += 1
        assert refusal == "busy: reports are more than 4.0 MiB a second: report again"
        assert reports * (len(report.tokens) + 100 * EVENT_BYTES) > BURST_BYTES
        assert states(honest, report_of(tokens_of(2, 96))) == [TAKEN] * 3
    wait_until(lambda: daemon.stats()["events.engine_chunks"] == 0, "what they reported goes with them")
    assert daemon.stats()["events.engine_chunk_record_bytes"] == 0


def test_sources_without_end_and_beginnings_without_end_take_nothing(daemon: Daemon) -> None:
    with good(daemon) as honest, engine(daemon) as hostile:
        for number in range(200):
            assert states(hostile, report_of(tokens_of(3, 64), source=number, is_anew=bool(number % 2))) == [TAKEN] * 2
            assert states(hostile, report_of(tokens_of(3, 64), source=0, is_anew=True)) == [TAKEN] * 2
        wait_until(
            lambda: daemon.stats()["events.engine_chunk_record_bytes"] < 500 * 2 * CHUNK_BYTES, "old ones are dropped"
        )
        for number in range(200):
            assert states(hostile, nothing(source=number, is_anew=True)) == []
        wait_until(lambda: daemon.stats()["events.engine_chunks"] == 3, "only the honest engine's are left")
        assert states(honest, report_of(tokens_of(1, 96))) == [TAKEN] * 3


def test_nobody_removes_what_he_has_not_reported(daemon: Daemon) -> None:
    with good(daemon), engine(daemon) as hostile:
        states(hostile, report_of(tokens_of(4, 64)))
        states(hostile, report_of(tokens_of(5, 32), source=1))
        before = events(daemon)
        for removed, expected in (
            (b"k" * 32, "expected one that source 0 of this connection has reported"),
            (keys_of(tokens_of(1, 96))[64:], "expected one that source 0"),  # the honest engine's
            (keys_of(tokens_of(4, 64))[:32], "removed before 1 that follow it"),
            (keys_of(tokens_of(4, 64))[32:] * 2, "expected one that source 0"),
            (keys_of(tokens_of(5, 32)), "expected one that source 0"),  # of its other source
        ):
            with pytest.raises(Refused, match=expected) as refused:
                states(hostile, nothing(removed=removed))
            assert removed[:32].hex() in str(refused.value)
            with pytest.raises(Refused, match=expected):
                states(hostile, report_of(tokens_of(6, 32), removed=removed))
            assert events(daemon) == before
        assert states(hostile, nothing(removed=keys_of(tokens_of(4, 64))[32:])) == [], "it is served on"


def test_the_honest_engines_chunk_stays_when_another_that_reported_it_too_drops_it(daemon: Daemon) -> None:
    with good(daemon), engine(daemon) as hostile:
        assert states(hostile, report_of(tokens_of(1, 96))) == [TAKEN] * 3
        keys = keys_of(tokens_of(1, 96))
        states(hostile, nothing(removed=keys[64:] + keys[32:64] + keys[:32]))
        assert states(hostile, report_of(tokens_of(1, 96))) == [TAKEN] * 3
        states(hostile, nothing(is_anew=True))


def test_other_scopes_and_parents_do_not_change_what_was_reported_first(daemon: Daemon) -> None:
    with good(daemon), engine(daemon) as hostile:
        keys = keys_of(tokens_of(1, 96))
        assert states(hostile, report_of(tokens_of(1, 96), scopes=[pack_scope("evil", b"salt")])) == [TAKEN] * 3
        states(hostile, nothing(is_anew=True))
        assert states(hostile, report_of(tokens_of(1, 96)[32:], start=keys[:32])) == [TAKEN] * 2  # as if it were a root


MALFORMED: dict[str, dict[str, Any]] = {
    "keys": {"removed": b"k" * 31},
    "too many": {"removed": b"k" * 32 * (ec.REPORT_CHUNKS_MAX + 1)},
    "source": {"source": ec.SOURCES_MAX},
    "negative source": {"source": -1},
    "parents": {"parents": b"p" * 31},
    "tokens": {"tokens": b"t" * 100},
    "firsts": {"firsts": b"\2\0\0"},
    "scope": {"scopes": [b"short"]},
    "scope of another type": {"scopes": [17]},
    "no scope": {"scopes": []},
    "scope index": {"scope_of": struct.pack("<3H", 0, 1, 0)},
    "scope column": {"scope_of": b"\0" * 5},
}


def test_a_malformed_report_ends_its_connection_alone(daemon: Daemon) -> None:
    with good(daemon):
        for name, fields in MALFORMED.items():
            print(name)
            with engine(daemon) as hostile:
                states(hostile, report_of(tokens_of(8, 32)))
                with pytest.raises(KVPoolError, match="protocol: "):
                    states(hostile, report_of(tokens_of(9, 96), **fields))
            wait_until(lambda: daemon.stats()["events.engine_chunks"] == 3, "what it has reported goes with it")


def test_a_source_that_begins_anew_removes_nothing_by_name(daemon: Daemon) -> None:
    expected = "source 5 begins anew and removes 1 chunks, expected none"
    with good(daemon), engine(daemon) as hostile, pytest.raises(Refused, match=expected):
        states(hostile, nothing(source=5, is_anew=True, removed=b"k" * 32))


def test_a_scheduler_has_no_chunks_of_its_own(daemon: Daemon) -> None:
    ranks = kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32, rank=None, world=2)
    with BlockingConnection(daemon.socket, hello_of(ranks), 10.0) as scheduler, pytest.raises(Refused, match="rank"):
        states(scheduler, report_of(tokens_of(1, 32)))


def test_token_ids_that_are_not_kept_are_not_kept_here_either(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__keep_token_ids="false")
    with engine(daemon) as connection:
        assert states(connection, report_of(tokens_of(1, 96), scopes=[pack_scope("adapter", b"")])) == [TAKEN] * 3
        (event,) = events(daemon)
        assert (len(event.chunks), event.tokens, event.adapter) == (3, b"", "")
