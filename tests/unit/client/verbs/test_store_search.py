"""Lookups of layouts with groups where the daemon has a shared store: two questions at most, bounded, and none without need."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvpool_native
from kvpool.errors import DaemonUnreachable
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import seeking as sk
from kvpool.types import Level
from kvpool_client.connection.counters import Counters
from kvpool_client.key_chain import KeyChain, Namespace
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.lease_fetcher import NO_LEASE, LeaseFetcher
from kvpool_client.verbs.store_search import ELSEWHERE_MAX, END_KEYS_MAX
from tests.model.groups.test_group_lookup_model import Index
from tests.rigs.layouts import CHUNK, FULL, HYBRID, STATE, WINDOW, WINDOW_CHUNKS

CHUNKS = 8


class Rig:
    """A finder over a session with chunks in shared memory and in the store."""

    def __init__(self, layout: Layout = HYBRID, *, has_store: bool = True) -> None:
        self.layout = layout
        self.index = Index()
        self.there: set[bytes] = set()
        self.asked: list[sk.Seek] = []
        self.answer: Any = None
        welcome = SimpleNamespace(has_store=has_store)
        self.session: Any = SimpleNamespace(
            index=self.index, welcome=welcome, call=self._call, peer_pace=lambda *_: None
        )
        self.failures: list[Exception] = []
        link: Any = SimpleNamespace(
            session=self.session,
            note_failure=lambda _, error: self.failures.append(error),
            connected_listeners=[],
        )
        self.link = link
        self.finder = Finder(layout, link, Counters(), timeout_s=1.0)
        self.now_ns = 0
        clock: Any = SimpleNamespace(now_ns=lambda: self.now_ns)
        self.finder._store._clock = clock

    def keys(self, chunks: int = CHUNKS) -> KeyChain:
        roots = tuple(kvpool_native.blake3(part.fingerprint()) for part in self.layout.parts)
        chain = KeyChain(self.layout.chunk_tokens, lambda: roots)
        chain.extend(np.arange(chunks * self.layout.chunk_tokens, dtype=np.int32))
        return chain

    def have_here(self, keys: KeyChain, group: int, *chunks: int, level: Level = Level.DRAM) -> None:
        self.index.levels |= {KeyColumn(keys.columns()[group])[chunk]: level for chunk in chunks}

    def have_there(self, keys: KeyChain, group: int, *chunks: int) -> None:
        self.there |= {KeyColumn(keys.columns()[group])[chunk] for chunk in chunks}

    def have_boundary_there(self, keys: KeyChain, end: int) -> None:
        """All that a hit of this end needs."""
        self.have_there(keys, FULL, *range(end))
        self.have_there(keys, WINDOW, *range(end - WINDOW_CHUNKS, end))
        self.have_there(keys, STATE, end - 1)

    def _call(self, request: sk.Seek, _answer: type[sk.Sought]) -> sk.Sought:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or sk.Sought(bytes(key in self.there for key in KeyColumn(request.keys)), 1.0)


def counts_of(asked: sk.Seek) -> list[int]:
    counts: list[int] = np.frombuffer(asked.counts, "<u4").tolist()
    return counts


def test_full_chunks_are_sought_first_and_then_the_ends_before_theirs() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_here(keys, FULL, 0, 1)
    rig.have_boundary_there(keys, 6)
    hit = rig.finder.lookup(keys)
    assert (hit.chunks, hit.full_chunks) == (6, 6)
    assert hit.tiers.tolist() == [Level.DRAM] * 2 + [Level.STORE] * 4
    assert [counts_of(asked) for asked in rig.asked] == [[CHUNKS - 2, 0, 0], [0, 6, 6]]
    assert all(0 < asked.timeout_s <= 0.5 for asked in rig.asked)


def test_nothing_is_sought_behind_the_full_groups_end() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_boundary_there(keys, CHUNKS)
    rig.there.discard(KeyColumn(keys.columns()[FULL])[0])
    assert rig.finder.lookup(keys).chunks == 0
    assert len(rig.asked) == 1


def test_no_end_is_sought_where_what_is_here_serves_the_last_one() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_there(keys, FULL, *range(CHUNKS))
    rig.have_here(keys, WINDOW, CHUNKS - 2, CHUNKS - 1)
    rig.have_here(keys, STATE, CHUNKS - 1)
    assert rig.finder.lookup(keys).chunks == CHUNKS
    assert len(rig.asked) == 1


def test_a_window_that_is_there_in_half_is_no_end() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_boundary_there(keys, 3)
    rig.have_boundary_there(keys, CHUNKS)
    rig.there.discard(KeyColumn(keys.columns()[WINDOW])[CHUNKS - 2])
    hit = rig.finder.lookup(keys)
    assert (hit.chunks, hit.full_chunks) == (3, CHUNKS)


@pytest.mark.parametrize("here", range(WINDOW_CHUNKS + 1))
def test_a_window_is_joined_from_both(here: int) -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_boundary_there(keys, CHUNKS)
    window = range(CHUNKS - WINDOW_CHUNKS, CHUNKS)
    rig.there -= {KeyColumn(keys.columns()[WINDOW])[chunk] for chunk in window[:here]}
    rig.have_here(keys, WINDOW, *window[:here])
    assert rig.finder.lookup(keys).chunks == CHUNKS


def test_a_chain_goes_on_with_other_nodes_chunks_and_then_with_the_stores() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_boundary_there(keys, CHUNKS)
    rig.have_here(keys, FULL, 0)
    rig.have_here(keys, FULL, *range(1, 5), level=Level.PEER)
    rig.there -= {KeyColumn(keys.columns()[FULL])[chunk] for chunk in range(5)}
    hit = rig.finder.lookup(keys)
    assert hit.chunks == CHUNKS
    assert hit.tiers[:6].tolist() == [Level.DRAM] + [Level.PEER] * 4 + [Level.STORE]


def test_nobody_is_asked_without_a_store() -> None:
    rig = Rig(has_store=False)
    keys = rig.keys()
    rig.have_boundary_there(keys, CHUNKS)
    assert rig.finder.lookup(keys).chunks == 0
    assert rig.asked == []


def test_a_hit_as_long_as_may_be_asks_nobody() -> None:
    rig = Rig()
    keys = rig.keys()
    for group in (FULL, WINDOW, STATE):
        rig.have_here(keys, group, *range(4))
    assert rig.finder.lookup(keys, chunks_max=4).chunks == 4
    assert rig.asked == []
    assert rig.finder.lookup(rig.keys(0)).chunks == 0
    assert rig.asked == []


def test_where_the_store_ends_the_full_groups_is_remembered_for_every_prompt_that_begins_so() -> None:
    rig = Rig()
    for chunks in (CHUNKS, CHUNKS - 1, CHUNKS + 1):
        assert rig.finder.lookup(rig.keys(chunks)).chunks == 0
    assert len(rig.asked) == 1
    rig.have_here(rig.keys(), FULL, 0)
    assert rig.finder.lookup(rig.keys()).chunks == 0
    assert len(rig.asked) == 3, "they go on now, and an end before that is sought"


def test_what_was_sought_without_success_is_not_sought_again_for_a_while() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_there(keys, FULL, *range(CHUNKS))
    for _ in range(3):
        hit = rig.finder.lookup(keys)
        assert (hit.chunks, hit.full_chunks) == (0, CHUNKS)
    assert len(rig.asked) == 2
    rig.have_boundary_there(keys, CHUNKS)
    rig.now_ns = 1_000_000_001
    assert rig.finder.lookup(keys).chunks == CHUNKS


@pytest.mark.parametrize(
    "answer", [DaemonUnreachable("away"), sk.Sought(b"", 1.0), sk.Sought(b"\1" * (CHUNKS + 1), 1.0)]
)
def test_a_daemon_that_answers_nothing_of_use_is_a_miss(answer: Any) -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_boundary_there(keys, CHUNKS)
    rig.answer = answer
    assert rig.finder.lookup(keys).chunks == 0
    assert len(rig.failures) == 1


def test_questions_about_long_prompts_are_bounded() -> None:
    """The last ends are sought, as many as the bound allows."""
    layout = replace(HYBRID, rank=None, world=2)
    rig = Rig(layout)
    keys = rig.keys(sk.SEEK_KEYS_MAX)
    rig.there |= {key for column in keys.columns()[: 2 * (FULL + 1)] for key in KeyColumn(column)}
    assert rig.finder.lookup(keys).chunks == 0
    (full, ends) = (counts_of(asked) for asked in rig.asked)
    assert full == [sk.SEEK_KEYS_MAX // 2] * 2 + [0] * 4
    assert ends == [0, 0] + [END_KEYS_MAX // 4] * 4


def test_a_hit_of_too_many_windows_elsewhere_ends_earlier() -> None:
    windows = ELSEWHERE_MAX
    wide = replace(
        HYBRID,
        groups=(HYBRID.groups[FULL], replace(HYBRID.groups[WINDOW], window=windows * CHUNK), HYBRID.groups[STATE]),
    )
    rig = Rig(wide)
    keys = rig.keys(2 * windows)
    rig.there |= {key for column in keys.columns() for key in KeyColumn(column)}
    rig.have_here(keys, WINDOW, 4)
    assert rig.finder.lookup(keys).chunks == windows + 4, "one chunk of the window is here"


@pytest.mark.parametrize("left", [CHUNKS, 3, 0])
def test_a_lease_that_the_daemon_cannot_give_is_sought_once_more(left: int) -> None:
    """Its answer may be too old, or the store's chunks gone."""
    rig = Rig()
    keys = rig.keys()
    rig.have_boundary_there(keys, 3)
    rig.have_boundary_there(keys, CHUNKS)
    hit = rig.finder.lookup(keys)
    assert hit.chunks == CHUNKS
    rig.there.clear()
    if left:
        rig.have_boundary_there(keys, left)
    asked: list[int] = []

    def call(request: Any, answer: Any, *_: float) -> Any:
        if not isinstance(request, m.Acquire):
            return rig._call(request, answer)
        asked.append(request.chunks)
        is_given = request.chunks == left and len(asked) > 1
        rows = len(KeyColumn(request.keys))
        words, tiers = bytes(8 * rows), bytes([Level.PEER] * rows)
        return m.Leased(1, left, words, words, tiers, words) if is_given else NO_LEASE

    rig.session.call, rig.session.is_alive, rig.session.drop_leases = call, True, lambda _: None
    fetcher = LeaseFetcher(
        Namespace("m", rig.layout, "/s"),
        rig.link,
        Counters(),
        finder=rig.finder,
        estimate_s=lambda _: 0.0,
        timeout_s=1.0,
    )
    with fetcher.acquire(hit) as lease:
        assert lease.chunks == left
        assert set(lease.tiers.tolist()) <= {Level.DRAM, Level.STORE}
    assert asked == ([CHUNKS, left] if left else [CHUNKS])
