"""The worked examples of TensorRT-LLM's post on KV cache reuse, over the real directory with a clock of the test's own."""

import os
import random
import struct
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.clock import MonotonicClock
from kvpool.ids import KEY_BYTES, ConnectionId, NamespaceId, SizeClassId
from kvpool.index.namespaces import Namespace
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.writers.commit_columns import CommitColumns
from kvpool.pool.writers.retention import Retention, RetentionColumns, keep
from kvpool.pool.writers.writers import Writers
from kvpool.states import RetainState, SaveState
from kvpool.tiering.tiering import Tiering
from kvpool_client.retention import plan_retention
from kvpool_native import Directory, DirectoryGeometry, IndexView, Mapping
from kvpool_tools.sim.pool import SimulatedArena

LAYOUT = kv.Layout(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=16)
S = 10**9


class Store:
    """A directory of a few chunks under a session's writer."""

    def __init__(self, chunks: int, share: float = 0.3) -> None:
        geometry = DirectoryGeometry.plan(chunks * LAYOUT.chunk_bytes, 1 << 20, 1000)
        index = Mapping.create("index", geometry.index_bytes)
        self._arena = Mapping.create("arena", geometry.arena_bytes)
        self.directory = Directory(self._arena, index, geometry, os.urandom(16))
        self.directory.cap_retained(share)
        self._view = IndexView(Mapping.attach(index.fd, index.size, writable=False))
        number = NamespaceId(self.directory.add_namespace())
        size_class = SizeClassId(self.directory.add_class(LAYOUT.chunk_bytes, LAYOUT.layers))
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        namespace = Namespace(number, size_class, "m", LAYOUT)
        self.session = EngineSession(ConnectionId(1), LAYOUT, "m", {0: namespace})
        self.retention = Retention(self.directory, Tiering(SimulatedArena(self.directory, 0, 0), [], MonotonicClock()))
        self._writers = Writers(self.directory, self.retention, ttl_ns=3600 * S, reservations_max=64)
        self.now = 1000 * S

    def save(self, keys: bytes, **retention: Any) -> bytes:
        """Save a prompt; how each chunk's retention ended."""
        self.now += 1
        chunks = len(keys) // KEY_BYTES
        planned = plan_retention(retention.pop("retention", ()), chunks=chunks, chunk_tokens=16, **retention)
        places = self._writers.reserve(
            self.session,
            b"",
            KeyColumn(keys),
            self.now,
            may_wait=False,
            wanted=RetentionColumns(*planned.columns(0, chunks)),
        )
        assert places is not None
        reserved = places.states.count(SaveState.RESERVED)
        if reserved:
            sums = struct.pack(f"<{reserved * LAYOUT.layers}I", *range(reserved * LAYOUT.layers))
            assert set(self._writers.commit_all(self.session, places.reservation, CommitColumns(sums), self.now)) == {
                SaveState.STORED
            }
        assert self.directory.verify() == []
        return places.retained

    def press(self, chunks: int) -> None:
        """Save prompts of one chunk each."""
        for _ in range(chunks):
            self.save(prompt(1))

    def found(self, keys: bytes) -> int:
        return len(self._view.lookup(keys))


def prompt(chunks: int) -> bytes:
    return b"".join(random.randbytes(KEY_BYTES) for _ in range(chunks))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(20261121)


def test_a_one_off_request_is_evicted_before_everything_else() -> None:
    store = Store(20)
    older, one_off = prompt(8), prompt(10)
    store.save(older)
    store.save(one_off, retention=[kv.TokenRange(0, None, 0)], prompt_tokens=100, decode_priority=0)
    store.press(12)
    assert (store.found(older), store.found(one_off)) == (8, 0)


def test_a_system_prompt_of_1000_tokens_outlives_all_traffic() -> None:
    store = Store(220)
    system = prompt(70)
    retained = store.save(system, retention=[kv.TokenRange(0, 1000, 100)])
    assert retained == bytes([RetainState.ACCEPTED]) * 70
    store.press(1000)
    assert store.found(system) == 63  # 1000 tokens touch 63 chunks
    assert store.directory.retention(system[:KEY_BYTES]) == (100, 0)


def test_context_expires_after_30_s_and_decoded_tokens_after_10() -> None:
    store = Store(40)
    retention = {"prompt_tokens": 6 * 16, "decode_priority": 80, "decode_duration_s": 10.0}
    request = prompt(10)
    store.save(request, retention=[kv.TokenRange(0, None, 80, 30.0)], **retention)
    store.press(60)
    assert store.found(request) == 10
    store.now += 12 * S
    store.press(60)
    assert store.found(request) == 6, "the decoded chunks have expired"
    store.now += 12 * S
    store.press(60)
    assert store.found(request) == 6
    store.now += 12 * S
    store.press(60)
    assert store.found(request) == 0


def test_the_duration_counts_from_the_last_reuse() -> None:
    store = Store(40)
    request = prompt(4)
    store.save(request, retention=[kv.TokenRange(0, None, 80, 30.0)])
    for _ in range(4):
        store.now += 20 * S
        held = store.directory.acquire(store.session.own.id, request, store.now)
        assert held.chunks == 4
        store.directory.release(held.id, store.now)
        store.press(60)
        assert store.found(request) == 4
    store.now += 40 * S
    store.press(60)
    assert store.found(request) == 0


def test_chunks_without_a_new_priority_keep_theirs() -> None:
    store = Store(40)
    keys = prompt(4)
    store.save(keys, retention=[kv.TokenRange(0, None, 60)])
    states = keep(
        store.directory,
        NamespaceId(0),
        KeyColumn(keys),
        RetentionColumns(bytes([255, 10, 255, 70]), bytes(16)),
        now_ns=store.now,
    )
    assert states == bytes(4)
    kept = [store.directory.retention(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
    assert kept == [(60, 0), (10, 0), (60, 0), (70, 0)]


def test_chunks_that_were_declined_are_absent_from_the_answer() -> None:
    store = Store(4, share=1.0)
    retained = store.save(prompt(6), retention=[kv.TokenRange(0, None, 60)])
    assert retained == bytes([0, 0, 0, 0, 2, 2])
