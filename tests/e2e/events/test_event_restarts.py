"""Two lives of one daemon as a router sees them: the chunks of the first are cleared, those of the second are published."""

import struct
import time

import pytest

import kvpool_client as kv
from kvpool.server.keeping.own_keeper import drop_everything
from tests.rigs.daemon import SMALL, Daemon, Start, wait_connected, wait_until
from tests.rigs.events.publishing import connected, expected, known, router_of
from tests.rigs.events.router import Router, decode
from tests.rigs.payload import store, tokens_of

CHUNK = SMALL.chunk_tokens
KNOWN_WITHIN_S = 1.0


def _restart(daemon: Daemon, end: str, *, ssd: bool) -> float:
    """Starts the next life; the time at which it was ready."""
    if end == "kill":
        daemon.kill()
    else:
        assert daemon.stop() == 0
    daemon.start()
    ready = time.monotonic()
    if ssd:
        daemon.wait_open()
    return ready


def _fill(daemon: Daemon, pool: kv.Pool, router: Router, *, ssd: bool) -> None:
    for number in range(6):
        store(pool, pool.keys(tokens_of(number, CHUNK * 10)))
    if ssd:
        with daemon.admin() as admin:
            admin.demote_all(10.0)
    router.receive_until(lambda: known(router) == expected(daemon), "the router knows the first life")
    assert known(router)["CPU"]
    assert bool(known(router)["STORAGE"]) == ssd


@pytest.mark.timed
@pytest.mark.parametrize("ssd", [False, True], ids=["dram", "ssd"])
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_router_that_stays_connected_knows_the_next_life_within_a_second(publish: Start, end: str, ssd: bool) -> None:
    daemon = publish(ssd=ssd)
    with daemon.connect() as pool, router_of(daemon) as router:
        connected(daemon, router, pool)
        _fill(daemon, pool, router, ssd=ssd)
        router.index.is_strict = False  # it gets the events from before its subscription later
        ready = _restart(daemon, end, ssd=ssd)
        truth = expected(daemon)
        router.receive_until(lambda: known(router) == truth, "the router knows the second life")
        taken_s = time.monotonic() - ready
        print(f"known {taken_s:.2f} s after the daemon was ready")
        assert taken_s < KNOWN_WITHIN_S
        assert truth["CPU"] == set()
        assert bool(truth["STORAGE"]) == ssd
        wait_connected(pool)
        store(pool, pool.keys(tokens_of(50, CHUNK * 3)))
        router.receive_until(lambda: known(router) == expected(daemon), "the router goes on with the second life")


@pytest.mark.parametrize("ssd", [False, True], ids=["dram", "ssd"])
def test_every_topic_of_a_life_begins_with_all_blocks_cleared(publish: Start, ssd: bool) -> None:
    daemon = publish(ssd=ssd, events__republish_interval="0s")
    models = ("test-model", "other")
    with daemon.connect() as pool, daemon.connect(model="other") as other, router_of(daemon, "none") as router:
        for one in (pool, other):
            store(one, one.keys(tokens_of(1, CHUNK * 4)))
        if ssd:
            with daemon.admin() as admin:
                admin.demote_all(10.0)
    killed_us = int(time.time() * 1e6)
    _restart(daemon, "kill", ssd=ssd)
    with router_of(daemon, "none") as router:
        for model in () if ssd else models:  # the disk's namespaces are known without them
            daemon.connect(model=model).close()
        wait_until(lambda: len({topic for topic, _, _ in router.replay(0)}) == 2, "both topics have begun")
        first: dict[str, tuple[int, list[str]]] = {}
        for topic, number, payload in router.replay(0):
            first.setdefault(topic, (number, [event["type"] for event in decode(payload)[1]]))
        assert {topic.rpartition("@")[2] for topic in first} == set(models)
        assert all(events == ["AllBlocksCleared"] for _, events in first.values())
        assert min(number for number, _ in first.values()) >= killed_us, "numbers begin above all of the life before"


def test_a_router_that_comes_after_the_start_of_a_life_recovers_by_replay_alone(publish: Start) -> None:
    """Nothing is republished here: a mark shows that a replay is needed."""
    daemon = publish(ssd=False, events__republish_interval="0s")
    with daemon.connect() as pool:
        store(pool, pool.keys(tokens_of(1, CHUNK * 4)))
        wait_until(lambda: int(daemon.stats()["events.published_messages"]) == 2, "it is published")
        with router_of(daemon) as router:
            router.receive_until(lambda: known(router) == expected(daemon), "the router has asked for it")
            assert len(known(router)["CPU"]) == 4
            assert router.gaps == 0
        with router_of(daemon, "elsewhere") as router:
            assert not router.receive(0.3)
        assert daemon.stats()["events.published_snapshots"] == 0


def test_a_router_that_reconnects_sees_numbers_jump_and_recovers_by_replay(publish: Start) -> None:
    daemon = publish(ssd=False, events__republish_interval="0s")
    with daemon.connect() as pool, router_of(daemon) as router:
        connected(daemon, router, pool)
        _fill(daemon, pool, router, ssd=False)
        router.index.is_strict = False
        _restart(daemon, "kill", ssd=False)
        wait_connected(pool)
        store(pool, pool.keys(tokens_of(70, CHUNK * 3)))
        router.receive_until(lambda: known(router) == expected(daemon), "the router knows the second life")
        assert router.jumps == 1
        assert router.gaps == 0
        assert len(known(router)["CPU"]) == 3


def test_a_later_model_does_not_clear_the_blocks_of_others(publish: Start) -> None:
    """A router that applies any AllBlocksCleared to all topics gets everything republished."""
    daemon = publish(ssd=False)
    with daemon.connect() as pool, router_of(daemon) as router:
        connected(daemon, router, pool)
        store(pool, pool.keys(tokens_of(1, CHUNK * 5)))
        router.receive_until(lambda: known(router) == expected(daemon), "the router knows what is stored")
        with daemon.connect(model="other"):
            router.receive_until(lambda: len(router.topics) == 2, "the other topic begins")
            router.receive_until(lambda: known(router) == expected(daemon), "everything is republished")


def test_marks_repeat_a_number_and_change_nothing(publish: Start) -> None:
    daemon = publish(ssd=False, events__republish_interval="0s")
    with daemon.connect() as pool, router_of(daemon) as router:
        connected(daemon, router, pool)
        (topic,) = router.topics

        def is_a_mark_at_rest() -> bool:
            """False where something was published meanwhile: chunks stored while the router subscribed."""
            newest = router.replay(0)[-1][1]
            with router_of(daemon) as late:
                assert late._sub.poll(5000)
                frames = late._sub.recv_multipart()
            if router.replay(0)[-1][1] != newest:
                return False
            assert frames[0].decode() == topic
            assert struct.unpack(">Q", frames[1])[0] == newest
            assert decode(frames[2])[1] == []
            return True

        wait_until(is_a_mark_at_rest, "nothing is published any more, and the number is repeated")


def _assert_finds_prompts(router: Router) -> None:
    """Whoever routes by token ids finds each prompt of the first life."""
    found = [router.index.longest(tokens_of(number, CHUNK * 10).tolist(), CHUNK) for number in range(6)]
    assert found == [10] * 6


@pytest.mark.parametrize("ssd", [False, True], ids=["dram", "ssd"])
def test_a_router_knows_the_kept_chunks_of_the_next_life(publish: Start, ssd: bool) -> None:
    daemon = publish(ssd=ssd, server__keep_memory="keeper", server__keep_for="1m")
    try:
        with daemon.connect() as pool, router_of(daemon) as router:
            connected(daemon, router, pool)
            _fill(daemon, pool, router, ssd=ssd)
            router.index.is_strict = False
            before = expected(daemon)
            assert before["STORAGE"] == (before["CPU"] if ssd else set())
            _restart(daemon, "kill", ssd=ssd)
            assert expected(daemon) == before
            wait_connected(pool)
            store(pool, pool.keys(tokens_of(50, CHUNK * 3)))
            router.receive_until(lambda: known(router) == expected(daemon), "the router knows the second life")
            assert len(known(router)["CPU"]) == len(before["CPU"]) + 3
            _assert_finds_prompts(router)
        with daemon.connect() as pool, router_of(daemon) as late:
            connected(daemon, late, pool)
            late.receive_until(lambda: known(late) == expected(daemon), "a router that comes later knows it, too")
            _assert_finds_prompts(late)
            kinds = [event["type"] for _, _, payload in late.replay(0) for event in decode(payload)[1]]
            assert kinds[0] == "AllBlocksCleared", "what a router knew of the life before does not count"
            assert kinds.count("BlockStored") > 0
    finally:
        daemon.kill()
        drop_everything(daemon.socket)
