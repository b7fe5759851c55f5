"""Requests about parts of chunks that the client library would never send: refused by name, and nothing is reserved."""

from dataclasses import replace

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import staging as sm
from kvpool.types import SaveState
from tests.hostile.rigs.raw_clients import engine, keys_of
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.dropping import drop_reservations
from tests.rigs.reserve_requests import reserve_share

LAYOUT = kv.Layout(layers=2, kv_heads=4, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=4)
SUMMARIZED = kv.Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=32, summaries="mean")
KEY = keys_of(1, 1)
LEFT = (0, 2, 0, 2)
WRONG_SHARES = {
    "a layer behind the last": (1, 2, 0, 4),
    "a group behind the last": (0, 2, 3, 2),
    "far behind the last": ((1 << 32) - 1, 1, 0, 1),
    "no layer": (0, 0, 0, 1),
    "no group": (0, 1, 0, 0),
    "more than there are": (0, 1 << 31, 0, 1 << 31),
}
WRONG_KEYS = {
    "no keys": (b"", b"", b"", b""),
    "half a key": (b"", KEY[:-1], b"", b""),
    "half a parent": (KEY[:-1], KEY, b"", b""),
    "a retention of more": (b"", KEY, bytes(2), bytes(8)),
    "more keys than a part may have": (b"", keys_of(1, m.SHARE_KEYS_MAX + 1), b"", b""),
    "a priority above the last": (b"", KEY, b"\xc8", bytes(4)),
}


def _is_sound(daemon: Daemon) -> None:
    def holds() -> tuple[int, int]:
        stats = daemon.stats()
        return stats["reservations"], stats["joint_chunks"]

    wait_until(lambda: holds() == (0, 0), "nothing is reserved once its connection has ended")
    assert daemon.problems() == []


@pytest.mark.parametrize("name", WRONG_SHARES)
def test_a_share_that_the_layout_does_not_have_is_refused(shared_daemon: Daemon, name: str) -> None:
    with engine(shared_daemon, LAYOUT) as bad, pytest.raises(Refused, match="share is"):
        bad.call(reserve_share(*WRONG_SHARES[name], b"", KEY, b"", b""), m.Reserved)
    _is_sound(shared_daemon)


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_columns_that_do_not_fit_end_the_connection(shared_daemon: Daemon, name: str) -> None:
    with engine(shared_daemon, LAYOUT) as bad:
        with pytest.raises(Refused) as refused:
            bad.call(reserve_share(*LEFT, *WRONG_KEYS[name]), m.Reserved)
        assert refused.value.code == "protocol"
    _is_sound(shared_daemon)


@pytest.mark.parametrize("layout", [SUMMARIZED, replace(LAYOUT, rank=None)], ids=["summaries", "no rank"])
def test_layouts_without_parts_are_refused(shared_daemon: Daemon, layout: kv.Layout) -> None:
    with engine(shared_daemon, layout) as bad, pytest.raises(Refused):
        bad.call(reserve_share(0, 1, 0, 1, b"", KEY, b"", b""), m.Reserved)
    _is_sound(shared_daemon)


@pytest.mark.parametrize("sums", [0, 3, 5, 8, 12])
def test_a_commit_of_other_extents_than_were_reserved_ends_the_connection(shared_daemon: Daemon, sums: int) -> None:
    with engine(shared_daemon, LAYOUT) as bad:
        made = bad.call(reserve_share(*LEFT, b"", keys_of(2, 1), b"", b""), m.Reserved)
        assert made.states == bytes([SaveState.RESERVED])
        with pytest.raises(Refused) as refused:
            bad.call(m.Commit(made.reservation, bytes(4 * sums), b""), m.Committed)
        assert refused.value.code == "protocol"
    wait_until(lambda: shared_daemon.stats()["reservations"] == 0, "the reservation ends with its connection")
    _is_sound(shared_daemon)


def test_nobody_commits_or_ends_the_part_of_another_connection(daemon: Daemon) -> None:
    with engine(daemon, LAYOUT) as owner, engine(daemon, LAYOUT) as bad:
        made = owner.call(reserve_share(*LEFT, b"", KEY, b"", b""), m.Reserved)
        for number in (made.reservation, made.reservation + 1, 1, (1 << 63) - 1):
            answer = bad.call(m.Commit(number, bytes(4 * LAYOUT.extents), b""), m.Committed)
            assert answer.states == b""
        drop_reservations(bad, made.reservation)
        assert bad.call(reserve_share(*LEFT, b"", KEY, b"", b""), m.Reserved).states == bytes([SaveState.PENDING])
        answer = owner.call(m.Commit(made.reservation, bytes(16), b""), m.Committed)
        assert answer.states == bytes([SaveState.PART])
        again = owner.call(reserve_share(*LEFT, b"", KEY, b"", b""), m.Reserved)
        assert (again.states, again.reservation) == (bytes([SaveState.PART]), 0)


def test_checksums_that_are_wrong_are_found_by_whoever_loads(daemon: Daemon) -> None:
    """In place the daemon publishes what the writers have announced: a load compares it."""
    with engine(daemon, LAYOUT) as liar, daemon.connect(layout=LAYOUT) as reader:
        keys = reader.keys(np.arange(32, dtype=np.int32))
        for part in (LEFT, (0, 2, 2, 2)):
            made = liar.call(reserve_share(*part, b"", keys.columns()[0], b"", b""), m.Reserved)
            sums = np.full(4, 12345, "<u4").tobytes()
            liar.call(m.Commit(made.reservation, sums, b""), m.Committed)
        with reader.acquire(reader.lookup(keys)) as lease:
            assert lease.chunks == 1
            into = np.zeros((1, LAYOUT.chunk_bytes), np.uint8)
            assert reader.load(lease, into=into).wait() == kv.LoadResult(0, 0, "checksum")


def test_layers_of_a_part_are_followed_by_nobody_and_in_place_is_not_copied(daemon: Daemon) -> None:
    with engine(daemon, LAYOUT) as bad:
        made = bad.call(reserve_share(*LEFT, b"", KEY, b"", b""), m.Reserved)
        with pytest.raises(Refused, match="staging"):
            bad.call(sm.CopyStaged(made.reservation, 0, 1, 0, 1, 0), m.Done)
        bad.notify(m.encode(one_way.LandSaved(made.reservation, 0, bytes(4)), 0))
        bad.notify(m.encode(one_way.LandSaved(made.reservation, -1, b"x"), 0))
        answer = bad.call(m.Commit(made.reservation, bytes(16), b""), m.Committed)
        assert answer.states == bytes([SaveState.PART])


@pytest.mark.parametrize("claims", [-1, 1025, 1 << 62])
def test_a_ticket_for_too_many_claims_is_refused(shared_daemon: Daemon, claims: int) -> None:
    with engine(shared_daemon, SMALL) as bad, pytest.raises(Refused, match="claims is"):
        bad.call(m.IssueTicket(1, claims), m.Ticket)
    _is_sound(shared_daemon)
