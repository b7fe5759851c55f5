"""Promises: tickets for many hits at once, which other processes turn into leases. What cannot be promised is a miss."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool_client.connection.promise_line import FRAME_QUESTIONS, NOTHING, Promise, PromiseLine, Question
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.layouts import Case, over
from tests.rigs.prompts import CHUNKS, Ranks, assert_loads, prompt, store


@pytest.fixture
def pool(daemon: Daemon) -> Iterator[kv.Pool]:
    with daemon.connect(timeout_s=30.0) as pool:
        yield pool


def promises(line: PromiseLine, questions: Sequence[Question]) -> list[Promise]:
    """The answers, once all of them have come."""

    def have_come() -> bool:
        line.receive(0.01)
        return all(question.answer is not None for question in questions)

    wait_until(have_come, f"{len(questions)} questions are answered")
    return [question.answer or NOTHING for question in questions]


def stored_keys(pool: kv.Pool, seed: int) -> kv.KeyChain:
    keys = prompt(pool, seed, tail=0)
    assert store(pool, keys).declined == 0
    return keys


def assert_nothing_held(line: PromiseLine, daemon: Daemon) -> None:
    """Once what is given back has been sent."""

    def are_none_left() -> bool:
        line.receive()
        stats = daemon.stats()
        return not line.is_busy and stats["leases"] == stats["tickets"] == 0

    wait_until(are_none_left, "no lease and no ticket is left")


def test_many_hits_are_promised_together_and_loaded_by_others(daemon: Daemon, pool: kv.Pool) -> None:
    count = FRAME_QUESTIONS + 5
    chains = [stored_keys(pool, seed) for seed in range(4)]
    with closing(pool.open_promise_line(1)) as line, daemon.connect() as worker:
        hits = [pool.lookup(chains[number % 4]) for number in range(count)]
        found = promises(line, [line.ask_promise(hit) for hit in hits])
        assert [promise.chunks for promise in found] == [CHUNKS] * count
        assert [promise.tiers for promise in found] == [hit.tiers.tobytes() for hit in hits]
        assert daemon.stats()["leases"] == 0
        assert daemon.stats()["tickets"] == len({promise.tickets for promise in found}) == count
        for number, promise in enumerate(found[:8]):
            with worker.claim(promise.tickets[0]) as lease:
                assert lease.chunks == CHUNKS
                assert_loads(worker, chains[number % 4], lease)
            with worker.claim(promise.tickets[0]) as lease:
                assert lease.chunks == 0, "a ticket is claimed once"


def test_each_promise_has_as_many_tickets_and_claims_as_the_line_was_opened_for(daemon: Daemon, pool: kv.Pool) -> None:
    hit = pool.lookup(stored_keys(pool, 1))
    with closing(pool.open_promise_line(3, 2)) as line:
        (promise,) = promises(line, [line.ask_promise(hit)])
        assert len(set(promise.tickets)) == 3
        for ticket in promise.tickets:
            for chunks in (CHUNKS, CHUNKS, 0):
                with pool.claim(ticket) as lease:
                    assert lease.chunks == chunks
    assert daemon.stats()["tickets"] == daemon.stats()["leases"] == 0


def test_what_is_given_back_holds_nothing(daemon: Daemon, pool: kv.Pool) -> None:
    stored_keys(pool, 1)
    with daemon.connect(replace(SMALL, rank=None)) as scheduler, closing(scheduler.open_promise_line(2)) as line:
        hit = scheduler.lookup(prompt(scheduler, 1, tail=0))
        assert hit.chunks == CHUNKS
        unsent, kept, answered = (line.ask_promise(hit) for _ in range(3))
        line.give_back(unsent)
        promises(line, [kept, answered])
        assert daemon.stats()["tickets"] == 4
        line.give_back(answered)
        asked = line.ask_promise(hit)
        line.receive()
        line.give_back(asked)
        line.give_back(kept)
        assert_nothing_held(line, daemon)


@over("plain", "hybrid", "divided")
def test_a_hit_is_promised_whole_or_as_it_is_a_hit_now(case: Case, daemon: Daemon) -> None:
    with Ranks(case, daemon.connect) as ranks, daemon.connect(case.layout) as scheduler:
        keys, gone = ranks.prompt(1), ranks.prompt(2)
        ranks.store(keys, [3, CHUNKS])
        ranks.store(gone)
        hits = [scheduler.lookup(each) for each in (keys, gone)]
        with closing(scheduler.open_promise_line(1, len(ranks.pools))) as line:
            (promise,) = promises(line, [line.ask_promise(hits[0])])
            for pool in ranks.pools:
                with pool.claim(promise.tickets[0]) as lease:
                    assert (lease.chunks, lease.tiers.tobytes()) == (CHUNKS, promise.tiers)
                    assert_loads(pool, keys, lease)
            assert_nothing_held(line, daemon)
            with daemon.admin() as admin:
                admin.flush(None, None)
            ranks.store(keys, [3], chunks=3)
            found = promises(line, [line.ask_promise(hit) for hit in hits])
            assert [(promise.chunks, len(promise.tiers)) for promise in found] == [(3, 3), (0, 0)]
            assert found[1] is NOTHING


def test_a_killed_daemon_answers_with_nothing_and_the_next_one_promises_again(daemon: Daemon) -> None:
    with daemon.connect(timeout_s=30.0) as pool, closing(pool.open_promise_line(1)) as line:
        keys = stored_keys(pool, 1)
        hit = pool.lookup(keys)
        daemon.signal(signal.SIGSTOP)
        questions = [line.ask_promise(hit) for _ in range(3)]
        line.receive()
        daemon.kill()
        assert promises(line, questions) == [NOTHING] * 3
        daemon.start()
        assert promises(line, [line.ask_promise(hit)]) == [NOTHING], "nobody is connected, or nothing is there"
        wait_until(
            lambda: pool.connected and store(pool, keys).stored + store(pool, keys).present >= CHUNKS, "it is stored"
        )
        wait_until(lambda: promises(line, [line.ask_promise(pool.lookup(keys))])[0].chunks == CHUNKS, "it is promised")


def test_a_request_for_more_than_an_answer_has_room_for_ends_the_connection(daemon: Daemon, pool: kv.Pool) -> None:
    keys = stored_keys(pool, 1)
    session = pool._link.session
    assert session is not None
    leaf = keys[CHUNKS - 1]
    body = m.encode(pr.Promise(leaf, CHUNKS, "", m.CLAIMS_MAX, 0), 0)[4:]
    with pytest.raises(Refused, match="a batch asks for promises of"):
        session.call(bm.Batch([body] * (bm.BATCH_PROMISE_BYTES_MAX // (32 * m.CLAIMS_MAX) + 1)), bm.Batched)
    wait_until(lambda: daemon.stats()["tickets"] == daemon.stats()["leases"] == 0, "nothing is held")


def test_a_question_longer_than_the_socket_takes_is_answered_while_it_is_waited_for(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(**{"dram.capacity": "64MiB"})
    tiny = kv.Layout(layers=1, kv_heads=1, head_dim=1, dtype="float16", chunk_tokens=1)
    with daemon.connect(tiny, timeout_s=60.0) as pool, closing(pool.open_promise_line(1)) as line:
        keys = prompt(pool, 1, 8000, tail=0)
        assert store(pool, keys).stored == 8000
        question = line.ask_promise(pool.lookup(keys))
        line.receive(60.0)
        assert question.answer is not None
        assert question.answer.chunks == 8000


def test_tickets_that_have_no_room_are_refused_before_one_is_made_and_others_are_served_between(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(**{"dram.capacity": "64MiB"})
    tiny = kv.Layout(layers=1, kv_heads=1, head_dim=1, dtype="float16", chunk_tokens=1)
    chunks = 5000
    with daemon.connect(tiny, timeout_s=60.0) as pool:
        keys = prompt(pool, 1, chunks, tail=0)
        assert store(pool, keys).stored == chunks
        hit = pool.lookup(keys)
        with closing(pool.open_promise_line(m.CLAIMS_MAX)) as greedy, closing(pool.open_promise_line(8)) as line:
            many, few = greedy.ask_promise(hit), line.ask_promise(hit)
            greedy.receive()
            assert promises(line, [few])[0].chunks == chunks
            assert promises(greedy, [many]) == [NOTHING], "its chunks are more than tickets may hold"
            line.give_back(few)
            assert_nothing_held(line, daemon)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0,), "tickets is 0, expected 1..1024"),
        ((1025,), "tickets is 1025"),
        ((1.5,), "tickets is 1.5"),
        (("x",), "tickets is 'x'"),
        ((1, 0), "claims is 0, expected 1..1024"),
        ((1, True), "claims is True"),
    ],
)
def test_a_line_for_other_numbers_is_refused(pool: kv.Pool, arguments: tuple[int, ...], expected: str) -> None:
    with pytest.raises(kv.InvalidArgument, match=expected):
        pool.open_promise_line(*arguments)


def test_a_rank_among_others_makes_no_promises_and_the_only_one_gives_them_back(daemon: Daemon, pool: kv.Pool) -> None:
    with daemon.connect(replace(SMALL, rank=1, world=2)) as one, pytest.raises(kv.InvalidArgument, match="1 of 2"):
        one.open_promise_line(1)
    hit = pool.lookup(stored_keys(pool, 1))
    with closing(pool.open_promise_line(2, 3)) as line:
        question = line.ask_promise(hit)
        assert promises(line, [question])[0].chunks == CHUNKS
        line.give_back(question)
        assert_nothing_held(line, daemon)


def test_announcements_need_no_line(pool: kv.Pool) -> None:
    keys = stored_keys(pool, 1)
    line = pool.open_promise_line(1)
    line.close()
    assert pool.announce(keys).announced == CHUNKS
