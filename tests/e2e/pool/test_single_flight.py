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
        assert daemon.stats()["stored_chunks"] == CHAIN
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
