"""Lookups where the daemon has a shared store: few, bounded questions for what shared memory lacks, none without need."""

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
from kvpool.states import Level
from kvpool_client.connection.counters import Counters
from kvpool_client.key_chain import KeyChain, Namespace
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.lease_fetcher import NO_LEASE, LeaseFetcher
from kvpool_client.verbs.store_search import ELSEWHERE_MAX, END_KEYS_MAX
from tests.model.test_group_lookup_model import Index
from tests.rigs.daemon import SMALL
from tests.rigs.layouts import CHUNK, FULL, HYBRID, STATE, WINDOW, WINDOW_CHUNKS

CHUNKS = 8
DRAM, PEER, STORE = Level.DRAM, Level.PEER, Level.STORE
BOTH = pytest.mark.parametrize("layout", [SMALL, HYBRID], ids=["plain", "hybrid"])
LATER_NS = 1_000_000_001


class Rig:
    """A finder over a session with chunks in shared memory and in the store."""

    def __init__(self, layout: Layout = HYBRID, *, has_store: bool = True, ranks: int = 1) -> None:
        self.layout = replace(layout, rank=None, world=ranks) if ranks > 1 else layout
        self.index: Any = Index()
        self.there: set[bytes] = set()
        self.asked: list[sk.Seek] = []
        self.answer: Any = None
        self.now_ns = 0
        self.session: Any = SimpleNamespace(
            index=self.index,
            welcome=SimpleNamespace(has_store=has_store, lease_ttl_s=30.0),
            has_peers=False,
            call=self._call,
            peer_pace=lambda *_: None,
        )
        self.failures: list[Exception] = []
        link: Any = SimpleNamespace(
            session=self.session,
            note_failure=lambda _, error: self.failures.append(error),
            connected_listeners=[],
        )
        self.link = link
        clock: Any = SimpleNamespace(now_ns=lambda: self.now_ns)
        self.finder = Finder(self.layout, link, Counters(), timeout_s=1.0, clock=clock)

    def keys(self, chunks: int = CHUNKS, seed: int = 0) -> KeyChain:
        parts = self.layout.parts
        roots = tuple(kvpool_native.blake3(part.fingerprint() + bytes([at, seed])) for at, part in enumerate(parts))
        chain = KeyChain(self.layout.chunk_tokens, lambda: roots)
        chain.extend(np.arange(chunks * self.layout.chunk_tokens, dtype=np.int32))
        return chain

    def have_here(self, keys: KeyChain, group: int, *chunks: int, level: Level = DRAM) -> None:
        self.index.levels |= {key: level for chunk in chunks for key in self._keys_of(keys, group, chunk)}

    def have_there(self, keys: KeyChain, group: int, *chunks: int) -> None:
        self.there |= {key for chunk in chunks for key in self._keys_of(keys, group, chunk)}

    def lose_there(self, keys: KeyChain, group: int, *chunks: int) -> None:
        self.there -= {key for chunk in chunks for key in self._keys_of(keys, group, chunk)}

    def have_boundary_there(self, keys: KeyChain, end: int) -> None:
        """All that a hit of this end needs."""
        for group, part in enumerate(self.layout.group_layouts):
            self.have_there(keys, group, *range(end - part.chunks_of(end), end))

    def _keys_of(self, keys: KeyChain, group: int, chunk: int) -> list[bytes]:
        """Of all ranks."""
        ranks = len(self.layout.parts) // len(self.layout.group_layouts)
        return [KeyColumn(column)[chunk] for column in keys.columns()[group * ranks : (group + 1) * ranks]]

    def _call(self, request: sk.Seek, _answer: type[sk.Sought]) -> sk.Sought:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or sk.Sought(bytes(key in self.there for key in KeyColumn(request.keys)), 1.0)


def counts_of(asked: sk.Seek) -> list[int]:
    counts: list[int] = np.frombuffer(asked.counts, "<u4").tolist()
    return counts


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("here", "there", "chunks"), [(0, 8, 8), (2, 6, 8), (2, 1, 3), (0, 0, 0)])
def test_the_store_continues_a_hit_on_all_ranks(here: int, there: int, chunks: int, ranks: int) -> None:
    rig = Rig(SMALL, ranks=ranks)
    keys = rig.keys()
    rig.have_here(keys, FULL, *range(here))
    rig.have_there(keys, FULL, *range(here, here + there))
    hit = rig.finder.lookup(keys)
    assert (hit.chunks, hit.chunks_here, hit.tokens) == (chunks, here, chunks * CHUNK)
    assert hit.tiers.tolist() == [DRAM] * here + [STORE] * (chunks - here)
    (asked,) = rig.asked
    assert asked.keys == b"".join(KeyColumn(column)[here:].packed for column in keys.columns())
    assert 0 < asked.timeout_s < 1.0


def test_full_chunks_are_sought_first_and_then_the_ends_before_theirs() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_here(keys, FULL, 0, 1)
    rig.have_boundary_there(keys, 6)
    hit = rig.finder.lookup(keys)
    assert (hit.chunks, hit.full_chunks) == (6, 6)
    assert hit.tiers.tolist() == [DRAM] * 2 + [STORE] * 4
    assert [counts_of(asked) for asked in rig.asked] == [[CHUNKS - 2, 0, 0], [0, 6, 6]]
    assert all(0 < asked.timeout_s <= 0.5 for asked in rig.asked)


def test_nothing_is_sought_behind_the_full_groups_end_nor_where_what_is_here_serves_the_last_one() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_boundary_there(keys, CHUNKS)
    rig.lose_there(keys, FULL, 0)
    assert rig.finder.lookup(keys).chunks == 0
    assert len(rig.asked) == 1
    rig = Rig()
    rig.have_there(keys, FULL, *range(CHUNKS))
    rig.have_here(keys, WINDOW, CHUNKS - 2, CHUNKS - 1)
    rig.have_here(keys, STATE, CHUNKS - 1)
    assert rig.finder.lookup(keys).chunks == CHUNKS
    assert len(rig.asked) == 1


@pytest.mark.parametrize("here", range(WINDOW_CHUNKS + 1))
def test_a_window_is_joined_from_both_and_one_that_is_there_in_half_is_no_end(here: int) -> None:
    rig = Rig()
    keys = rig.keys()
    for end in (3, CHUNKS):
        rig.have_boundary_there(keys, end)
    window = range(CHUNKS - WINDOW_CHUNKS, CHUNKS)
    rig.lose_there(keys, WINDOW, *window[:here])
    hit = rig.finder.lookup(keys)
    assert (hit.chunks, hit.full_chunks) == (3 if here else CHUNKS, CHUNKS)
    rig.now_ns = LATER_NS
    rig.have_here(keys, WINDOW, *window[:here])
    assert rig.finder.lookup(keys).chunks == CHUNKS


def test_a_chain_goes_on_with_other_nodes_chunks_and_then_with_the_stores() -> None:
    rig = Rig()
    keys = rig.keys()
    rig.have_boundary_there(keys, CHUNKS)
    rig.have_here(keys, FULL, 0)
    rig.have_here(keys, FULL, *range(1, 5), level=PEER)
    rig.lose_there(keys, FULL, *range(5))
    hit = rig.finder.lookup(keys)
    assert hit.chunks == CHUNKS
    assert hit.tiers[:6].tolist() == [DRAM] + [PEER] * 4 + [STORE]


@BOTH
def test_nobody_is_asked_without_need_or_without_a_store(layout: Layout) -> None:
    rig = Rig(layout)
    keys = rig.keys()
    for group in range(len(layout.group_layouts)):
        rig.have_here(keys, group, *range(4))
    assert rig.finder.lookup(keys, chunks_max=4).chunks == 4
    assert rig.finder.lookup(rig.keys(0)).chunks == 0
    assert rig.asked == []
    rig = Rig(layout, has_store=False)
    rig.have_boundary_there(keys, CHUNKS)
    assert rig.finder.lookup(keys).chunks == 0
    assert rig.asked == []


@pytest.mark.parametrize(("here", "owner"), [(6, ""), (1, ""), (1, "node-b")])
def test_a_hit_has_no_more_chunks_than_one_request_names_of_all_ranks(
    here: int, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "KEYS_MAX", 9)
    rig = Rig(SMALL, has_store=not owner, ranks=2)
    keys = rig.keys()
    rig.have_here(keys, FULL, *range(here))
    rig.have_there(keys, FULL, *range(CHUNKS))
    rig.session.has_peers = True
    hit = rig.finder.lookup(keys, owner)
    assert (hit.chunks, hit.tokens, len(hit.tiers)) == (4, 4 * CHUNK, 4)
    assert [len(KeyColumn(asked.keys)) for asked in rig.asked] == ([] if here == 6 or owner else [2 * 3])


@BOTH
def test_what_the_store_lacks_is_not_sought_again_for_a_while(layout: Layout) -> None:
    rig = Rig(layout)
    keys = rig.keys()
    rig.have_here(keys, FULL, *range(CHUNKS if layout.groups else 2))
    for _ in range(3):
        hit = rig.finder.lookup(keys)
        assert (hit.chunks, hit.full_chunks) == ((0, CHUNKS) if layout.groups else (2, 2))
    assert len(rig.asked) == 1
    rig.finder.lookup(rig.keys(seed=2))
    assert len(rig.asked) == 2
    rig.have_boundary_there(keys, CHUNKS)
    rig.now_ns = LATER_NS
    assert rig.finder.lookup(keys).chunks == CHUNKS


@BOTH
def test_where_the_store_ends_is_remembered_for_every_prompt_that_begins_so(layout: Layout) -> None:
    rig = Rig(layout)
    keys = rig.keys()
    rig.have_boundary_there(keys, 3)
    for chunks in (CHUNKS, CHUNKS - 1, CHUNKS + 1):
        assert rig.finder.lookup(rig.keys(chunks)).chunks == 3
    for group, part in enumerate(layout.group_layouts):
        rig.have_here(keys, group, *range(3 - part.chunks_of(3), 3))
    before = len(rig.asked)
    assert rig.finder.lookup(keys).chunks == 3, "what was found is here now"
    assert len(rig.asked) == before
    rig.have_here(keys, FULL, 3)
    assert rig.finder.lookup(keys).full_chunks == 4
    assert len(rig.asked) > before, "the full chunks go on now"


def test_what_is_behind_the_last_question_of_a_long_prompt_is_sought_with_the_next() -> None:
    rig, most = Rig(SMALL), sk.SEEK_KEYS_MAX
    keys = rig.keys(2 * most)
    rig.have_here(keys, FULL, 0, 1)
    rig.have_there(keys, FULL, *range(2 * most))
    assert rig.finder.lookup(keys).chunks == 2 + most
    rig.have_here(keys, FULL, *range(2 + most))
    assert rig.finder.lookup(keys).chunks == 2 * most
    assert len(rig.asked) == 2


@BOTH
@pytest.mark.parametrize(
    "answer", [DaemonUnreachable("away"), sk.Sought(b"", 1.0), sk.Sought(b"\1" * (CHUNKS + 1), 1.0)]
)
def test_a_daemon_that_answers_nothing_of_use_is_a_miss(layout: Layout, answer: Any) -> None:
    rig = Rig(layout)
    keys = rig.keys()
    rig.have_boundary_there(keys, CHUNKS)
    rig.answer = answer
    assert rig.finder.lookup(keys).chunks == 0
    assert len(rig.failures) == 1


def test_questions_about_long_prompts_are_bounded() -> None:
    """The last ends are sought, as many as the bound allows."""
    rig = Rig(ranks=2)
    keys = rig.keys(sk.SEEK_KEYS_MAX)
    rig.have_there(keys, FULL, *range(sk.SEEK_KEYS_MAX))
    assert rig.finder.lookup(keys).chunks == 0
    (full, ends) = (counts_of(asked) for asked in rig.asked)
    assert full == [sk.SEEK_KEYS_MAX // 2] * 2 + [0] * 4
    assert ends == [0, 0] + [END_KEYS_MAX // 4] * 4


def test_a_hit_of_too_many_windows_elsewhere_ends_earlier() -> None:
    windows = ELSEWHERE_MAX
    wide = replace(HYBRID.groups[WINDOW], window=windows * CHUNK)
    rig = Rig(replace(HYBRID, groups=(HYBRID.groups[FULL], wide, HYBRID.groups[STATE])))
    keys = rig.keys(2 * windows)
    for group in (FULL, WINDOW, STATE):
        rig.have_there(keys, group, *range(2 * windows))
    rig.have_here(keys, WINDOW, 4)
    assert rig.finder.lookup(keys).chunks == windows + 4, "one chunk of the window is here"


@pytest.mark.parametrize("left", [CHUNKS, 3, 0])
def test_a_lease_that_the_daemon_cannot_give_is_sought_once_more(left: int) -> None:
    """Its answer may be too old, or the store's chunks gone."""
    rig = Rig()
    keys = rig.keys()
    for end in (3, CHUNKS):
        rig.have_boundary_there(keys, end)
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
        words, tiers = bytes(8 * rows), bytes([PEER] * rows)
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
        assert set(lease.tiers.tolist()) <= {DRAM, STORE}
    assert asked == ([CHUNKS, left] if left else [CHUNKS])
