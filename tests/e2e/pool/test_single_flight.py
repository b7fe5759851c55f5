"""Single flight: a chunk that two engines save at once is stored once, and the second one can wait for it."""

import random
import threading

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, payload_of, store, tokens_of

CHAIN = 4


def keys_of(pool: kv.Pool, chunks: int = CHAIN) -> kv.KeyChain:
    return pool.keys(tokens_of(31, chunks * SMALL.chunk_tokens))


@in_both_write_modes
def test_the_second_writer_waits_and_the_chunks_are_stored_once(daemon: Daemon) -> None:
    with daemon.connect() as first, daemon.connect() as second:
        keys = keys_of(first)
        under_way = first.save(keys, from_=payload_of(keys, SMALL))
        late = second.save(keys_of(second), from_=payload_of(keys, SMALL))
        result = late.commit()
        assert result is not None
        assert result.reasons == {"pending": CHAIN}
        assert second.is_being_saved(keys, 0)
        assert not late.wait_pending(0.01)
        found: list[bool] = []
        waiter = threading.Thread(target=lambda: found.append(late.wait_pending(60.0)))
        waiter.start()
        assert under_way.commit() is not None
        waiter.join()
        assert found == [True]
        again = store(second, keys)
        assert (again.present, again.stored) == (CHAIN, 0)
        assert daemon.stats()["saved_chunks"] == CHAIN
        loaded, into = load_all(second, keys)
        assert loaded.chunks == CHAIN
        assert_right_bytes(keys, SMALL, loaded, into)


def test_a_writer_that_gives_up_leaves_the_chunk_to_the_second(daemon: Daemon) -> None:
    with daemon.connect() as first, daemon.connect() as second:
        keys = keys_of(first)
        under_way = first.save(keys, from_=payload_of(keys, SMALL))
        late = second.save(keys, from_=payload_of(keys, SMALL))
        under_way.abort()
        assert not late.wait_pending(60.0)
        assert store(second, keys).stored == CHAIN


def test_what_follows_a_pending_chunk_is_copied_at_once_and_comes_with_it(daemon: Daemon) -> None:
    with daemon.connect() as first, daemon.connect() as second:
        keys, begin = keys_of(first), keys_of(first, 2)
        under_way = first.save(begin, from_=payload_of(begin, SMALL))
        result = store(second, keys)
        assert (result.part, dict(result.reasons)) == (2, {"pending": 2})
        assert result.states == ("declined", "declined", "part", "part")
        assert second.lookup(keys).chunks == 0
        committed = under_way.commit()
        assert committed is not None
        assert committed.stored == 2
        assert second.lookup(keys).chunks == CHAIN
        loaded, into = load_all(second, keys)
        assert loaded.chunks == CHAIN
        assert_right_bytes(keys, SMALL, loaded, into)
        assert daemon.stats()["reservations"] == 0


def test_what_follows_a_chunk_that_is_given_up_is_lost_with_it(daemon: Daemon) -> None:
    with daemon.connect() as first, daemon.connect() as second:
        keys, begin = keys_of(first), keys_of(first, 2)
        under_way = first.save(begin, from_=payload_of(begin, SMALL))
        late = second.save(keys, from_=payload_of(keys, SMALL))
        under_way.abort()
        result = late.commit()
        assert result is not None
        assert dict(result.reasons) == {"pending": 2, "no-parent": 2}
        assert not late.wait_pending(60.0)
        assert store(second, keys).stored == CHAIN


@in_both_write_modes
def test_prompts_with_one_beginning_that_are_saved_at_once_are_whole(daemon: Daemon, seed: int) -> None:
    """Clients reserve and commit in any order; where some give up, what followed their chunks may be missing, and nothing
    else."""
    draw = random.Random(seed)
    with daemon.connect() as one, daemon.connect() as two, daemon.connect() as three:
        for number in range(40):
            gives_up = number % 4 == 0
            shared = tokens_of(1000 + number, draw.randint(1, 6) * SMALL.chunk_tokens)
            waiting = []
            for client in (one, two, three):
                own = tokens_of(draw.randrange(1 << 20), draw.randint(1, 6) * SMALL.chunk_tokens)
                waiting.append((client, client.keys([*shared, *own])))
            draw.shuffle(waiting)
            under_way: list[tuple[kv.KeyChain, kv.Save]] = []
            saved: list[kv.KeyChain] = []
            while waiting or under_way:
                if waiting and (not under_way or draw.random() < 0.5):
                    client, keys = waiting.pop()
                    under_way.append((keys, client.save(keys, from_=payload_of(keys, SMALL))))
                    continue
                keys, save = under_way.pop(draw.randrange(len(under_way)))
                if gives_up and draw.random() < 0.3:
                    save.abort()
                    continue
                result = save.commit()
                assert result is not None
                assert set(result.reasons) <= ({"pending", "no-parent"} if gives_up else {"pending"})
                saved.append(keys)
            for keys in saved:
                loaded, into = load_all(one, keys)
                assert gives_up or loaded.chunks == len(keys)
                assert_right_bytes(keys, SMALL, loaded, into)
        assert daemon.stats()["reservations"] == 0
        assert daemon.problems() == []


def test_a_writer_that_dies_leaves_the_chunk_to_the_second(daemon: Daemon) -> None:
    with daemon.connect() as second:
        with daemon.connect() as first:
            keys = keys_of(first)
            under_way = first.save(keys, from_=payload_of(keys, SMALL))
            late = second.save(keys, from_=payload_of(keys, SMALL))
        assert under_way is not None
        wait_until(lambda: not second.is_being_saved(keys, 0), "the writer's slots are given up")
        assert not late.wait_pending(60.0)
        assert store(second, keys).stored == CHAIN


def test_without_pending_chunks_no_wait_happens(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = keys_of(pool)
        with pool.save(keys, from_=payload_of(keys, SMALL)) as save:
            assert save.wait_pending(0.0)
            assert save.commit() is not None
        assert pool.save(keys, from_=payload_of(keys, SMALL)).wait_pending(0.0)


def test_waiting_ends_with_the_daemon(daemon: Daemon) -> None:
    with daemon.connect() as first, daemon.connect() as second:
        keys = keys_of(first)
        under_way = first.save(keys, from_=payload_of(keys, SMALL))
        late = second.save(keys, from_=payload_of(keys, SMALL))
        daemon.kill()
        assert not late.wait_pending(20.0)
        under_way.abort()
