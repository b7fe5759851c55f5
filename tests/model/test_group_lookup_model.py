"""Lookups of prompts whose layout has groups, against a search of every end by each group's rule."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvpool_native
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.layouts.groups import Group, GroupRole
from kvpool.states import Level
from kvpool_client.connection.counters import Counters
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.store_search import ELSEWHERE_MAX

CHUNK = 16
SHAPE: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 8}


class Index:
    """The shared index as a set of keys. What it has of a hit is sought as it is defined: every end, by each column's rule."""

    def __init__(self) -> None:
        self.levels: dict[bytes, int] = {}

    def lookup(self, column: bytes, most: int | None = None) -> bytes:
        found = []
        for key in KeyColumn(column)[:most]:
            if key not in self.levels:
                break
            found.append(self.levels[key])
        return bytes(found)

    def last_run(self, column: bytes, end: int, length: int, here: bool) -> tuple[int, bytes]:
        keys = KeyColumn(column)
        for last in range(end, 0, -1):
            run = range(max(0, last - length), last)
            if all(keys[at] in self.levels and not (here and self.levels[keys[at]] >= Level.PEER) for at in run):
                return last, bytes(self.levels[keys[at]] for at in run)
        return 0, b""

    def find_hit(
        self, needs: kvpool_native.HitNeeds, columns: tuple[bytes, ...], end: int, here: bool = False
    ) -> tuple[bytes, int]:
        keys = [KeyColumn(column) for column in columns]

        def slowest(end: int, *, chains: bool) -> list[int] | None:
            """The level of each chunk of a hit that ends here, None where there is none."""
            found = [0 if 0 in needs.runs else int(Level.DRAM)] * end
            for run, column in zip(needs.runs, keys, strict=True):
                for at in range(max(0, end - run) if run else 0, end if not (chains and run) else 0):
                    level = self.levels.get(column[at])
                    if level is None or (here and level >= Level.PEER):
                        return None
                    found[at] = max(found[at], level)
            return found

        chained = next(last for last in range(end, -1, -1) if slowest(last, chains=True) is not None)
        hit = next(last for last in range(chained, -1, -1) if slowest(last, chains=False) is not None)
        elsewhere = [
            column[at]
            for run, column in zip(needs.runs, keys, strict=True)
            if run
            for at in range(max(0, hit - run), hit)
            if self.levels[column[at]] >= Level.PEER
        ]
        if len(elsewhere) > ELSEWHERE_MAX:
            return self.find_hit(needs, columns, end, here=True)
        return bytes(slowest(hit, chains=False) or ()), chained


class Stored:
    """The same keys in the index that a daemon writes, and in the table of other nodes' chunks."""

    def __init__(self, levels: dict[bytes, int]) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan(1 << 20, 64 << 10, 256)
        arena = kvpool_native.Mapping.create("model-arena", geometry.arena_bytes)
        index = kvpool_native.Mapping.create("model-index", geometry.index_bytes)
        self.directory = kvpool_native.Directory(arena, index, geometry, bytes(16))
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        namespace, size_class = self.directory.add_namespace(), self.directory.add_class(4096, 1)
        buckets = kvpool_native.RemoteIndex.buckets_for(1024)
        table = kvpool_native.Mapping.create("model-remote", kvpool_native.RemoteIndex.bytes_of(buckets))
        self.remote = kvpool_native.RemoteIndex(table, buckets, bytes(16))
        owner = self.remote.add_owner()
        assert owner is not None
        for key, level in levels.items():
            if level == Level.DRAM:
                made = self.directory.reserve(namespace, size_class, b"", key, 1)
                self.directory.commit(made.id, 0, bytes(4))
            else:
                self.remote.insert(owner, key)
        self.index = kvpool_native.IndexView(index, kvpool_native.RemoteView(table))


def needed(role: GroupRole, end: int) -> range:
    return range(end - role.chunks_of(end, CHUNK), end)


def random_layout(chance: random.Random) -> Layout:
    makers = [
        lambda: Group(**SHAPE),
        lambda: Group(kind="window", window=chance.randrange(1, 8 * CHUNK), **SHAPE),
        lambda: Group(kind="state", layers=1, state_bytes=CHUNK),
    ]
    while True:
        groups = tuple(chance.choice(makers)() for _ in range(chance.randrange(1, 5)))
        layout = Layout(chunk_tokens=CHUNK, groups=groups, rank=chance.choice((None, 0)), world=chance.randrange(1, 3))
        if layout.groups:
            return layout


def chain_of(layout: Layout) -> KeyChain:
    return KeyChain(CHUNK, lambda: tuple(kvpool_native.blake3(part.fingerprint()) for part in layout.parts))


@pytest.mark.parametrize("round_", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 4))])
def test_lookups_agree_with_a_search_of_every_end(round_: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, round {round_}")
    chance = random.Random(seed)
    for _ in range(300):
        layout, index = random_layout(chance), Index()
        chain = chain_of(layout)
        count = chance.randrange(0, 24)
        chain.extend(np.arange(count * CHUNK, dtype=np.int32))
        columns = [KeyColumn(column) for column in chain.columns()]
        share = chance.choice((0.5, 0.8, 0.95, 1.0))
        for column in columns:
            levels = (Level.DRAM, Level.DRAM, Level.PEER)
            index.levels |= {key: chance.choice(levels) for key in column if chance.random() < share}
        roles = [part.group for part in layout.parts]
        is_here = chance.random() < 0.5
        counted = {key for key, level in index.levels.items() if not (is_here and level >= Level.PEER)}

        def serves(
            end: int, columns: list[KeyColumn] = columns, roles: list[Any] = roles, counted: set[bytes] = counted
        ) -> bool:
            return all(
                column[at] in counted for role, column in zip(roles, columns, strict=True) for at in needed(role, end)
            )

        stored = Stored(index.levels)
        session: Any = SimpleNamespace(index=stored.index, peer_pace=lambda *_: None)
        link: Any = SimpleNamespace(session=session)
        finder = Finder(layout, link, Counters(), timeout_s=1.0)
        hit = finder.find(session, chain, is_here=is_here)
        assert hit.chunks == max((end for end in range(count + 1) if serves(end)), default=0)
        assert len(hit.tiers) == hit.chunks
        for at in range(hit.chunks):
            known = [
                index.levels[column[at]]
                for role, column in zip(roles, columns, strict=True)
                if role is not None and at in needed(role, hit.chunks)
            ]
            if known and any(role is not None and role.is_full for role in roles):
                assert hit.tiers[at] == max(known)
        needs = kvpool_native.HitNeeds(
            [0 if role.is_full else role.chunks_of(9999, CHUNK) for role in roles if role], 256
        )
        modelled = index.find_hit(needs, chain.columns(), count, is_here)
        assert stored.index.find_hit(needs, chain.columns(), count, is_here) == modelled
