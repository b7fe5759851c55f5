"""Lookups where the daemon has a shared store: one question for what shared memory lacks, and none again while it is known."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.errors import DaemonUnreachable
from kvpool.key_column import KeyColumn
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import seeking as sk
from kvpool.types import Level
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.roots import Roots
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.finder import Finder
from tests.rigs.daemon import SMALL
from tests.rigs.payload import tokens_of

CHUNKS = 6


class Rig:
    """A finder over a session that has `here` chunks in shared memory and `there` in the store."""

    def __init__(self, here: int, there: int, *, has_store: bool = True, ranks: int = 1) -> None:
        self.here, self.there = here, there
        self.asked: list[sk.Seek] = []
        self.is_away = False
        self.now_ns = 0
        self.layout = replace(SMALL, rank=None, world=ranks) if ranks > 1 else SMALL
        index = SimpleNamespace(lookup=lambda _: (self.here, bytes([Level.DRAM]) * self.here))
        self.session: Any = SimpleNamespace(
            index=index, welcome=SimpleNamespace(has_store=has_store), has_peers=False, call=self._call
        )
        self.failures: list[Exception] = []
        link: Any = SimpleNamespace(session=self.session, note_failure=lambda _, error: self.failures.append(error))
        clock: Any = SimpleNamespace(now_ns=lambda: self.now_ns)
        self.finder = Finder(self.layout, link, Counters(), timeout_s=1.0, clock=clock)

    def keys(self, seed: int = 1, chunks: int = CHUNKS) -> KeyChain:
        roots = Roots("model", self.layout)
        chain = KeyChain(SMALL.chunk_tokens, lambda: roots.of(b"d" * 32, b"", ""))
        chain.extend(tokens_of(seed, chunks * SMALL.chunk_tokens))
        return chain

    def _call(self, request: sk.Seek, _answer: type[sk.Sought]) -> sk.Sought:
        self.asked.append(request)
        if self.is_away:
            raise DaemonUnreachable("away")
        counts = np.frombuffer(request.counts, "<u4").tolist()
        found = [min(self.there, count) for count in counts]
        there = (bytes([1] * more) + bytes(count - more) for count, more in zip(counts, found, strict=True))
        return sk.Sought(b"".join(there), 1.0)


@pytest.mark.parametrize(("here", "there", "chunks"), [(0, 6, 6), (2, 4, 6), (2, 1, 3), (0, 0, 0), (3, 99, 6)])
def test_the_store_continues_a_hit(here: int, there: int, chunks: int) -> None:
    rig = Rig(here, there)
    keys = rig.keys()
    hit = rig.finder.lookup(keys)
    assert (hit.chunks, hit.chunks_here, hit.tokens) == (chunks, here, chunks * SMALL.chunk_tokens)
    assert hit.tiers.tolist() == [Level.DRAM] * here + [Level.STORE] * (chunks - here)
    (asked,) = rig.asked
    assert asked.keys == KeyColumn(keys.columns()[0])[here:].packed
    assert 0 < asked.timeout_s < 1.0


@pytest.mark.parametrize(
    ("levels", "chunks"),
    [
        ([[1] * 18], [6, 6, 6]),
        ([[1] * 11], [6]),
        ([[1] * 5], []),
        ([[1] * 7 + [Level.PEER] + [1] * 10], [6]),
        ([[Level.PEER] + [1] * 17], []),
        ([[1] * 18, [2] * 12], [6, 6]),
        ([[1] * 18, [1] * 6 + [Level.PEER] * 12], [6]),
    ],
)
def test_a_lookup_of_many_chains_has_those_that_this_node_has_whole_on_all_ranks(
    levels: list[list[int]], chunks: list[int]
) -> None:
    rig = Rig(0, 6, ranks=len(levels))
    answers = [(len(tiers), bytes(tiers)) for tiers in levels]
    asked: list[bytes] = []

    def lookup(column: bytes) -> tuple[int, bytes]:
        asked.append(column)
        return answers[len(asked) - 1]

    rig.session.index.lookup = lookup
    chains = [rig.keys(seed) for seed in range(3)]
    hits = rig.finder.lookup_each(chains)
    assert asked == [b"".join(chain.columns()[rank] for chain in chains) for rank in range(len(levels))]
    assert [hit.chunks for hit in hits] == chunks
    slowest = [max(tiers) for tiers in zip(*levels, strict=False)]
    assert [tier for hit in hits for tier in hit.tiers.tolist()] == slowest[: sum(chunks)]
    assert [hit.keys for hit in hits] == chains[: len(chunks)]
    assert rig.asked == [], "no request"


@pytest.mark.parametrize(("here", "has_store"), [(CHUNKS, True), (2, False), (0, False)])
def test_nobody_is_asked_without_need_or_without_a_store(here: int, has_store: bool) -> None:
    rig = Rig(here, 6, has_store=has_store)
    assert rig.finder.lookup(rig.keys()).chunks == here
    assert rig.asked == []


@pytest.mark.parametrize(("here", "owner"), [(6, ""), (1, ""), (1, "node-b")])
def test_a_hit_has_no_more_chunks_than_one_request_names_of_all_ranks(
    here: int, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "KEYS_MAX", 9)
    rig = Rig(here, 5, has_store=not owner, ranks=2)
    rig.session.has_peers = True
    hit = rig.finder.lookup(rig.keys(), owner)
    assert (hit.chunks, hit.tokens, len(hit.tiers)) == (4, 4 * SMALL.chunk_tokens, 4)
    assert [len(KeyColumn(asked.keys)) for asked in rig.asked] == ([] if here == 6 or owner else [2 * 3])


def test_what_the_store_lacks_is_not_sought_again_for_a_while() -> None:
    rig = Rig(2, 0)
    keys = rig.keys()
    for _ in range(3):
        assert rig.finder.lookup(keys).chunks == 2
    assert len(rig.asked) == 1
    rig.finder.lookup(rig.keys(seed=2))
    assert len(rig.asked) == 2
    rig.now_ns, rig.there = 1_000_000_001, 4
    assert rig.finder.lookup(keys).chunks == 6


def test_where_the_store_ends_is_remembered_for_every_prompt_that_begins_so() -> None:
    rig = Rig(2, 1)
    assert rig.finder.lookup(rig.keys()).chunks == 3
    rig.here, rig.there = 3, 0
    assert rig.finder.lookup(rig.keys()).chunks == 3, "the found one is here now"
    assert rig.finder.lookup(rig.keys(chunks=CHUNKS - 1)).chunks == 3
    assert len(rig.asked) == 1


def test_what_is_behind_the_last_question_of_a_long_prompt_is_sought_with_the_next() -> None:
    rig = Rig(2, sk.SEEK_KEYS_MAX)
    keys = rig.keys(chunks=2 * sk.SEEK_KEYS_MAX)
    rig.here = rig.finder.lookup(keys).chunks
    assert rig.here == 2 + sk.SEEK_KEYS_MAX
    assert rig.finder.lookup(keys).chunks == 2 * sk.SEEK_KEYS_MAX
    assert len(rig.asked) == 2


def test_a_daemon_that_does_not_answer_is_a_miss() -> None:
    rig = Rig(2, 4)
    rig.is_away = True
    assert rig.finder.lookup(rig.keys()).chunks == 2
    assert len(rig.failures) == 1


def test_the_keys_of_all_ranks_are_sought() -> None:
    rig = Rig(1, 5, ranks=2)
    keys = rig.keys()
    assert rig.finder.lookup(keys).chunks == CHUNKS
    assert rig.asked[0].keys == b"".join(KeyColumn(column)[1:].packed for column in keys.columns())
    assert isinstance(rig.finder.lookup(keys).tiers, np.ndarray)
