"""Lease size: smaller behind a lease that was late or left something out, larger behind any other, however long it took."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvpool.clock import NS_PER_S
from kvpool.layout import Layout
from kvpool_client.engines import lease_size
from kvpool_client.engines.lease_size import CHUNKS_AT_ONCE, LeaseSize, chunks_at_once
from kvpool_client.pool import Pool

NAMES = np.zeros((CHUNKS_AT_ONCE, 32), np.uint8)


class ScriptedPool:
    """Leases of all that is asked but `left_out`, each after `took_s` of a clock of its own."""

    layout = SimpleNamespace(chunk_bytes=1)

    def __init__(self) -> None:
        self.now_ns = 0
        self.took_s, self.left_out = 0.0, 0

    def acquire_set(self, names: Any) -> Any:
        self.now_ns += int(self.took_s * NS_PER_S)
        return SimpleNamespace(chunks=len(names) - self.left_out)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> ScriptedPool:
    """The same, and its clock in place of the machine's."""
    pool = ScriptedPool()
    monkeypatch.setattr(lease_size, "MonotonicClock", SimpleNamespace(now_ns=lambda: pool.now_ns))
    return pool


def _lease(pool: ScriptedPool, size: LeaseSize, *, took_s: float, left_out: int = 0) -> int:
    pool.took_s, pool.left_out = took_s, left_out
    size.acquire_set(NAMES[: size.count])
    return size.count


def test_leases_grow_again_where_time_does_not_depend_on_their_size(pool: ScriptedPool) -> None:
    size = LeaseSize(cast(Pool, pool), timeout_s=1.0)
    assert [_lease(pool, size, took_s=0.6) for _ in range(4)] == [16, 4, 1, 1]
    assert [_lease(pool, size, took_s=0.2) for _ in range(7)] == [2, 4, 8, 16, 32, 64, 64]


def test_a_lease_that_left_something_out_is_too_large(pool: ScriptedPool) -> None:
    size = LeaseSize(cast(Pool, pool), timeout_s=1.0)
    assert _lease(pool, size, took_s=0.0, left_out=1) == 16


@pytest.mark.parametrize(
    ("chunk_bytes", "most", "count"),
    [(1, 64, 64), (4 << 20, 64, 64), ((4 << 20) + 1, 64, 63), (4 << 20, 128, 64), (256 << 20, 64, 1), (1 << 30, 64, 1)],
)
def test_of_large_chunks_fewer_are_moved_in_one_request(chunk_bytes: int, most: int, count: int) -> None:
    layout = cast(Layout, SimpleNamespace(chunk_bytes=chunk_bytes))
    assert chunks_at_once(layout, most) == count
    pool = SimpleNamespace(layout=layout)
    assert LeaseSize(cast(Pool, pool), timeout_s=1.0).count == min(count, CHUNKS_AT_ONCE)
