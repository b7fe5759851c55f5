"""Single flight: a chunk that several engines save at once is stored once; the others wait for it, or go on behind it."""

import random
import threading
from itertools import permutations

import pytest

import kvpool_client as kv
from kvpool_client.connection.session import Session
from kvpool_client.verbs.save import publish_each
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import Daemon, in_both_write_modes, wait_until
from tests.rigs.layouts import CHUNK, over
from tests.rigs.payload import assert_right_bytes, load_all, tokens_of
from tests.rigs.prompts import CHUNKS, Ranks, assert_served, begin, prompt, store

HEAD, TAIL = 3, 2


@in_both_write_modes
@over("plain", "stages", "heads", "hybrid", "divided")
def test_the_second_writer_waits_and_the_chunks_are_stored_once(ranks: Ranks, shared: Shared) -> None:
    keys, before = ranks.prompt(31), shared.daemon.stats()["saved_chunks"]
    first, *others = ranks.begin(keys)
    with shared.connect(ranks.layout, share=ranks.case.shares[0]) as second:
        late = begin(second, keys)
        assert set(late.commit().reasons) <= {"pending", "no-parent"}
        assert second.is_being_saved(keys, 0)
        assert not late.wait_pending(0.01)
        found: list[bool] = []
        waiter = threading.Thread(target=lambda: found.append(late.wait_pending(60.0)))
        waiter.start()
        for save in (first, *others):
            save.commit()
        waiter.join()
        assert found == [True]
        again = store(second, keys)
        assert (again.present, again.stored) == (ranks.needed(keys), 0)
        assert shared.daemon.stats()["saved_chunks"] - before == ranks.needed(keys)
        assert_served(second, keys, CHUNKS)


@over("plain", "heads")
def test_a_writer_that_gives_up_or_dies_leaves_the_chunk_to_the_second(ranks: Ranks, shared: Shared) -> None:
    keys = ranks.prompt(31)
    with shared.connect(ranks.layout, share=ranks.case.shares[0]) as second:
        for end in ("abort", "close"):
            with Ranks(ranks.case, shared.connect) as first:
                under_way, late = begin(first.first, keys), begin(second, keys)
                if end == "abort":
                    under_way.abort()
            wait_until(lambda: not second.is_being_saved(keys, 0), "the writer's slots are given up")
            assert not late.wait_pending(60.0)
        with begin(second, keys) as save:
            assert save.wait_pending(0.0), "nothing is pending"
        wait_until(lambda: not second.is_being_saved(keys, 0), "nothing is reserved")
    ranks.store(keys)
    ranks.assert_served(keys)
    assert begin(ranks.first, keys).wait_pending(0.0)


@in_both_write_modes
@over()
def test_the_rest_of_a_prompt_is_saved_behind_chunks_that_another_saves(ranks: Ranks, shared: Shared) -> None:
    keys = ranks.prompt(32)
    under_way = ranks.begin(ranks.prompt(32, HEAD))
    with Ranks(ranks.case, shared.connect) as second:
        for result in [save.commit() for save in second.begin(keys)]:
            pending = HEAD * any(part.is_chained for part in ranks.layout.group_layouts)
            assert (result.declined, dict(result.reasons)) == (pending, {"pending": HEAD} if pending else {})
            assert result.part + result.stored == ranks.needed(keys) - pending
        for save in under_way:
            assert save.commit().declined == 0
        second.assert_served(keys)


def test_a_save_behind_pending_chunks_whose_session_ends_before_it_copies_is_declined(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_and_refuse(session: Session, run: object) -> bool:
        session.end_session("its daemon has gone")
        return False

    with shared.connect() as first, shared.connect() as second:
        keys = prompt(first, 33)
        under_way = begin(first, prompt(first, 33, HEAD))
        monkeypatch.setattr(Session, "adopt_save", end_and_refuse)
        late = begin(second, keys)
        result = late.commit()
        assert result.reasons == {"pending": HEAD, "disconnected": CHUNKS - HEAD}
        assert not late.wait_pending(60.0), "nobody can see whether they come"
        assert under_way.commit().declined == 0


def test_what_follows_a_pending_chunk_comes_or_is_lost_with_it(shared: Shared) -> None:
    with shared.connect() as first, shared.connect() as second:
        for seed, is_committed in ((1, True), (2, False)):
            keys, head = prompt(first, seed, 4), prompt(first, seed, 2)
            under_way, late = begin(first, head), begin(second, keys)
            if not is_committed:
                under_way.abort()
                wait_until(lambda: shared.daemon.stats()["reservations"] == 1, "the writer's slots are given up")
            result = late.commit()
            behind = {} if is_committed else {"no-parent": 2}
            assert (result.part, dict(result.reasons)) == (2 * is_committed, {"pending": 2, **behind})
            assert second.lookup(keys).chunks == 0
            if is_committed:
                assert result.states == ("declined", "declined", "part", "part")
                assert under_way.commit().stored == 2
                assert_served(second, keys, 4)
            else:
                assert not late.wait_pending(60.0)
                assert store(second, keys).stored == 4
        assert shared.daemon.stats()["reservations"] == 0


@in_both_write_modes
def test_prompts_with_one_beginning_that_are_saved_at_once_are_whole(shared: Shared, seed: int) -> None:
    """Clients reserve and commit in any order; where some give up, what followed their chunks may be missing, and nothing
    else."""
    draw = random.Random(seed)
    with shared.connect() as one, shared.connect() as two, shared.connect() as three:
        for number in range(40):
            gives_up = number % 4 == 0
            head = tokens_of(1000 + number, draw.randint(1, 6) * CHUNK)
            waiting = []
            for client in (one, two, three):
                own = tokens_of(draw.randrange(1 << 20), draw.randint(1, 6) * CHUNK)
                waiting.append((client, client.keys([*head, *own])))
            draw.shuffle(waiting)
            under_way: list[tuple[kv.KeyChain, kv.Save]] = []
            saved: list[kv.KeyChain] = []
            while waiting or under_way:
                if waiting and (not under_way or draw.random() < 0.5):
                    client, keys = waiting.pop()
                    under_way.append((keys, begin(client, keys)))
                    continue
                keys, save = under_way.pop(draw.randrange(len(under_way)))
                if gives_up and draw.random() < 0.3:
                    save.abort()
                    continue
                result = save.commit()
                assert set(result.reasons) <= ({"pending", "no-parent"} if gives_up else {"pending"})
                saved.append(keys)
            for keys in saved:
                loaded, into = load_all(one, keys)
                assert gives_up or loaded.chunks == len(keys)
                assert_right_bytes(keys, one.layout, loaded, into)
        assert shared.daemon.stats()["reservations"] == 0


@over("plain", "heads")
def test_waiting_ends_with_the_daemon(ranks: Ranks, daemon: Daemon) -> None:
    with Ranks(ranks.case, daemon.connect) as first, daemon.connect(ranks.layout, share=ranks.case.shares[0]) as second:
        keys = first.prompt(31)
        under_way, late = begin(first.first, keys), begin(second, keys)
        daemon.kill()
        assert not late.wait_pending(20.0)
        under_way.abort()


def _of_one_head(pool: kv.Pool) -> list[kv.KeyChain]:
    """The keys of three prompts with one head."""
    return [pool.keys([*tokens_of(0, HEAD * CHUNK), *tokens_of(number, TAIL * CHUNK)]) for number in range(1, 4)]


@pytest.mark.parametrize("order", list(permutations(range(3))))
@over("plain", "heads")
def test_a_common_head_is_stored_once_in_any_order_of_commits(ranks: Ranks, order: tuple[int, ...]) -> None:
    keys, results = _of_one_head(ranks.first), []
    for pool in ranks.pools:
        saves = [begin(pool, one) for one in keys]
        results = [saves[number].commit() for number in order]
    head = ["present" if number > order.index(0) else "declined" for number in range(3)]
    for number, result in enumerate(results):
        first = "stored" if order[number] == 0 else head[number]
        assert result.states[:HEAD] == (first,) * HEAD
        assert result.states[HEAD:] == ("part" if first == "declined" else "stored",) * TAIL
    for one in keys:
        ranks.assert_served(one, HEAD + TAIL)


def test_saves_that_are_published_together_have_stored_everything_and_a_head_that_is_given_up_is_declined(
    shared: Shared,
) -> None:
    with shared.connect() as pool:
        keys = _of_one_head(pool)
        saves = [begin(pool, one) for one in keys]
        saves[0].abort()
        result = saves[1].commit()
        assert (result.reasons, result.present) == ({"pending": HEAD, "no-parent": TAIL}, 0)
        saves[2].abort()
        first, *others = publish_each([begin(pool, one) for one in keys])
        assert first.states == ("stored",) * (HEAD + TAIL)
        assert [other.states for other in others] == [("present",) * HEAD + ("stored",) * TAIL] * 2
        assert [pool.lookup(one).chunks for one in keys] == [HEAD + TAIL] * 3
