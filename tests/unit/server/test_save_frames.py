"""Frames about plain saves: what one native call answers is what the verbs answer, and everything else is theirs."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.config.config import load_config
from kvpool.ids import KEY_BYTES, ConnectionId
from kvpool.keys import SALT_TAG_BYTES
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.pool.pool import Pool
from kvpool.pool.writers.writers import SAVED_AT_ONCE
from kvpool.protocol import frames
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import ReserveRun, RunForm, pack_runs, reserve_chain
from kvpool.server.connections.lease_frames import LeaseFrames
from kvpool.server.metrics.request_times import RequestTimes
from kvpool.server.service import VERBS
from kvpool.states import SaveState
from tests.hostile.rigs.raw_clients import keys_of
from tests.rigs.clock import HandClock
from tests.rigs.daemon import SMALL
from tests.rigs.layouts import HYBRID
from tests.rigs.parts import served

PLENTY_NS = 10**12
PLAIN = replace(SMALL, rank=0)
OWNER = ConnectionId(7)


class Setting:
    """A pool, and a session of that layout."""

    def __init__(self, layout: Layout, *options: str) -> None:
        wanted = ["dram.capacity=64MiB", "dram.prefault=false", "dram.connection_quota=1.0", "server.user_quota=1.0"]
        self.clock = HandClock(10 * NS_PER_S)
        self.pool = Pool(load_config(None, [*wanted, *options]), self.clock)
        self.session = self.pool.open_session(OWNER, "model", layout, user=3)
        self.times = RequestTimes(VERBS)
        self.serve_at_once = LeaseFrames(self.pool.chains, self.times, self.clock).of_session(self.session)
        self.own = layout.of_group(0)
        zero = kvpool_native.crc32c(np.zeros(self.own.extent_bytes, np.uint8)).to_bytes(4, "little")
        self.sums = zero * self.own.extents  # of a chunk

    def serve(self, arrived: bytes, left_ns: int) -> tuple[int, bytes] | None:
        """Behind other bytes, of which nothing is read."""
        return self.serve_at_once(bytearray(b"##" + arrived), 2, left_ns)

    def ask(self, request: object) -> Any:
        """The fields of the answer that one call gives; None where the request is left to the verbs."""
        sent = m.encode(request, 300)
        answered = self.serve(sent, PLENTY_NS)
        if answered is None:
            return None
        assert answered[0] == len(sent)
        ((_, sequence, values),) = frames.FrameReader().feed(answered[1])
        assert sequence == 300
        return values

    def commit(self, number: int, chunks: int, *, tokens: bytes = b"", scope: bytes = b"") -> m.Commit:
        return m.Commit(number, self.sums * chunks, tokens, scope)

    def tokens(self, chunks: int) -> bytes:
        return np.arange(chunks * self.own.chunk_tokens, dtype="<i4").tobytes()

    @property
    def found(self) -> dict[str, int]:
        return dict(self.pool.measure({}).directory)


def in_pool(layout: Layout, check: Callable[[Setting], None], *options: str) -> None:
    async def run() -> None:
        setting = Setting(layout, *options)
        await setting.pool.start()
        check(setting)
        assert setting.pool.verify()["problems"] == []
        setting.pool.drop_connection(OWNER)
        assert setting.found["reservations"] == 0
        assert setting.pool.verify()["problems"] == []
        await setting.pool.stop()

    asyncio.run(run())


@pytest.mark.parametrize("layout", [PLAIN, replace(HYBRID, rank=0)], ids=["plain", "hybrid"])
def test_an_answer_is_the_one_that_the_verb_gives(layout: Layout) -> None:
    def check(setting: Setting) -> None:
        chains, session = setting.pool.chains, setting.session
        by_verb = served(chains.reserve(session, reserve_chain(b"", keys_of(0, 4))))
        at_once = setting.ask(reserve_chain(b"", keys_of(100, 4)))
        assert at_once[0] == by_verb.reservation + 1
        assert at_once[1] == by_verb.states == bytes([SaveState.RESERVED]) * 4
        assert len(at_once[2]) == len(at_once[3]) == 32
        assert at_once[4] == b""
        tokens = setting.tokens(3)
        committed = served(chains.commit(session, setting.commit(by_verb.reservation, 3, tokens=tokens)))
        assert setting.ask(setting.commit(at_once[0], 3, tokens=tokens)) == [committed.states]
        assert committed.states == bytes([SaveState.STORED]) * 3
        setting.pool.journal.take_changes()
        stored = [event for event in setting.pool.journal.since(b"", 0).events if event.keys]
        assert [(event.keys, event.tokens) for event in stored] == [
            (keys_of(0, 3), tokens),
            (keys_of(100, 3), tokens),
        ]
        rows = setting.times.verbs()
        assert [sum(rows[name].counts) for name in ("reserve", "commit")] == [1, 1]
        (usage,) = setting.pool.measure({}).models.values()
        assert usage.stored_chunks == 6

    in_pool(layout, check)


def test_what_a_connection_leases_already_takes_nothing_of_the_share_of_a_longer_save() -> None:
    def check(setting: Setting) -> None:
        leased, asked = keys_of(0, 276), keys_of(0, 300)
        made = setting.ask(reserve_chain(b"", leased))
        setting.ask(m.Commit(made[0], setting.sums * 276, b""))
        assert setting.ask(m.Acquire(leased[-KEY_BYTES:], 276))[1] == 276
        states = setting.ask(reserve_chain(b"", asked))[1]
        assert states == bytes([SaveState.PRESENT]) * 276 + bytes([SaveState.RESERVED]) * 24

    in_pool(PLAIN, check, "dram.capacity=16MiB", "dram.connection_quota=0.3")


def test_a_save_that_may_have_to_wait_is_left_to_the_verbs_before_anything_is_made() -> None:
    def check(setting: Setting) -> None:
        directory = setting.pool._directory
        directory.protect_unsaved(True)
        before = directory.stats()
        fits = setting.ask(reserve_chain(b"", keys_of(0, 1)))
        if fits is None:  # the first segment is lent to this size by the verb
            served(setting.pool.chains.reserve(setting.session, reserve_chain(b"", keys_of(0, 1))))
        assert setting.ask(reserve_chain(b"", keys_of(1000, 4))) is not None
        assert setting.ask(reserve_chain(b"", keys_of(2000, 512))) is None, "more than the slots that are lent"
        after = directory.stats()
        assert after["aborted_chunks"] == before["aborted_chunks"]
        assert after["policy_learned_uses"] == before["policy_learned_uses"]
        directory.protect_unsaved(False)

    in_pool(PLAIN, check, "dram.capacity=2MiB")


def test_a_save_goes_from_the_one_path_to_the_other_and_back() -> None:
    def check(setting: Setting) -> None:
        chains, session = setting.pool.chains, setting.session
        (number, *_) = setting.ask(reserve_chain(b"", keys_of(0, 4)))
        assert setting.ask(setting.commit(number, 1)) == [bytes([SaveState.STORED])]
        assert setting.pool.held_by_connection()[OWNER]["reservations"] == 1
        by_verb = served(chains.commit(session, setting.commit(number, 1)))  # which takes it over
        assert by_verb.states == bytes([SaveState.STORED])
        assert setting.pool.held_by_connection()[OWNER]["reservations"] == 1
        assert setting.ask(setting.commit(number, 2)) is None
        assert served(chains.commit(session, setting.commit(number, 2))).states == bytes([SaveState.STORED]) * 2
        assert setting.pool.held_by_connection().get(OWNER, {}).get("reservations", 0) == 0
        assert setting.ask(setting.commit(number, 1)) is None
        again = setting.ask(reserve_chain(b"", keys_of(0, 4)))
        assert again[:2] == [0, bytes([SaveState.PRESENT]) * 4]

    in_pool(PLAIN, check)


def test_a_save_that_has_expired_is_so_for_its_connection_which_ends_it() -> None:
    def check(setting: Setting) -> None:
        chains, session = setting.pool.chains, setting.session
        (number, *_) = setting.ask(reserve_chain(b"", keys_of(0, 3)))
        setting.clock.advance(10_000.0)
        assert setting.ask(setting.commit(number, 3)) is None
        by_verb = served(chains.commit(session, setting.commit(number, 3)))
        assert by_verb.states == bytes([SaveState.EXPIRED]) * 3
        assert setting.pool._writers.expired_reservations == 1
        assert setting.found["zombies"] == 3
        served(chains.end_reservation(session, number))
        assert setting.found["zombies"] == 0

    in_pool(PLAIN, check)


def test_the_saves_of_a_connection_end_with_it() -> None:
    def check(setting: Setting) -> None:
        for first in range(0, 40, 10):
            assert setting.ask(reserve_chain(b"", keys_of(first, 5)))[0]
        assert setting.found["writing"] == 20
        assert setting.pool.is_busy

    in_pool(PLAIN, check)


KEYS = keys_of(0, 2)
ROOT = ReserveRun(0, RunForm.ROOT, 2)
LEFT_TO_THE_VERBS = {
    "a share": reserve_chain(b"", KEYS, share=Share(0, 1, 0, 1)),
    "two runs": m.Reserve(pack_runs([ROOT, ReserveRun(1, RunForm.ROOT, 2)]), KEYS * 2),
    "no such group": m.Reserve(pack_runs([ReserveRun(1, RunForm.ROOT, 2)]), KEYS),
    "retention": reserve_chain(b"", KEYS, bytes([50, 50]), bytes(8)),
    "other keys than chunks": m.Reserve(pack_runs([ROOT]), KEYS[:-1]),
    "no runs": m.Reserve(b"", KEYS),
    "half a run": m.Reserve(pack_runs([ROOT])[:-1], KEYS),
    "no chunks": m.Reserve(pack_runs([ReserveRun(0, RunForm.ROOT, 0)]), b""),
    "more than is served at once": reserve_chain(b"", keys_of(0, SAVED_AT_ONCE + 1)),
    "no such save": m.Commit(99, bytes(64), b""),
}


@pytest.mark.parametrize("asked", LEFT_TO_THE_VERBS.values(), ids=LEFT_TO_THE_VERBS.keys())
def test_what_is_not_for_here_is_left_as_it_came(asked: m.Reserve | m.Commit) -> None:
    def check(setting: Setting) -> None:
        leading, sent = m.encode(m.Renew(b""), 9), m.encode(asked, 1)
        assert setting.serve(sent, PLENTY_NS) is None
        assert setting.serve(leading + sent, PLENTY_NS) == (len(leading), m.encode(m.Done(), 9))
        assert setting.serve(leading + sent[:-1], PLENTY_NS) == (len(leading), m.encode(m.Done(), 9))
        assert setting.found["held"] == setting.found["reservations"] == 0

    in_pool(PLAIN, check)


def test_declined_chunks_are_noted_with_their_reasons() -> None:
    def check(setting: Setting) -> None:
        answer = setting.ask(reserve_chain(keys_of(500, 1), keys_of(0, 3)))
        assert answer[:2] == [0, bytes([SaveState.NO_PARENT]) * 3]
        assert setting.pool.journal.explain(keys_of(0, 1))["state"] == "declined"

    in_pool(PLAIN, check)


def test_a_pool_that_stops_or_is_drained_leaves_saves_to_the_verbs() -> None:
    def check(setting: Setting) -> None:
        setting.pool.chains.is_drained = True
        assert setting.ask(reserve_chain(b"", KEYS)) is None
        setting.pool.chains.is_drained = False
        (number, *_) = setting.ask(reserve_chain(b"", KEYS))
        setting.pool.chains.is_stopping = True
        assert setting.ask(setting.commit(number, 2)) is None
        setting.pool.chains.is_stopping = False

    in_pool(PLAIN, check)


def test_no_save_is_served_at_once_where_the_daemon_copies() -> None:
    def check(setting: Setting) -> None:
        assert setting.ask(reserve_chain(b"", KEYS)) is None

    in_pool(PLAIN, check, "server.write_mode=copy")


def test_more_saves_than_a_connection_may_have_are_refused_by_the_verb() -> None:
    def check(setting: Setting) -> None:
        assert setting.ask(reserve_chain(b"", keys_of(0, 1)))
        assert setting.ask(reserve_chain(b"", keys_of(10, 1)))
        assert setting.ask(reserve_chain(b"", keys_of(20, 1))) is None

    in_pool(PLAIN, check, "server.max_reservations=2")


def test_changes_are_recorded_before_a_save_evicts_more() -> None:
    def check(setting: Setting) -> None:
        (number, *_) = setting.ask(reserve_chain(b"", keys_of(0, 2)))
        commit = m.encode(setting.commit(number, 2, tokens=setting.tokens(2)), 1)
        reserve = m.encode(reserve_chain(b"", keys_of(10, 2)), 2)
        served_now = setting.serve(commit + reserve, PLENTY_NS)
        assert served_now is not None
        assert served_now[0] == len(commit)
        assert setting.pool.journal.is_behind
        assert setting.ask(reserve_chain(b"", keys_of(10, 2)))[0]
        assert not setting.pool.journal.is_behind

    in_pool(PLAIN, check)


def test_a_scope_stands_behind_the_ids_of_each_chunk() -> None:
    def check(setting: Setting) -> None:
        scope = bytes(SALT_TAG_BYTES) + b"adapter\0"
        (number, *_) = setting.ask(reserve_chain(b"", KEYS))
        assert setting.ask(setting.commit(number, 2, tokens=setting.tokens(2), scope=scope[:-1])) is None
        assert setting.ask(setting.commit(number, 2, tokens=setting.tokens(2)[:-4], scope=scope)) is None
        assert setting.ask(setting.commit(number, 2, tokens=setting.tokens(2), scope=scope)) is not None
        setting.pool.journal.take_changes()
        (event,) = [event for event in setting.pool.journal.since(b"", 0).events if event.keys]
        assert (event.adapter, event.tokens) == ("adapter", setting.tokens(2))

    in_pool(PLAIN, check)


def test_no_byte_that_is_changed_leaks_a_reservation() -> None:
    """Every byte of a frame, with every value of some: served as another valid request, or left."""

    def check(setting: Setting) -> None:
        whole = m.encode(reserve_chain(b"", keys_of(0, 2)), 5)
        for at in range(len(whole)):
            for value in (0, 1, 2, 0x7F, 0x90, 0xC4, 0xC6, 0xCC, 0xFF):
                served_now = setting.serve(whole[:at] + bytes([value]) + whole[at + 1 :], PLENTY_NS)
                if served_now is None:
                    continue
                assert served_now[0] <= len(whole)
                for _, _, values in frames.FrameReader().feed(served_now[1]):
                    served(setting.pool.chains.end_reservation(setting.session, int(str(values[0]))))
        assert setting.found["reservations"] == setting.found["held"] == 0

    in_pool(PLAIN, check)
