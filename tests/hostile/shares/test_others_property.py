"""Requests about ids that belong to others, have ended or never existed: each has one answer, and affects nobody."""

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import Refused
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import staging as sm
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.server.service import VERBS
from kvpool.states import SaveState
from tests.golden.wire import example_of
from tests.hostile.rigs.raw_clients import (
    MODEL,
    checksums_of,
    engine,
    hello_of,
    key_of,
    keys_of,
    payload_of,
    read_back,
    reserve,
    store,
    write_and_commit,
)
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.dropping import drop_leases, drop_reservations
from tests.rigs.layouts import HYBRID, WINDOW
from tests.rigs.reserve_requests import reserve_alone, reserve_share

OF_ENGINES, OF_OPERATORS = (
    [verb.record for verb in VERBS if verb.roles == {role}] for role in (m.ROLE_ENGINE, m.ROLE_ADMIN)
)
SHARED = kv.Layout(layers=2, kv_heads=4, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=4)


def _zeros(layout: kv.Layout, extents: int) -> bytes:
    """The checksums of so many extents of an arena that nobody has written."""
    return struct.pack("<I", kvpool_native.crc32c(np.zeros(layout.payload_bytes, np.uint8))) * extents


OF_WINDOW = HYBRID.of_group(WINDOW)
# A layout, a save of some of it, its checksums, and what becomes of it.
FORMS = {
    "chain": (SMALL, reserve_chain(b"", keys_of(0, 3)), _zeros(SMALL, 3 * SMALL.extents), SaveState.STORED),
    "part": (SHARED, reserve_share(0, 2, 0, 2, b"", key_of(1)), _zeros(SHARED, 4), SaveState.PART),
    "window": (HYBRID, reserve_alone(WINDOW, key_of(1)), _zeros(OF_WINDOW, OF_WINDOW.extents), SaveState.STORED),
}


def _sums(count: int) -> bytes:
    return b"".join(checksums_of(payload_of(key_of(number))) for number in range(count))


def test_no_request_names_an_address() -> None:
    words = ("offset", "address", "length", "page", "slot", "fd")
    requests = {verb.record for verb in VERBS} - {sm.CopyStaged}  # an offset in its own staging memory
    names = {field.name for record in requests for field in dataclasses.fields(record)}
    assert not {name for name in names if any(word in name for word in words)}


def test_a_commit_of_more_than_was_reserved_ends_the_connection_and_changes_nothing(daemon: Daemon) -> None:
    with engine(daemon) as good, engine(daemon) as hostile:
        store(good, keys_of(0, 4))
        made = reserve(hostile, keys_of(10, 2))
        with pytest.raises(Refused) as refusal:
            hostile.call(m.Commit(made.reservation, bytes(3 * 4 * SMALL.layers), b""), m.Committed)
        assert refusal.value.code == "protocol"
        assert read_back(good, keys_of(0, 4)) == [True] * 4
        assert good.call(m.Acquire(keys_of(10, 2)), m.Leased).chunks == 0
    assert daemon.problems() == []


def test_a_commit_after_the_deadline_stores_nothing(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__reservation_ttl="100ms")
    with engine(daemon) as writer:
        keys = keys_of(0, 3)
        made = reserve(writer, keys)
        wait_until(lambda: daemon.stats()["dram.zombie_slots"] == 3, "the reservation expires")
        assert write_and_commit(writer, keys, made) == bytes([SaveState.EXPIRED] * 3)
        assert writer.call(m.Acquire(keys), m.Leased).chunks == 0
        drop_reservations(writer, made.reservation)
        assert daemon.stats()["dram.zombie_slots"] == 0
    assert daemon.problems() == []


@pytest.mark.parametrize("form", FORMS)
def test_a_reservation_is_committed_once_and_by_its_owner_alone(daemon: Daemon, form: str) -> None:
    layout, request, sums, stored = FORMS[form]
    with engine(daemon, layout) as writer, engine(daemon, layout) as hostile:
        made = writer.call(request, m.Reserved)
        assert set(made.states) == {SaveState.RESERVED}
        for number in (made.reservation, made.reservation + 1, 0, -1, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)):
            assert hostile.call(m.Commit(number, sums, b""), m.Committed).states == b""
        drop_reservations(hostile, made.reservation)
        assert daemon.stats()["reservations"] == 1
        assert set(hostile.call(request, m.Reserved).states) == {SaveState.PENDING}
        commit = m.Commit(made.reservation, sums, b"")
        assert set(writer.call(commit, m.Committed).states) == {stored}
        assert writer.call(commit, m.Committed).states == b""
        again = writer.call(request, m.Reserved)
        assert (set(again.states), again.reservation) == (
            {SaveState.PRESENT if stored == SaveState.STORED else stored},
            0,
        )
    assert daemon.problems() == []


def test_anothers_lease_can_be_neither_released_nor_ticketed(daemon: Daemon) -> None:
    with engine(daemon) as reader, engine(daemon) as hostile:
        store(reader, keys_of(0, 3))
        lease = reader.call(m.Acquire(keys_of(0, 3)), m.Leased).lease
        assert hostile.call(m.IssueTicket(lease), m.Ticket).ticket == b""
        drop_leases(hostile, lease)
        hostile.call(m.ReportCorrupt(lease, 0), m.Done)
        stats = daemon.stats()
        assert (stats["leases"], stats["pins"], stats["tickets"], stats["corrupt_reports"]) == (1, 3, 0, 0)
        assert reader.call(m.IssueTicket(lease), m.Ticket).ticket != b""


def test_anothers_lease_cannot_be_renewed(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__lease_ttl="300ms")
    with engine(daemon) as reader, engine(daemon) as hostile:
        store(reader, keys_of(0, 3))
        lease = reader.call(m.Acquire(keys_of(0, 3)), m.Leased).lease

        def renew_and_look() -> bool:
            hostile.call(m.Renew(struct.pack("<Q", lease)), m.Done)
            return bool(daemon.stats()["leases"] == 0)

        wait_until(renew_and_look, "the lease ends whatever another connection says")
        assert daemon.stats()["expired_leases"] == 1


@pytest.mark.parametrize("ticket", [b"", b"\0" * 32, b"t" * 31, b"t" * 33, b"t" * 100_000])
def test_a_forged_ticket_gives_no_lease(shared_daemon: Daemon, ticket: bytes) -> None:
    with engine(shared_daemon) as hostile:
        store(hostile, keys_of(0, 2))
        lease = hostile.call(m.Acquire(keys_of(0, 2)), m.Leased).lease
        hostile.call(m.IssueTicket(lease), m.Ticket)
        assert hostile.call(m.Claim(ticket), m.Leased) == m.Leased(0, 0, b"", b"", b"")


def test_a_ticket_gives_one_lease(daemon: Daemon) -> None:
    with engine(daemon) as issuer, engine(daemon) as claimer:
        store(issuer, keys_of(0, 2))
        lease = issuer.call(m.Acquire(keys_of(0, 2)), m.Leased).lease
        ticket = issuer.call(m.IssueTicket(lease), m.Ticket).ticket
        assert claimer.call(m.Claim(ticket), m.Leased).chunks == 2
        assert claimer.call(m.Claim(ticket), m.Leased).chunks == 0
        assert issuer.call(m.Claim(ticket), m.Leased).chunks == 0
        assert daemon.stats()["leases"] == 2


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("other-model", SMALL),
        (MODEL, kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32)),
        (MODEL, kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32, world=2, rank=0)),
        (MODEL, kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32, world=2, rank=None)),
    ],
    ids=["model", "dtype", "world", "scheduler"],
)
def test_a_ticket_of_another_model_or_layout_is_not_claimed(
    shared_daemon: Daemon, model: str, layout: kv.Layout
) -> None:
    with engine(shared_daemon) as issuer, engine(shared_daemon, layout, model) as hostile:
        store(issuer, keys_of(0, 2))
        lease = issuer.call(m.Acquire(keys_of(0, 2)), m.Leased).lease
        ticket = issuer.call(m.IssueTicket(lease), m.Ticket).ticket
        assert hostile.call(m.Claim(ticket), m.Leased).lease == 0
        assert hostile.call(m.Acquire(keys_of(0, 2)), m.Leased).chunks == 0
        assert issuer.call(m.Claim(ticket), m.Leased).chunks == 2


def test_a_scheduler_can_neither_save_nor_report(daemon: Daemon) -> None:
    layout = kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32, world=2, rank=None)
    with engine(daemon, layout) as scheduler:
        for request, answer in (
            (reserve_chain(b"", keys_of(0, 2)), m.Reserved),
            (m.Commit(1, _sums(2), b""), m.Committed),
        ):
            with pytest.raises(Refused, match="scheduler"):
                scheduler.call(request, answer)
        scheduler.call(m.ReportCorrupt(1, 0), m.Done)
        assert scheduler.call(m.Acquire(keys_of(0, 2)), m.Leased).chunks == 0


@pytest.mark.parametrize(
    ("role", "record"),
    [*((m.ROLE_ENGINE, record) for record in OF_OPERATORS), *((m.ROLE_ADMIN, record) for record in OF_ENGINES)],
)
def test_nobody_asks_what_his_role_may_not(shared_daemon: Daemon, role: str, record: type[Any]) -> None:
    _assert_has_no_place(shared_daemon, hello_of(role=role), example_of(record))


@pytest.mark.parametrize("role", [m.ROLE_ENGINE, m.ROLE_ADMIN])
@pytest.mark.parametrize(
    "answer", [m.Done(), m.Leased(1, 1, b"", b"", b""), m.Failure("a", "b"), m.Report({}), hello_of()], ids=repr
)
def test_answers_and_a_second_hello_are_no_requests(shared_daemon: Daemon, role: str, answer: object) -> None:
    _assert_has_no_place(shared_daemon, hello_of(role=role), answer)


def _assert_has_no_place(daemon: Daemon, hello: m.Hello, request_: object) -> None:
    with engine(daemon) as good:
        store(good, keys_of(0, 2))
        with BlockingConnection(daemon.socket, hello, 60.0) as hostile:
            with pytest.raises(Refused, match="is not allowed on this connection") as refusal:
                hostile.call(request_, m.Done)
            assert refusal.value.code == "protocol"
        assert read_back(good, keys_of(0, 2)) == [True, True]


@pytest.mark.parametrize(
    "request_",
    [
        m.RetainKeys(b"", 100, 0.0),
        m.RetainKeys(b"k" * 31, 100, 0.0),
        m.RetainKeys(key_of(1), 101, 0.0),
        m.RetainKeys(key_of(1), -1, 0.0),
        m.RetainKeys(key_of(1), (1 << 64) - 1, 0.0),
        m.RetainKeys(key_of(1), 35, -1.0),
        m.RetainKeys(key_of(1), 35, float("nan")),
        m.RetainKeys(key_of(1), 35, float("inf")),
    ],
    ids=lambda request: f"{request.priority}-{request.duration_s}" if isinstance(request, m.RetainKeys) else None,
)
def test_impossible_orders_of_an_operator_are_refused(shared_daemon: Daemon, request_: m.RetainKeys) -> None:
    with shared_daemon.admin() as hostile, pytest.raises(Refused) as refusal:
        hostile.call(request_, m.Retained)
    assert refusal.value.code == "protocol"


def test_hints_affect_no_other_namespace(daemon: Daemon) -> None:
    with engine(daemon) as good, engine(daemon, model="another") as hostile:
        store(good, keys_of(0, 2))
        retain = m.Retain(keys_of(0, 2), b"\0\0", bytes(8))
        assert hostile.call(retain, m.Retained).states == b"\2\2"
        assert hostile.call(m.Demote(keys_of(0, 2), 0), m.Retained).states == b"\2\2"
        assert hostile.call(m.Announce(keys_of(0, 2)), m.Announced) == m.Announced(0, 0)
        assert good.call(retain, m.Retained).states == b"\0\0"
        assert read_back(good, keys_of(0, 2)) == [True, True]
    assert daemon.problems() == []


def test_one_request_may_name_a_key_many_times(daemon: Daemon) -> None:
    with engine(daemon) as hostile:
        made = reserve(hostile, key_of(1) * 100)
        states = np.frombuffer(made.states, np.uint8)
        assert states[0] == SaveState.RESERVED
        assert set(states[1:].tolist()) <= {SaveState.PENDING, SaveState.NO_PARENT}
        drop_reservations(hostile, made.reservation)
        assert reserve(hostile, keys_of(1, 1), parent=key_of(1)).states == bytes([SaveState.NO_PARENT])
    assert daemon.problems() == []


def test_a_flush_takes_any_number_of_seconds(daemon: Daemon) -> None:
    with engine(daemon) as good, daemon.admin() as admin:
        for older_than_s in (float("inf"), 1e300, -float("inf"), 5e-324):
            store(good, keys_of(0, 2))
            expected = 2 if older_than_s < 1 else 0
            assert admin.flush(None, older_than_s)["chunks"] == expected, older_than_s
        with pytest.raises(Refused, match="not a number"):
            admin.flush(None, float("nan"))
