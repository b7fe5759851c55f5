"""Leases that name slots outside the arena, as a faulty daemon might grant: a load of one is a miss and touches nothing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.protocol.records import messages as m
from kvpool.states import PEER
from kvpool_client.connection.session import Session
from tests.rigs.daemon import Daemon
from tests.rigs.payload import store, tokens_of

CHUNKS = 3
FORGED: dict[str, Callable[[m.Leased], dict[str, Any]]] = {
    "number beyond the region": lambda leased: {"slots": _changed(leased.slots, 1, (1 << 32) - 2)},
    "another region": lambda leased: {"slots": _changed(leased.slots, 1, 1 << 32)},
    "no slot": lambda leased: {"slots": _changed(leased.slots, 0, (1 << 64) - 1)},
    "too few slots": lambda leased: {"slots": leased.slots[:-8]},
    "no slots": lambda _: {"slots": b""},
    "half a slot": lambda leased: {"slots": leased.slots[:-3]},
    "an offset beyond the arena": lambda leased: {"offsets": _changed(leased.offsets, 2, 1 << 50)},
    "too few generations": lambda leased: {"generations": leased.generations[:-8]},
}

MISCOUNTED: dict[str, Callable[[m.Leased], dict[str, Any]]] = {
    "too few levels": lambda leased: {"tiers": leased.tiers[:-1]},
    "too few levels, of another node": lambda _: {"tiers": bytes([PEER])},
    "too many levels, of another node": lambda leased: {"tiers": leased.tiers + bytes([PEER])},
    "no levels": lambda _: {"tiers": b""},
    "more chunks than asked for": lambda leased: {"chunks": leased.chunks + 1},
    "fewer chunks than rows": lambda leased: {"chunks": leased.chunks - 1},
    "chunks without end": lambda _: {"chunks": 1 << 40},
}


def _changed(column: bytes, place: int, value: int) -> bytes:
    words = np.frombuffer(column, "<u8").copy()
    words[place] = value
    return words.tobytes()


def _forge(monkeypatch: pytest.MonkeyPatch, fields: Callable[[m.Leased], dict[str, Any]]) -> None:
    call = Session.call

    def forge(self: Session, *arguments: Any, **named: Any) -> Any:
        answer = call(self, *arguments, **named)
        return dataclasses.replace(answer, **fields(answer)) if isinstance(answer, m.Leased) else answer

    monkeypatch.setattr(Session, "call", forge)


@pytest.mark.parametrize("kind", FORGED)
def test_a_lease_of_slots_outside_the_arena_is_a_miss(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with shared_daemon.connect() as pool:
        keys = pool.keys(tokens_of(77, CHUNKS * pool.layout.chunk_tokens))
        assert store(pool, keys).stored + pool.lookup(keys).chunks >= CHUNKS
        _forge(monkeypatch, FORGED[kind])
        into = np.full((CHUNKS, pool.layout.chunk_bytes), 0xA5, np.uint8)
        with pool.acquire(pool.lookup(keys)) as lease:
            load = pool.load(lease, into=into)
            result = load.wait()
        assert (result.chunks, result.reason) == (0, "gone")
        assert np.all(into == 0xA5)
        monkeypatch.undo()
        with pool.acquire(pool.lookup(keys)) as lease:
            assert pool.load(lease, into=into).wait().chunks == CHUNKS


@pytest.mark.parametrize("kind", MISCOUNTED)
def test_a_lease_with_another_number_of_chunks_than_rows_is_none(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with shared_daemon.connect() as pool:
        keys = pool.keys(tokens_of(77, CHUNKS * pool.layout.chunk_tokens))
        assert store(pool, keys).stored + pool.lookup(keys).chunks >= CHUNKS
        _forge(monkeypatch, MISCOUNTED[kind])
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == 0
        assert pool.stats()["failed_requests"] == 1
        monkeypatch.undo()
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == CHUNKS
