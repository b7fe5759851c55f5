"""The work that failpoints are tried with: one engine that does everything a client can do, and checks every byte it gets.

    python -m tests.faults.rigs.workload SOCKET ROUNDS

Ends with exit code 0 whatever the daemon does; a wrong byte or an exception ends it with another one. Its chains derive
from their numbers, so that anybody can ask for them afterwards.
"""

import sys
import time

import numpy as np

import kvpool_client as kv
from tests.rigs.daemon import SMALL, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, payload_of, store, tokens_of

CHAIN = 6
TIMEOUT_S = 1.0
MODEL = "test-model"
EARLIER_CHAINS = 8


def chain_tokens(number: int) -> np.ndarray:
    return tokens_of(7000 + number, CHAIN * SMALL.chunk_tokens)


def run(socket: str, rounds: int) -> None:
    with kv.connect(socket, model=MODEL, layout=SMALL, timeout_s=TIMEOUT_S) as pool:
        for number in range(min(rounds, EARLIER_CHAINS)):  # chunks of an earlier run
            _load(pool, pool.keys(chain_tokens(number)))
        for number in range(rounds):
            keys = pool.keys(chain_tokens(number))
            store(pool, keys)
            pool.announce(pool.keys(chain_tokens(number // 2)))
            pool.retain(keys, [kv.TokenRange(0, None, 10 * number % 101, 0.5)])
            pool.demote(pool.keys(chain_tokens(max(0, number - 2))))
            for again in (number, number // 2, 0):
                _load(pool, pool.keys(chain_tokens(again)))
            if number == 0:
                _corrupt_and_report(pool, pool.keys(chain_tokens(9000)))
            _abort_a_save(pool, number)
            _hand_over(pool, keys)
        _keep_a_load_open(pool, pool.keys(chain_tokens(0)))


def _load(pool: kv.Pool, keys: kv.KeyChain) -> None:
    result, into = load_all(pool, keys)
    assert_right_bytes(keys, SMALL, result, into)


def _abort_a_save(pool: kv.Pool, number: int) -> None:
    keys = pool.keys(chain_tokens(8000 + number))
    pool.save(keys, from_=payload_of(keys, SMALL)).abort()


def _hand_over(pool: kv.Pool, keys: kv.KeyChain) -> None:
    with pool.acquire(pool.lookup(keys)) as lease, pool.claim(lease.ticket()) as claimed:
        into = np.zeros((claimed.chunks, SMALL.chunk_bytes), np.uint8)
        assert_right_bytes(keys, SMALL, pool.load(claimed, into=into).wait(), into)


def _corrupt_and_report(pool: kv.Pool, keys: kv.KeyChain) -> None:
    """Damage a byte without the daemon's knowledge, as a stray pointer would; the load must find it."""
    store(pool, keys)
    with pool.acquire(pool.lookup(keys)) as lease:
        if lease.hold.session is None or lease.chunks < 2:
            return
        arena = np.asarray(lease.hold.session.arena.view())
        arena[int(lease.hold.rows.offsets[1]) + 5] ^= 255
        into = np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)
        assert_right_bytes(keys, SMALL, pool.load(lease, into=into).wait(), into)


def _keep_a_load_open(pool: kv.Pool, keys: kv.KeyChain) -> None:
    """A load that is not waited for counts as use of its lease, which is renewed."""
    with pool.acquire(pool.lookup(keys)) as lease:
        into = np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)
        load = pool.load(lease, into=into)
        end = time.monotonic() + 0.4
        wait_until(lambda: time.monotonic() > end, "renewals have been sent")
        assert_right_bytes(keys, SMALL, load.wait(), into)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
