"""Random lives of a whole Pool against a dict: layouts, tiers and write mode drawn, every invariant recounted after each step.

The model knows which ranks have saved their part of each chunk, and which chunks are acknowledged. The pool may evict, it may
not invent: all that a hit needs was saved by every rank, a load gives the keys' own bytes, what is leased stays loadable,
counters agree. Where there is room for everything, what was acknowledged is found until an operator flushes it.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs import prompts, sets
from tests.rigs.daemon import WRITE_MODES, Daemon, wait_connected, wait_until
from tests.rigs.layouts import CASES
from tests.rigs.payload import tokens_of
from tests.rigs.prompts import Ranks

CHUNKS = 40  # of the largest size, where there is little room
STEPS, LONG = 40, 150
LONG_LIVES = 3
STATS = ("leases", "reservations", "pins", "dram.writing_chunks", "announcements", "joint_chunks")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine of a model: its ranks, and the model's number."""

    ranks: Ranks
    model: int


@dataclass
class Dict:
    """What is known of the chunks, by model and key: `parts`: ranks that have committed it; `acknowledged`: it was stored or
    present, and not flushed since."""

    parts: defaultdict[tuple[int, bytes], set[int]] = field(default_factory=lambda: defaultdict(set))
    acknowledged: set[tuple[int, bytes]] = field(default_factory=set)


class Life:
    """Random operations on two engines of each of some models, whose prompts share beginnings, so that chains branch."""

    def __init__(self, daemon: Daemon, dice: random.Random, rows: list[str], *, has_room: bool, has_ssd: bool) -> None:
        self.daemon, self.dice, self.dict = daemon, dice, Dict()
        self.has_room, self.has_ssd = has_room, has_ssd
        self.engines = [
            Engine(Ranks(CASES[row], partial(daemon.connect, model=f"model-{number}", copy_threads=threads)), number)
            for number, row in enumerate(rows)
            for threads in (1, 2)
        ]
        self.leases: list[tuple[kv.Pool, kv.Lease, kv.KeyChain]] = []
        self.saves: list[tuple[Engine, kv.KeyChain, list[Any], list[kv.Save]]] = []
        self.flushed: list[kv.Save] = []  # under way when an operator flushed: what was present then is no longer

    def prompt(self, engine: Engine) -> kv.KeyChain:
        """The keys of a prompt; some begin as others do."""
        chunk = engine.ranks.layout.chunk_tokens
        family = self.dice.randrange(4)
        own = tokens_of(1000 + 10 * family + self.dice.randrange(3), chunk * self.dice.randrange(8))
        tokens = np.concatenate([tokens_of(family, chunk * 5), own])
        return engine.ranks.first.keys(tokens[: chunk * self.dice.randint(1, 12)])

    def step(self) -> None:
        """One operation."""
        operations: list[Callable[[], None]] = [
            self.save, self.save, self.load, self.load, self.acquire, self.release, self.begin_save, self.end_save, self.hint,
            self.hint, self.flush, self.restart, self.save_set, self.load_set,
        ]  # fmt: skip
        self.dice.choice(operations)()
        assert self.daemon.problems(deep=False) == []

    def needed(self, engine: Engine, keys: kv.KeyChain, chunks: int) -> set[tuple[int, bytes]]:
        """All that a hit of so many chunks needs."""
        named = engine.ranks.first.chunks_to_save(keys, 0, chunks, [chunks])
        return {(engine.model, prompts.key_of(keys, group, chunk)) for group, of in enumerate(named) for chunk in of}

    def is_saved(self, engine: Engine, chunk: tuple[int, bytes]) -> bool:
        """Whether every rank has committed its part of a chunk."""
        return len(self.dict.parts.get(chunk, ())) == len(engine.ranks.pools)

    def look_up(self, engine: Engine, keys: kv.KeyChain) -> kv.Hit:
        """A hit, within what the model knows."""
        hit = self.dice.choice(engine.ranks.pools).lookup(keys)
        assert not hit.chunks or all(self.is_saved(engine, each) for each in self.needed(engine, keys, hit.chunks))
        if self.has_room:
            ends = range(len(keys), hit.chunks, -1)
            missed = [end for end in ends if self.needed(engine, keys, end) <= self.dict.acknowledged]
            assert not missed, f"{hit.chunks} chunks are found, and {missed[0]} were acknowledged"
        return hit

    def begin(self, engine: Engine, keys: kv.KeyChain) -> tuple[list[Any], list[kv.Save]]:
        """A save of each rank; what it has of each group."""
        ends = sorted(self.dice.sample(range(1, len(keys) + 1), self.dice.randint(1, min(3, len(keys)))))
        boundaries = ends if engine.ranks.case.has_windows else None
        retention = [kv.TokenRange(0, None, self.dice.randrange(101))] if self.dice.random() < 0.3 else []
        named = engine.ranks.first.chunks_to_save(keys, 0, None, boundaries)
        saves = [
            pool.save(
                keys,
                from_=prompts.as_given(pool, prompts.rows_of(pool, keys, named)),
                boundaries=boundaries,
                retention=retention,
            )
            for pool in engine.ranks.pools
        ]
        return list(named), saves

    def commit(self, engine: Engine, keys: kv.KeyChain, named: list[Any], saves: list[kv.Save], rank: int) -> None:
        """Publish one rank's save, and take its result."""
        result = saves[rank].commit()
        for group, (chunks, of_group) in enumerate(zip(named, result.groups or (result,), strict=True)):
            assert len(of_group.states) == len(chunks)
            for chunk, state in zip(chunks, of_group.states, strict=True):
                name = (engine.model, prompts.key_of(keys, group, chunk))
                if state != "declined":
                    self.dict.parts[name].add(rank)
                if state in ("stored", "present"):
                    self.dict.parts[name] |= set(range(len(engine.ranks.pools)))
                    if saves[rank] not in self.flushed:
                        self.dict.acknowledged.add(name)

    def save(self) -> None:
        """A save of all ranks, by whom it is found at once where nobody else was saving."""
        engine = self.dice.choice(self.engines)
        keys = self.prompt(engine)
        named, saves = self.begin(engine, keys)
        for rank in range(len(saves)):
            self.commit(engine, keys, named, saves, rank)
        self.look_up(engine, keys)

    def begin_save(self) -> None:
        """A save that stays under way."""
        if len(self.saves) < 3:
            engine = self.dice.choice(self.engines)
            keys = self.prompt(engine)
            self.saves.append((engine, keys, *self.begin(engine, keys)))

    def end_save(self) -> None:
        """Its ranks commit or abort it, each by itself."""
        if self.saves:
            engine, keys, named, saves = self.saves.pop(self.dice.randrange(len(self.saves)))
            for rank, save in enumerate(saves):
                if self.dice.random() < 0.7:
                    self.commit(engine, keys, named, saves, rank)
                else:
                    save.abort()

    def load(self) -> None:
        """All that a lookup has found."""
        engine = self.dice.choice(self.engines)
        keys = self.prompt(engine)
        hit = self.look_up(engine, keys)
        pool = self.dice.choice(engine.ranks.pools)
        is_saving = self.daemon.stats()["dram.writing_chunks"] > 0
        with pool.acquire(pool.lookup(keys)) as lease:
            # To read it from disk takes room in DRAM, and a slot that no save is writing.
            may_be_less = self.has_ssd and (not self.has_room or is_saving)
            assert lease.chunks == hit.chunks or (may_be_less and lease.chunks < hit.chunks)
            prompts.assert_loads(pool, keys, lease)

    def set_of(self, engine: Engine) -> tuple[int, sets.Names, list[tuple[int, bytes]]]:
        """A set of a group's chunks, some of them named twice: the group, their names, and theirs in the model."""
        group = self.dice.randrange(len(engine.ranks.layout.group_layouts))
        names = sets.names_of(*self.dice.choices(range(12), k=self.dice.randint(1, 10)))
        return group, names, [(engine.model, bytes([group]) + name.tobytes()) for name in names]

    def save_set(self) -> None:
        """A set of all ranks."""
        engine = self.dice.choice(self.engines)
        group, names, known = self.set_of(engine)
        parents = names[self.dice.choices(range(len(names)), k=len(names))] if self.dice.random() < 0.5 else None
        for rank, pool in enumerate(engine.ranks.pools):
            result = sets.store_set(pool, names, group, parents)
            assert len(result.states) == len(names)
            for name, state in zip(known, result.states, strict=True):
                if state != "declined":
                    self.dict.parts[name].add(rank)
                if state in ("stored", "present"):
                    self.dict.parts[name] |= set(range(len(engine.ranks.pools)))
                    self.dict.acknowledged.add(name)

    def load_set(self) -> None:
        """What is there of a set, by key."""
        engine = self.dice.choice(self.engines)
        group, names, known = self.set_of(engine)
        pool = self.dice.choice(engine.ranks.pools)
        is_found = [level > 0 for level in sets.found(pool, names, group)]
        is_saving = self.daemon.stats()["dram.writing_chunks"] > 0
        held, result = sets.load_set(pool, names, group)
        assert result.reason == "complete"
        may_be_less = self.has_ssd and (not self.has_room or is_saving)
        for name, was_found, is_held in zip(known, is_found, held, strict=True):
            assert not is_held or self.is_saved(engine, name)
            assert is_held == was_found or (may_be_less and was_found)
            assert was_found or not self.has_room or name not in self.dict.acknowledged

    def acquire(self) -> None:
        """A lease that stays."""
        engine = self.dice.choice(self.engines)
        pool, keys = self.dice.choice(engine.ranks.pools), self.prompt(engine)
        lease = pool.acquire(pool.lookup(keys))
        if lease.chunks and len(self.leases) < 3:
            self.leases.append((pool, lease, keys))
        else:
            lease.release()

    def release(self) -> None:
        """What was leased is loaded, whatever happened meanwhile, and let go."""
        if self.leases:
            pool, lease, keys = self.leases.pop(self.dice.randrange(len(self.leases)))
            prompts.assert_loads(pool, keys, lease)
            lease.release()

    def hint(self) -> None:
        """A hint may change the order of eviction and the tier, and nothing else."""
        engine = self.dice.choice(self.engines)
        pool, keys = self.dice.choice(engine.ranks.pools), self.prompt(engine)
        first = self.dice.randrange(len(keys)) * engine.ranks.layout.chunk_tokens
        for_ever = kv.TokenRange(first, None, self.dice.randrange(101), None)
        soon_over = kv.TokenRange(first, None, self.dice.randrange(101), 0.05)
        hints: list[Callable[[], object]] = [
            lambda: pool.retain(keys, [for_ever]),
            lambda: pool.retain(keys, [soon_over]),
            lambda: pool.announce(keys),
            lambda: pool.demote(keys),
        ]
        self.dice.choice(hints)()
        self.look_up(engine, keys)

    def flush(self) -> None:
        """An operator's order."""
        if self.dice.random() < 0.3:
            self.dict.acknowledged.clear()
            self.flushed += [save for *_, saves in self.saves for save in saves]
            with self.daemon.admin() as admin:
                admin.flush(None, None)

    def restart(self) -> None:
        """A stop and a start, or a kill: of what only DRAM had nothing is there, and a stop writes all of it down."""
        if self.dice.random() < 0.8:
            return
        self.let_go()
        is_kill = self.dice.random() < 0.5
        (self.daemon.kill if is_kill else self.daemon.stop)()
        self.daemon.start()
        for engine in self.engines:
            for pool in engine.ranks.pools:
                wait_connected(pool)
        if not self.has_ssd:
            self.dict.parts.clear()
        else:
            wait_until(lambda: self.daemon.stats()["ssd.state"] == "ok", "the tier is open")
        if is_kill or not self.has_ssd:
            self.dict.acknowledged.clear()

    def let_go(self) -> None:
        """End what is under way."""
        while self.leases:
            self.release()
        while self.saves:
            for save in self.saves.pop()[3]:
                save.abort()

    def end(self) -> None:
        """End the life; nothing is left of what it held."""
        self.let_go()
        for engine in self.engines:
            engine.ranks.__exit__(None, None, None)
        wait_until(lambda: not any(self.daemon.stats()[name] for name in STATS), "nothing is held any more")
        assert self.daemon.problems(deep=True) == []


def live(start_daemon: Callable[..., Daemon], tmp_path: Path, seed: str, row: str, steps: int) -> None:
    """A life of this row of the table, and of others beside it."""
    dice = random.Random(seed)
    rows = [row, *dice.sample(sorted(CASES), dice.randrange(3))]
    has_room, has_ssd = dice.random() < 0.5, dice.random() < 0.5
    largest = max(part.chunk_bytes for each in rows for part in CASES[each].layout.group_layouts)
    options = {
        "server__write_mode": dice.choice(list(WRITE_MODES)),
        "dram__capacity": "64MiB" if has_room else f"{CHUNKS * largest}B",
        "dram__announced_ttl": "200ms",
        "server__reservation_ttl": "2s",  # what not all ranks have saved ends with it
    }
    if has_ssd:
        options |= {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "64MiB"}
    print(f"{seed}: {rows}, {options}")
    daemon = start_daemon(**options)
    if has_ssd:
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    life = Life(daemon, dice, rows, has_room=has_room, has_ssd=has_ssd)
    for _ in range(steps):
        life.step()
    life.end()


@pytest.mark.parametrize("row", CASES)
def test_random_operations_agree_with_a_dict(
    start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int, row: str
) -> None:
    live(start_daemon, tmp_path, f"{seed} {row}", row, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(LONG_LIVES))
@pytest.mark.parametrize("row", CASES)
def test_long_lives_agree_with_a_dict(
    start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int, row: str, number: int
) -> None:
    live(start_daemon, tmp_path, f"{seed} {row} {number}", row, LONG)
