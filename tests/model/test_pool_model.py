"""Random operations on a real daemon against a plain dict, every invariant recounted after each step.

The model records the acknowledged chunks. The pool may evict, it may not invent: a hit is a prefix of
the chunks that the model knows, a load gives the key's own bytes, leased chunks stay, counters agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, payload_of, tokens_of

CHUNKS = 40
STEPS, HINTS = 120, 40
ONE_MODEL = (("test-model", SMALL),)
# Chunks of one, a half, three and three times SMALL's size: three models and three size classes in one arena.
SEVERAL_MODELS = (
    *ONE_MODEL,
    ("test-model", replace(SMALL, chunk_tokens=16)),
    ("another", replace(SMALL, layers=9)),
    ("a third", replace(SMALL, layers=9)),
)


@dataclass
class Model:
    """The acknowledged chunks, and the held ones."""

    stored: set[bytes] = field(default_factory=set)
    leases: list[tuple[kv.Pool, kv.Lease, kv.KeyChain]] = field(default_factory=list)
    saves: list[tuple[kv.Save, kv.KeyChain]] = field(default_factory=list)


class Player:
    """Plays random operations on two Pools of each namespace. Families share beginnings, so that chains branch."""

    def __init__(
        self, daemon: Daemon, random: np.random.Generator, namespaces: tuple[tuple[str, kv.Layout], ...] = ONE_MODEL
    ) -> None:
        self.daemon = daemon
        self.random = random
        self.pools = [
            daemon.connect(layout, model=model, copy_threads=threads)
            for model, layout in namespaces
            for threads in (1, 2)
        ]
        self.model = Model()

    def pool(self) -> kv.Pool:
        return self.pools[int(self.random.integers(len(self.pools)))]

    def chain(self, pool: kv.Pool) -> kv.KeyChain:
        family, branch = int(self.random.integers(4)), int(self.random.integers(3))
        chunk = pool.layout.chunk_tokens
        shared = tokens_of(family, chunk * 5)
        own = tokens_of(1000 + family * 10 + branch, chunk * int(self.random.integers(0, 8)))
        return pool.keys(np.concatenate([shared, own])[: chunk * int(self.random.integers(1, 13))])

    def step(self) -> None:
        actions: list[Callable[[], None]] = [
            self.save, self.save, self.load, self.load, self.acquire, self.release, self.begin, self.finish, self.flush,
            self.retain,
        ]  # fmt: skip
        actions[int(self.random.integers(len(actions)))]()
        assert self.daemon.problems(deep=False) == []

    def remember(self, keys: kv.KeyChain, result: kv.SaveResult) -> None:
        assert result.stored + result.present + result.part + result.declined == len(keys)
        kept = [state != "declined" for state in result.states]
        is_in_order = kept == sorted(kept, reverse=True) and not result.part
        assert is_in_order or "pending" in result.reasons, "a chunk is kept behind one that nobody was writing"
        self.model.stored.update(keys[number] for number, state in enumerate(result.states) if state != "declined")

    def save(self) -> None:
        pool = self.pool()
        keys = self.chain(pool)
        retention = [kv.TokenRange(0, None, int(self.random.integers(101)))] if self.random.random() < 0.3 else []
        result = pool.save(keys, from_=payload_of(keys, pool.layout), retention=retention).commit()
        assert result is not None
        self.remember(keys, result)
        kept = result.stored + result.present
        assert pool.lookup(keys).chunks == kept

    def load(self) -> None:
        pool = self.pool()
        keys = self.chain(pool)
        hit = pool.lookup(keys)
        assert all(keys[number] in self.model.stored for number in range(hit.chunks))
        with pool.acquire(hit) as lease:
            assert lease.chunks == hit.chunks
            into = np.zeros((lease.chunks, pool.layout.chunk_bytes), np.uint8)
            result = pool.load(lease, into=into).wait()
        assert result == kv.LoadResult(hit.chunks, hit.tokens, "complete")
        assert_right_bytes(keys, pool.layout, result, into)

    def acquire(self) -> None:
        pool = self.pool()
        keys = self.chain(pool)
        lease = pool.acquire(pool.lookup(keys))
        if lease.chunks and len(self.model.leases) < 3:
            self.model.leases.append((pool, lease, keys))
        else:
            lease.release()

    def release(self) -> None:
        if self.model.leases:
            pool, lease, keys = self.model.leases.pop(int(self.random.integers(len(self.model.leases))))
            into = np.zeros((lease.chunks, pool.layout.chunk_bytes), np.uint8)
            result = pool.load(lease, into=into).wait()
            assert result.chunks == lease.chunks, "a leased chunk was not loadable"
            assert_right_bytes(keys, pool.layout, result, into)
            lease.release()

    def begin(self) -> None:
        if len(self.model.saves) < 2:
            pool = self.pool()
            keys = self.chain(pool)
            self.model.saves.append((pool.save(keys, from_=payload_of(keys, pool.layout)), keys))

    def finish(self) -> None:
        if self.model.saves:
            save, keys = self.model.saves.pop(0)
            if self.random.random() < 0.5:
                result = save.commit()
                assert result is not None
                self.remember(keys, result)
            else:
                save.abort()

    def retain(self) -> None:
        """Send a retention request: it may change the order of eviction, and nothing else."""
        pool = self.pool()
        keys = self.chain(pool)
        found = pool.lookup(keys).chunks
        dice, priority = self.random.random(), int(self.random.integers(101))
        if dice < 0.4:
            first = int(self.random.integers(len(keys))) * pool.layout.chunk_tokens
            result = pool.retain(keys, [kv.TokenRange(first, None, priority, 0.05 if dice < 0.2 else None)])
            assert result.accepted + result.clipped + result.absent == len(keys) - first // pool.layout.chunk_tokens
        elif dice < 0.7:
            announced = pool.announce(keys)
            assert announced.announced + announced.clipped == found
        else:
            assert pool.demote(keys).absent <= len(keys)
        assert pool.lookup(keys).chunks == found

    def flush(self) -> None:
        if self.random.random() < 0.3:
            with self.daemon.admin() as admin:
                admin.flush(None, None)

    def end(self) -> None:
        for _, lease, _ in self.model.leases:
            lease.release()
        for save, _ in self.model.saves:
            save.abort()
        for pool in self.pools:
            pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("round_number", "namespaces"),
    [(0, ONE_MODEL), (1, ONE_MODEL), (2, SEVERAL_MODELS), (3, SEVERAL_MODELS)],
    ids=["one-model", "one-model-again", "several-models", "several-models-again"],
)
def test_random_operations_agree_with_a_dict(
    start_daemon: Callable[..., Daemon], seed: int, round_number: int, namespaces: tuple[tuple[str, kv.Layout], ...]
) -> None:
    daemon = start_daemon(dram__capacity=f"{CHUNKS * SMALL.chunk_bytes}B")
    player = Player(daemon, np.random.default_rng([seed, round_number]), namespaces)
    for _ in range(STEPS):
        player.step()
    player.end()
    assert daemon.problems(deep=True) == []
    stats = daemon.stats()
    assert (stats["leases"], stats["reservations"], stats["pins"], stats["dram.writing_chunks"]) == (0, 0, 0, 0)
    assert stats["announcements"] == 0
    gone = sum(int(stats[name]) for name in ("evicted_chunks", "dram.flushed_chunks", "dram.dropped_chunks"))
    assert stats["saved_chunks"] == int(stats["dram.chunks"]) + gone
    assert int(stats["dram.used_bytes"]) <= CHUNKS * SMALL.chunk_bytes


def test_hints_over_two_tiers_change_no_byte(start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int) -> None:
    daemon = start_daemon(
        dram__capacity=f"{CHUNKS * SMALL.chunk_bytes}B",
        dram__announced_ttl="200ms",
        ssd__path=str(tmp_path / "ssd"),
        ssd__capacity="32MiB",
    )
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    player = Player(daemon, np.random.default_rng([seed, 77]), SEVERAL_MODELS)
    for _ in range(HINTS):
        pool = player.pool()
        keys = player.chain(pool)
        dice = player.random.random()
        if dice < 0.35:
            priority = int(player.random.integers(101))
            pool.save(keys, from_=payload_of(keys, pool.layout), retention=[kv.TokenRange(0, None, priority)]).commit()
        elif dice < 0.6:
            pool.announce(keys)
        elif dice < 0.75:
            pool.demote(keys)
        elif dice < 0.85:
            pool.retain(keys, [kv.TokenRange(33, None, int(player.random.integers(101)), 0.05)])
        else:
            result, into = load_all(pool, keys)
            assert_right_bytes(keys, pool.layout, result, into)
        assert daemon.problems(deep=False) == []
    player.end()
    assert daemon.problems(deep=True) == []
