"""Frames about leases: what one native call answers is what the verbs answer, frame by frame, and everything else is theirs."""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.errors import ProtocolError
from kvpool.ids import KEY_BYTES, ConnectionId
from kvpool.index.leases import ENDED_AT_ONCE
from kvpool.index.sessions import EngineSession
from kvpool.layout import Layout
from kvpool.pool.pool import Pool
from kvpool.pool.readers.runs import counts_of
from kvpool.protocol import columns, frames
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import promises as pr
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.server.connections.connection import Connection
from kvpool.server.connections.lease_frames import ANSWER_BYTES_MAX, LeaseFrames
from kvpool.server.connections.turns import TURN_NS, Turns
from kvpool.server.metrics.request_times import RequestTimes
from kvpool.server.service import VERBS, engine_handlers
from tests.hostile.rigs.raw_clients import keys_of
from tests.rigs.clock import HandClock
from tests.rigs.daemon import SMALL
from tests.rigs.layouts import HYBRID
from tests.rigs.parts import served
from tests.rigs.recording_transport import Transport
from tests.rigs.reserve_requests import reserve_alone

HIT = 6
PLENTY_NS = 10**12
LAYOUTS = {
    "plain": replace(SMALL, rank=0),
    "hybrid": replace(HYBRID, rank=0),
    "windows": Layout(chunk_tokens=HYBRID.chunk_tokens, groups=HYBRID.groups[1:], rank=0),
    "scheduler of two ranks": replace(SMALL, world=2, rank=None),
    "scheduler of groups": replace(HYBRID, world=2, rank=None),
}
parametrize_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


class Setting:
    """A pool with the chunks of a hit, and a connection of a session of that layout."""

    def __init__(self, layout: Layout) -> None:
        wanted = ["dram.capacity=64MiB", "dram.prefault=false", "dram.connection_quota=1.0", "server.user_quota=1.0"]
        self.pool = Pool(load_config(None, wanted), MonotonicClock())
        self.session = self.pool.open_session(ConnectionId(7), "model", layout)
        self.times = RequestTimes(VERBS)
        self.lease_frames = LeaseFrames(self.pool.chains, self.times, MonotonicClock())
        self.serve_at_once = self.lease_frames.of_session(self.session)
        self.keys, self.leaves = b"", b""  # of a hit

    def store(self) -> None:
        """Store what a hit needs, as each rank."""
        layout = self.session.layout
        for number, count in enumerate(counts_of(self.session, HIT)):
            for rank in layout.ranks:
                keys = keys_of(1000 * number + 100 * rank, count)
                writer = self.pool.open_session(ConnectionId(20 + rank), "model", layout.for_rank(rank))
                is_chain = layout.of_group(number).is_chained
                ask = reserve_chain(b"", keys) if is_chain and not layout.groups else reserve_alone(number, keys)
                if is_chain and layout.groups:
                    ask = replace(reserve_chain(b"", keys), runs=reserve_chain(b"", keys, group=number).runs)
                made = served(self.pool.chains.reserve(writer, ask))
                own = layout.of_group(number).for_rank(rank)
                zero = kvpool_native.crc32c(np.zeros(own.extent_bytes, np.uint8)).to_bytes(4, "little")
                served(self.pool.chains.commit(writer, m.Commit(made.reservation, zero * own.extents * count, b"")))
                self.keys += keys
                self.leaves += keys[-KEY_BYTES:] if is_chain else keys

    def serve(self, arrived: bytes, left_ns: int) -> tuple[int, bytes] | None:
        """Behind other bytes, of which nothing is read."""
        return self.serve_at_once(bytearray(b"##" + arrived), 2, left_ns)

    def connect(self) -> tuple[Connection, Transport]:
        clock = MonotonicClock()
        connection = Connection(
            self.session.connection,
            engine_handlers(self.pool, self.session, user=None, clock=clock),
            clock=clock,
            turns=Turns(clock),
            times=self.times,
            on_closed=lambda *_: None,
            on_protocol_error=lambda: None,
            on_failed=lambda _: None,
            serve_at_once=self.serve_at_once,
        )
        transport = Transport()
        connection.connection_made(transport)
        return connection, transport

    @property
    def held(self) -> int:
        return int(self.pool.measure({}).directory["held"])


def in_pool(layout: Layout, check: Callable[[Setting], None]) -> None:
    async def run() -> None:
        setting = Setting(layout)
        await setting.pool.start()
        setting.store()
        check(setting)
        assert setting.pool.verify()["problems"] == []
        await setting.pool.stop()

    asyncio.run(run())


def decoded(answers: bytes) -> list[tuple[int, int, list[Any]]]:
    return list(frames.FrameReader().feed(answers))


@parametrize_layouts
def test_the_answer_to_a_set_is_the_one_that_the_verb_gives(layout: Layout) -> None:
    def check(setting: Setting) -> None:
        for group, part in enumerate(setting.session.parts):
            ranks = len(layout.ranks)
            # Of a chain the first chunk alone has no parent; what is named again, or is not here, has an empty row.
            of_rank = [keys_of(1000 * group + 100 * rank, 2) for rank in layout.ranks]
            keys = b"".join(keys_of(5000, 1) + one + keys_of(5001, 1) + one[:KEY_BYTES] for one in of_rank)
            request = m.Acquire(keys, set_of=group + 1)
            by_verb = served(setting.pool.chains.acquire(setting.session, request))
            answered = setting.serve(m.encode(request, 3), PLENTY_NS)
            held = 1 if part.layout.is_chained else min(2, len(keys) // KEY_BYTES)
            if ranks > 1:
                assert answered is None, "a scheduler's are left to the verb"
                assert by_verb.offsets == b""
            else:
                assert answered is not None
                ((kind, sequence, values),) = decoded(answered[1])
                assert (kind, sequence) == (m.Leased.KIND, 3)
                at_once = m.Leased(*values)
                assert replace(at_once, lease=by_verb.lease) == by_verb
                setting.pool.leases.release(setting.session, at_once.lease)
            assert len(by_verb.tiers) == 5
            assert by_verb.tiers.count(m.NO_LEVEL) == 5 - by_verb.chunks
            assert 0 < by_verb.chunks <= held
            setting.pool.leases.release(setting.session, by_verb.lease)
        assert setting.held == 0

    in_pool(layout, check)


@parametrize_layouts
def test_an_answer_is_the_one_that_the_verb_gives(layout: Layout) -> None:
    def check(setting: Setting) -> None:
        for keys in (setting.keys, setting.leaves):
            request = m.Acquire(keys, HIT)
            by_verb = served(setting.pool.chains.acquire(setting.session, request))
            sent = m.encode(request, 300)
            answered = setting.serve(sent, PLENTY_NS)
            assert answered is not None
            consumed, answers = answered
            assert consumed == len(sent)
            assert answers == m.encode(replace(by_verb, lease=by_verb.lease + 1), 300)
            assert by_verb.chunks == HIT
        held = setting.held
        drop = m.encode(one_way.DropLeases(columns.pack_numbers(range(1, 5))), 0)
        renew = m.encode(m.Renew(columns.pack_numbers([1, 99])), 70_000)
        assert setting.serve(renew + drop, PLENTY_NS) == (len(renew + drop), m.encode(m.Done(), 70_000))
        assert held > 0 == setting.held
        rows = setting.times.verbs()
        assert [sum(rows[name].counts) for name in ("acquire", "drop_leases", "renew")] == [2, 1, 1]

    in_pool(layout, check)


def test_long_columns_are_those_that_the_verb_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "HIT", 2100)  # offsets of 16,800 bytes, which are not copied into the frame first

    def check(setting: Setting) -> None:
        request = m.Acquire(setting.leaves, HIT)
        by_verb = served(setting.pool.chains.acquire(setting.session, request))
        assert by_verb.chunks == HIT
        sent = m.encode(request, 1) + m.encode(m.Renew(b""), 2)
        second = replace(by_verb, lease=by_verb.lease + 1)
        assert setting.serve(sent, PLENTY_NS) == (len(sent), m.encode(second, 1) + m.encode(m.Done(), 2))
        setting.pool.drop_connection(setting.session.connection)

    in_pool(LAYOUTS["plain"], check)


def test_whatever_length_a_number_has_it_is_written_as_every_decoder_reads_it() -> None:
    def check(setting: Setting) -> None:
        for sequence in (0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1):
            sent = m.encode(m.Acquire(setting.leaves, HIT), sequence)
            served_now = setting.serve(sent, PLENTY_NS)
            assert served_now is not None
            ((kind, number, values),) = decoded(served_now[1])
            assert (kind, number, values[1]) == (m.Leased.KIND, sequence, HIT)
            assert setting.serve(m.encode(one_way.DropLeases(columns.pack_numbers([values[0]])), 0), PLENTY_NS)

    in_pool(LAYOUTS["plain"], check)


def raw(*items: object) -> bytes:
    body: bytes = msgpack.packb(items)
    return len(body).to_bytes(4, "little") + body


LEFT_TO_THE_VERBS = {
    "another kind": m.encode(m.AskInfo(), 1),
    "an owner": m.encode(m.Acquire(keys_of(0, HIT), HIT, "other"), 1),
    "too many fields": raw(m.Acquire.KIND, 1, keys_of(0, HIT), HIT, "", 1),
    "too few fields": raw(m.Acquire.KIND, 1, keys_of(0, HIT), HIT),
    "fields of other types": raw(m.Acquire.KIND, 1, HIT, keys_of(0, HIT), ""),
    "a negative number": raw(m.Acquire.KIND, 1, keys_of(0, HIT), -1, ""),
    "a number of 64 bits": raw(m.Acquire.KIND, 1, keys_of(0, HIT), 2**64 - 1, ""),
    "a sequence of 64 bits": raw(m.Acquire.KIND, 2**64 - 1, keys_of(0, HIT), HIT, ""),
    "no whole keys": raw(m.Acquire.KIND, 1, keys_of(0, HIT)[:-1], HIT, ""),
    "no keys": raw(m.Acquire.KIND, 1, b"", 0, ""),
    "other keys than chunks": raw(m.Acquire.KIND, 1, keys_of(0, HIT), HIT - 1, ""),
    "chunks that are not here": raw(m.Acquire.KIND, 1, keys_of(500, HIT), HIT, ""),
    "half a lease": raw(one_way.DropLeases.KIND, 0, bytes(7)),
    "too many leases": raw(one_way.DropLeases.KIND, 0, bytes(8 * (m.RENEWALS_MAX + 1))),
    "a column that ends too early": b"\x08\0\0\0" + b"\x93" + bytes([m.Renew.KIND]) + b"\x01\xc6\xff\xff\xff\xff",
    "bytes behind the fields": b"\x09\0\0\0" + b"\x93" + bytes([m.Renew.KIND]) + b"\x01\xc4\x00\x01\x01\x01\x01",
    "an empty frame": bytes(4),
    "a frame without an end": b"\xff\xff\xff\xff" + bytes(64),
    "half a frame": m.encode(m.Acquire(keys_of(0, HIT), HIT), 1)[:-1],
    "half a length": b"\x08\0",
    "nothing": b"",
}


@pytest.mark.parametrize("sent", LEFT_TO_THE_VERBS.values(), ids=LEFT_TO_THE_VERBS.keys())
def test_what_is_not_for_here_is_left_as_it_came(sent: bytes) -> None:
    def check(setting: Setting) -> None:
        leading = m.encode(m.Renew(b""), 9)
        assert setting.serve(sent, PLENTY_NS) is None
        assert setting.serve(leading + sent, PLENTY_NS) == (len(leading), m.encode(m.Done(), 9))
        assert setting.held == 0

    in_pool(LAYOUTS["plain"], check)


def test_no_byte_that_is_changed_leaks_a_hold() -> None:
    """Every byte of a frame, with every value of some: served as another valid request, or left."""

    def check(setting: Setting) -> None:
        whole = m.encode(m.Acquire(setting.leaves, HIT), 5)
        for at in range(len(whole)):
            for value in (0, 1, 0x7F, 0x90, 0xA0, 0xC4, 0xC6, 0xCC, 0xCF, 0xFF):
                served_now = setting.serve(whole[:at] + bytes([value]) + whole[at + 1 :], PLENTY_NS)
                if served_now is None:
                    continue
                assert served_now[0] <= len(whole)
                for _, _, values in decoded(served_now[1]):
                    assert values[1] == HIT
                    assert setting.serve(m.encode(one_way.DropLeases(columns.pack_numbers([values[0]])), 0), PLENTY_NS)
        assert setting.held == 0

    in_pool(LAYOUTS["plain"], check)


def test_a_flood_is_served_for_as_long_as_its_turn_lasts() -> None:
    def check(setting: Setting) -> None:
        one = m.encode(m.Renew(b""), 1)
        found = setting.serve(one * 1000, 0)
        assert found is not None
        assert found[0] < len(one) * 1000

    in_pool(LAYOUTS["plain"], check)


def test_a_peer_that_does_not_read_gets_no_more_answers_than_fit_its_buffer() -> None:
    def check(setting: Setting) -> None:
        one = m.encode(m.Acquire(setting.leaves, HIT), 1)
        found = setting.serve(one * 2000, PLENTY_NS)
        assert found is not None
        consumed, answers = found
        assert ANSWER_BYTES_MAX <= len(answers) < ANSWER_BYTES_MAX + 1000
        assert consumed // len(one) == len(decoded(answers)) < 2000
        setting.pool.drop_connection(setting.session.connection)
        while setting.pool._readers.has_backlog:
            setting.pool._readers.expire(0)

    in_pool(LAYOUTS["plain"], check)


def test_who_has_used_its_time_waits_for_its_turn() -> None:
    clock = HandClock()
    turns = Turns(clock)
    given: list[int] = []

    def serve(left_ns: int) -> bool:
        given.append(left_ns)
        clock.advance(0.0004)
        return True

    assert [turns.serve_at_once(serve) for _ in range(4)] == [True, True, True, False]
    assert given == [TURN_NS, TURN_NS - 400_000, TURN_NS - 800_000]
    clock.advance(0.0003)
    assert turns.serve_at_once(serve)


def test_an_error_of_one_call_ends_the_connection_as_a_bad_frame_does(caplog: pytest.LogCaptureFixture) -> None:
    def check(setting: Setting) -> None:
        def fail(*_: object) -> None:
            raise MemoryError("no room")

        setting.serve_at_once = fail
        connection, transport = setting.connect()
        connection.data_received(m.encode(m.Renew(b""), 1))
        assert connection.state == "ending"
        assert transport.has_ended
        ((kind, _, values),) = transport.answers
        assert (kind, values[0]) == (m.Failure.KIND, "internal")
        assert all(row.failed == 0 for row in setting.times.verbs().values()), "no verb is known to have failed"

    in_pool(LAYOUTS["plain"], check)
    assert "no room" in caplog.text


def test_a_connection_answers_in_the_order_of_its_requests() -> None:
    async def run() -> None:
        setting = Setting(LAYOUTS["plain"])
        await setting.pool.start()
        setting.store()
        connection, transport = setting.connect()
        sent = b"".join(
            m.encode(request, number)
            for number, request in enumerate(
                [m.Renew(b""), m.Acquire(setting.leaves, HIT), m.IssueTicket(1), m.Acquire(setting.keys, HIT)], 1
            )
        )
        for cut in (len(sent), 3, 30):
            for first in range(0, len(sent), cut):
                connection.data_received(sent[first : first + cut])
                await asyncio.sleep(0.001)
        assert [number for _, number, _ in transport.answers] == [1, 2, 3, 4] * 3
        await setting.pool.stop()

    asyncio.run(run())


def test_a_connection_whose_turn_is_over_is_served_one_request() -> None:
    def check(setting: Setting) -> None:
        connection, transport = setting.connect()
        connection.is_waiting = True  # for its turn
        connection.data_received(m.encode(m.Renew(b""), 1) * 3)
        for served_by_now in (1, 2, 3):
            assert connection.serve(until_ns=0), "there may be more"
            assert len(transport.answers) == served_by_now
        assert not connection.serve(until_ns=0)

    in_pool(LAYOUTS["plain"], check)


def test_a_connection_with_announcements_or_too_many_leases_is_served_by_the_verbs() -> None:
    def check(setting: Setting) -> None:
        request = m.encode(m.Acquire(setting.leaves, HIT), 1)
        served(setting.pool.hints.announce(setting.session, m.Announce(setting.keys)))
        assert setting.serve(request, PLENTY_NS) is None
        served(setting.pool.chains.acquire(setting.session, m.Acquire(setting.leaves, HIT)))  # ends the announcement
        assert setting.serve(request, PLENTY_NS) is not None
        setting.pool._readers.desk.release_leases(setting.session.reader, [1, 2], 0)

    in_pool(LAYOUTS["plain"], check)


def test_a_release_of_many_leases_leaves_a_backlog_that_is_ended_soon() -> None:
    async def run() -> None:
        setting = Setting(LAYOUTS["plain"])
        await setting.pool.start()
        setting.store()
        request = m.encode(m.Acquire(setting.leaves, HIT), 1)
        count = ENDED_AT_ONCE // 64 + 10
        for _ in range(count):
            assert setting.serve(request, PLENTY_NS) is not None
        drop = m.encode(one_way.DropLeases(columns.pack_numbers(range(1, count + 1))), 0)
        assert setting.serve(drop, PLENTY_NS) == (len(drop), b"")
        assert setting.pool._readers.has_backlog
        while setting.held:
            await asyncio.sleep(0)
        assert setting.pool.verify()["problems"] == []
        await setting.pool.stop()

    asyncio.run(run())


def test_the_role_of_a_group_bounds_no_hit_of_the_group_alone() -> None:
    async def run() -> None:
        setting = Setting(LAYOUTS["windows"].of_group(0))
        await setting.pool.start()
        keys = keys_of(0, 2)
        made = served(setting.pool.chains.reserve(setting.session, reserve_alone(0, keys)))
        layout = setting.session.layout
        zero = kvpool_native.crc32c(np.zeros(layout.extent_bytes, np.uint8)).to_bytes(4, "little")
        served(setting.pool.chains.commit(setting.session, m.Commit(made.reservation, zero * layout.extents * 2, b"")))
        assert setting.serve(m.encode(m.Acquire(keys, 100), 1), PLENTY_NS) is None
        with pytest.raises(ProtocolError):
            served(setting.pool.chains.acquire(setting.session, m.Acquire(keys, 100)))
        assert setting.serve(m.encode(m.Acquire(keys, 2), 1), PLENTY_NS) is not None
        await setting.pool.stop()

    asyncio.run(run())


def test_who_names_an_owner_names_all_keys() -> None:
    def check(setting: Setting) -> None:
        chains, leases, session = setting.pool.chains, setting.pool.leases, setting.session
        with pytest.raises(ProtocolError):
            served(chains.acquire(session, m.Acquire(setting.leaves, HIT, "other")))
        with pytest.raises(ProtocolError):
            served(leases.promise(session, pr.Promise(setting.leaves, HIT, "other", 1, 0)))
        assert served(chains.acquire(session, m.Acquire(setting.keys, HIT, "other"))).chunks == HIT

    in_pool(LAYOUTS["plain"], check)


def test_a_pool_that_has_ended_leaves_no_memory() -> None:
    def mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:")

    def check(setting: Setting) -> None:
        assert setting.serve(m.encode(m.Acquire(setting.leaves, HIT), 1), PLENTY_NS) is not None
        setting.pool.drop_connection(setting.session.connection)

    in_pool(LAYOUTS["plain"], check)
    before = mappings()
    for _ in range(3):
        in_pool(LAYOUTS["plain"], check)
    assert mappings() <= before


def test_a_session_of_another_connection_ends_no_lease() -> None:
    def check(setting: Setting) -> None:
        assert setting.serve(m.encode(m.Acquire(setting.leaves, HIT), 1), PLENTY_NS) is not None
        other: EngineSession = setting.pool.open_session(ConnectionId(8), "model", setting.session.layout)
        drop = m.encode(one_way.DropLeases(columns.pack_numbers([1])), 0)
        assert setting.lease_frames.of_session(other)(drop, 0, PLENTY_NS) == (len(drop), b"")
        assert setting.held == HIT
        assert setting.serve(drop, PLENTY_NS) == (len(drop), b"")
        assert setting.held == 0

    in_pool(LAYOUTS["plain"], check)
