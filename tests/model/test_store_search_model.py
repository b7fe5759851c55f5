"""Hits of layouts with groups with what a shared store has, against a search of every end by each group's rule."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.key_column import KeyColumn
from kvpool.protocol.records import seeking as sk
from kvpool.states import Level
from kvpool_client.connection.counters import Counters
from kvpool_client.verbs.finder import Finder
from tests.model.test_group_lookup_model import CHUNK, Index, chain_of, needed, random_layout

MOST = 24


class Node:
    """A node's index, and a store that answers for it."""

    def __init__(self) -> None:
        self.index = Index()
        self.store: set[bytes] = set()
        self.asked: list[sk.Seek] = []
        self.session: Any = SimpleNamespace(
            index=self.index, welcome=SimpleNamespace(has_store=True), call=self._call, peer_pace=lambda *_: None
        )

    def level_of(self, key: bytes) -> int | None:
        """Where a chunk is; None: nowhere."""
        return self.index.levels.get(key, Level.STORE if key in self.store else None)

    def reach_of(self, column: KeyColumn) -> int:
        """How far one chain goes: behind what is here and on other nodes with the store's chunks."""

        def run(first: int, there: set[bytes]) -> int:
            return next((at for at in range(first, len(column)) if column[at] not in there), len(column))

        return run(run(0, set(self.index.levels)), self.store)

    def _call(self, request: sk.Seek, _answer: type[sk.Sought]) -> sk.Sought:
        self.asked.append(request)
        keys = KeyColumn(request.keys)
        assert np.frombuffer(request.counts, "<u4").sum() == len(keys) > 0
        return sk.Sought(bytes(key in self.store for key in keys), 1.0)


@pytest.mark.parametrize("round_", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 4))])
def test_hits_with_a_store_agree_with_a_search_of_every_end(round_: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, round {round_}")
    chance = random.Random(seed)
    longer = 0
    for _ in range(300):
        layout, node = random_layout(chance), Node()
        chain = chain_of(layout)
        chain.extend(np.arange(chance.randrange(0, MOST) * CHUNK, dtype=np.int32))
        most = chance.randrange(0, len(chain) + 1)
        columns = [KeyColumn(column) for column in chain.columns()]
        here, there = chance.choice((0.2, 0.5, 0.9)), chance.choice((0.0, 0.5, 0.9, 1.0))
        for column in columns:
            node.index.levels |= {key: chance.choice((0, 1, 2, 3)) for key in column if chance.random() < here}
            node.store |= {key for key in column if chance.random() < there}
        roles = [part.group for part in layout.parts]
        fulls = [column[:most] for column, role in zip(columns, roles, strict=True) if role is None or role.is_full]
        reach = min((node.reach_of(column) for column in fulls), default=most)

        def serves(end: int, node: Node = node, columns: Any = columns, roles: Any = roles) -> bool:
            others = [pair for pair in zip(roles, columns, strict=True) if pair[0] is not None and not pair[0].is_full]
            return all(node.level_of(column[at]) is not None for role, column in others for at in needed(role, end))

        link: Any = SimpleNamespace(session=node.session, connected_listeners=[])
        finder = Finder(layout, link, Counters(), timeout_s=1.0)
        without = finder.find(node.session, chain, most)
        hit = finder.lookup(chain, chunks_max=most)
        best = max((end for end in range(reach + 1) if serves(end)), default=0)
        assert hit.chunks == len(hit.tiers) == max(without.chunks, best)
        assert hit.full_chunks == max(without.full_chunks, reach if node.asked else 0)
        assert len(node.asked) <= 2
        longer += hit.chunks > without.chunks
    assert longer > 10
