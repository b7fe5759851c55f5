"""Events from a real daemon: through the client, to operators, over restarts, and the history of a chunk."""

import random
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.errors import ProtocolError, Refused
from kvpool.protocol.records import events as em
from kvpool.protocol.records import messages as m
from kvpool.router_events.columns import unpack_chunks, unpack_events
from tests.rigs.daemon import SMALL, Daemon, Start, wait_connected, wait_until
from tests.rigs.events.readers import Replica
from tests.rigs.payload import load_all, store, tokens_of


class Subscriber:
    """An operator's connection that maintains a replica."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.incarnation = b""
        self.replica = Replica()
        self.gaps = 0

    def follow(self) -> None:
        """Bring the replica up to now."""
        with self._daemon.admin() as admin:
            while True:
                answer = admin.events(self.incarnation, self.replica.last)
                self.incarnation = answer.incarnation
                if answer.is_gap:
                    self.gaps += 1
                    self.take_snapshot()
                    continue
                events = unpack_events(answer.events)
                if not events:
                    return
                self.replica.apply(events)

    def take_snapshot(self) -> None:
        """Start again from a snapshot."""
        with self._daemon.admin() as admin:
            page = admin.snapshot(0)
            self.replica.begin_snapshot(page.as_of)
            while True:
                while self.replica.last < page.as_of:
                    events = unpack_events(admin.events(page.incarnation, self.replica.last).events)
                    self.replica.apply(event for event in events if event.id <= page.as_of)
                self.replica.merge(unpack_chunks(page.chunks))
                if page.cursor < 0:
                    return
                page = admin.snapshot(page.cursor)

    def assert_right(self) -> None:
        """The replica equals the daemon's content: a new replica, and the daemon's counts, at one event."""
        wait_until(self._is_right_at_one_event, "nothing happened while the two were compared")

    def _is_right_at_one_event(self) -> bool:
        other = Subscriber(self._daemon)
        other.take_snapshot()
        self.follow()
        with self._daemon.admin() as admin:
            counted = admin.check()["tiers"]
        other.follow()
        if self.replica.last != other.replica.last:
            return False
        tiers = other.replica.tiers()
        assert self.replica.tiers() == tiers
        for name, level in (("dram", kv.Level.DRAM), ("ssd", kv.Level.SSD)):
            assert sum(bits >> level & 1 for bits in tiers.values()) == counted.get(name, {"chunks": 0})["chunks"], name
        return True


def _play(daemon: Daemon, pool: kv.Pool, chance: random.Random) -> None:
    dice = chance.randrange(10)
    tokens = tokens_of(chance.randrange(5), SMALL.chunk_tokens * chance.randrange(1, 40))
    if dice < 6:
        store(pool, pool.keys(tokens))
    elif dice < 8:
        load_all(pool, pool.keys(tokens))
    elif dice == 8:
        with daemon.admin() as admin:
            admin.flush("test-model", None, chance.choice(("", "dram")))
    else:
        store(pool, pool.keys(tokens_of(1000 + chance.randrange(9), SMALL.chunk_tokens * 200)))


@pytest.mark.parametrize(
    ("buffer", "steps"),
    [
        ("16MiB", 25),
        ("64KiB", 25),
        pytest.param("16MiB", 120, marks=pytest.mark.slow),
        pytest.param("64KiB", 120, marks=pytest.mark.slow),
    ],
)
def test_events_add_up_to_the_daemons_chunks_over_both_tiers_and_restarts(
    start_daemon: Start, tmp_path: Path, seed: int, buffer: str, steps: int
) -> None:
    daemon = start_daemon(
        dram__capacity="1MiB", ssd__path=str(tmp_path / "ssd"), ssd__capacity="32MiB", ssd__watermark="0",
        events__buffer=buffer,
    )  # fmt: skip
    chance, subscriber = random.Random(seed), Subscriber(daemon)
    with daemon.connect() as pool:
        for life in range(2):
            daemon.wait_open()
            for step in range(steps):
                _play(daemon, pool, chance)
                if step % 6 == 0:
                    subscriber.assert_right()
            wait_until(lambda: daemon.stats()["ssd.demotions_under_way"] == 0, "nothing moves")
            subscriber.assert_right()
            assert daemon.problems() == []
            if not life:
                assert daemon.stop() == 0
                daemon.start()
                wait_connected(pool)
    assert subscriber.gaps >= 1


def test_a_client_gets_events_of_its_own_model_and_of_the_daemons_restarts(daemon: Daemon) -> None:
    other_layout = kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=16)
    tokens = tokens_of(7, 6 * SMALL.chunk_tokens)
    with daemon.connect() as pool, daemon.connect(model="another") as other, daemon.connect(other_layout) as third:
        store(other, other.keys(tokens))
        keys = pool.keys(tokens)
        assert store(pool, keys).stored == 6
        store(third, third.keys(tokens))
        batch = pool.events()
        created, stored = batch.events
        assert created.kind == kv.EventKind.CREATED
        assert created.capacities[kv.Level.DRAM] > 0
        assert stored.kind == kv.EventKind.STORED
        assert stored.chunks == tuple(keys[number] for number in range(6))
        assert stored.tokens == tokens.astype("<i4").tobytes()
        assert (stored.level, stored.parent, stored.priority) == (kv.Level.DRAM, b"", 35)
        assert batch.namespaces[stored.namespace] == ("test-model", SMALL)
        assert not batch.is_gap
        assert pool.events(batch.mark) == kv.EventBatch((), batch.mark, False, {})
        (part,) = [part for part in pool.snapshot() if part.chunks]
        assert {chunk.key: chunk.tokens for chunk in part.chunks} == {
            keys[number]: tokens[number * 32 : (number + 1) * 32].astype("<i4").tobytes() for number in range(6)
        }
        hashes = [entry["block_hash"] for entry in batch.trtllm(16)[1]["data"]["blocks"]]
        assert len(hashes) == len(set(hashes)) == 12
        daemon.kill()
        wait_until(lambda: not pool.connected, "the daemon's end is seen")
        assert pool.events(batch.mark) == kv.EventBatch((), batch.mark, False, {})
        assert list(pool.snapshot()) == []
        daemon.start()
        wait_connected(pool)
        after = pool.events(batch.mark)
        assert after.is_gap
        assert after.mark.incarnation != batch.mark.incarnation


def test_an_invalid_mark_is_a_callers_mistake(daemon: Daemon) -> None:
    marks = [None, 3, (b"", "1"), (b"short", 1), (b"", True), (b"", 1 << 63), (b"", 1, 2), ("", 1), (b"", None)]
    with daemon.connect() as pool:
        for mark in marks:
            with pytest.raises(kv.InvalidArgument, match="since is"):
                pool.events(mark)  # type: ignore[arg-type]


def test_an_operator_may_wait_for_the_next_event_and_an_engine_may_not(daemon: Daemon) -> None:
    with daemon.admin() as admin, daemon.connect() as pool:
        first = admin.events(b"", -1)
        assert admin.events(b"", first.last, 0.01).events == unpack_none()
        assert store(pool, pool.keys(tokens_of(1, 64))).stored == 2
        assert len(unpack_events(admin.events(b"", first.last, 30.0).events)) == 1
        with pytest.raises(Refused, match="wait_s"):
            admin.events(b"", 0, 31.0)
        with pytest.raises(Refused, match="wait_s"):
            admin.call(em.AskEvents(b"", 0, float("nan")), em.Events)


def unpack_none() -> bytes:
    """No events, packed."""
    return b"\x90"


def test_invalid_columns_end_the_connection(daemon: Daemon) -> None:
    requests = (
        em.AskEvents(b"x", 0, 0.0),
        em.AskEvents(bytes(17), 0, 0.0),
        em.AskChunkHistory(b""),
        em.AskChunkHistory(bytes(33)),
        em.AskChunkHistory(bytes(32 * (em.HISTORY_KEYS_MAX + 1))),
    )
    for request in requests:
        with daemon.admin() as admin, pytest.raises((Refused, ProtocolError), match="expected"):
            admin.call(request, m.Report)


def test_every_namespace_is_named(daemon: Daemon) -> None:
    for number in range(5):
        daemon.connect(model=f"model-{number}").close()
    with daemon.admin() as admin:
        names = admin.namespaces()
        assert [names[number][0] for number in range(5)] == [f"model-{number}" for number in range(5)]
        assert names[0][1] == SMALL


def test_demoted_chunks_are_published_with_their_token_ids(start_daemon: Start, tmp_path: Path) -> None:
    """Chunks that just reached the disk are the first victims: their token ids must have been read by then."""
    daemon = start_daemon(
        dram__capacity="1MiB", ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", ssd__watermark="0"
    )
    daemon.wait_open()
    with daemon.connect() as pool:
        for number in range(50):
            store(pool, pool.keys(tokens_of(number, SMALL.chunk_tokens * 20)))
    with_ids, last = [], -1
    with daemon.admin() as admin:
        while events := unpack_events((answer := admin.events(b"", last)).events):
            last = answer.last
            with_ids += [bool(event.tokens) for event in events if kv.Level.SSD in event.gained]
    assert len(with_ids) > 400
    assert all(with_ids)


def test_a_change_of_priority_is_published_and_so_is_its_expiry(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(12, 2 * SMALL.chunk_tokens))
        assert store(pool, keys).stored == 2
        mark = pool.events().mark
        assert pool.retain(keys, [kv.TokenRange(0, SMALL.chunk_tokens, 80, 0.05)]).accepted == 1
        batch = pool.events(mark)
        (event,) = batch.events
        assert (event.kind, event.chunks) == (kv.EventKind.UPDATED, (keys[0],))
        assert (event.priority_before, event.priority) == (35, 80)
        assert event.tiers == event.tiers_before == 1 << kv.Level.DRAM

        def expiries() -> tuple[kv.Event, ...]:
            return pool.events(batch.mark).events

        wait_until(lambda: bool(expiries()), "the priority expires")
        (event,) = expiries()
        assert (event.kind, event.chunks) == (kv.EventKind.UPDATED, (keys[0],))
        assert (event.priority_before, event.priority) == (80, 35)
        assert event.tiers == event.tiers_before == 1 << kv.Level.DRAM
