"""Requests that the client library would never send: refused by name, and nothing is held or reserved."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.ids import KEY_BYTES
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import seeking as sk
from kvpool.protocol.records import staging as sm
from kvpool.protocol.reserve_runs import ReserveRun, RunForm, pack_runs, reserve_chain
from kvpool.states import SaveState
from tests.hostile.rigs.raw_clients import engine, key_of, keys_of
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.layouts import CHUNK, FULL, HYBRID, STATE, WINDOW
from tests.rigs.reserve_requests import reserve_alone, reserve_share

KEY = keys_of(1, 1)
TOO_MANY = m.RETAIN_KEYS_MAX + 1
PART, LEFT = (0, 1, 0, 1), (0, 2, 0, 2)
COUNTS = np.ones(3, "<u4").tobytes()
SHARED = kv.Layout(layers=2, kv_heads=4, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=4)
SUMMARIZED = kv.Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=32, summaries="mean")
WIDE = kv.Layout(
    chunk_tokens=CHUNK,
    groups=(HYBRID.groups[FULL], kv.Group(kind="window", window=1 << 30, layers=1, kv_heads=1, head_dim=8)),
)
RUN_OF_FORM_3 = np.array([FULL, 3, 1, 0, 0, 0, 0], "<u4").tobytes()
OF_PLAIN: dict[str, object] = {
    "no keys": m.Acquire(b""),
    "half a key": m.Acquire(b"k" * 31),
    "too many keys": m.Acquire(b"k" * 32 * (m.KEYS_MAX + 1)),
    "half a parent": reserve_chain(b"p" * 31, key_of(1)),
    "a save of no keys": reserve_chain(b"", b""),
    "checksums of nothing": m.Commit(1, b"", b""),
    "half a checksum": m.Commit(1, b"s" * 13, b""),
    "half a lease": m.Renew(b"l" * 7),
    "too many leases to renew": m.Renew(b"l" * 8 * (m.RENEWALS_MAX + 1)),
    "half a lease to drop": one_way.DropLeases(b"l" * 7),
    "too many leases to drop": one_way.DropLeases(b"l" * 8 * (m.RENEWALS_MAX + 1)),
    "half a reservation": one_way.DropReservations(b"r" * 9),
    "too many reservations to drop": one_way.DropReservations(b"r" * 8 * (m.RENEWALS_MAX + 1)),
    "a priority without a duration": reserve_chain(b"", key_of(1), b"\x64", b""),
    "a duration without a priority": reserve_chain(b"", key_of(1), b"", bytes(4)),
    "a priority above the last": reserve_chain(b"", key_of(1), b"\x65", bytes(4)),
    "a retention of fewer": reserve_chain(b"", keys_of(0, 2), b"\x64", bytes(4)),
    "a retention of no keys": m.Retain(b"", b"", b""),
    "no priorities": m.Retain(key_of(1), b"", b""),
    "a priority far above the last": m.Retain(key_of(1), b"\xfe", bytes(4)),
    "half a duration": m.Retain(key_of(1), b"\x64", bytes(3)),
    "too many keys to retain": m.Retain(
        keys_of(0, m.RETAIN_KEYS_MAX + 1), bytes(m.RETAIN_KEYS_MAX + 1), bytes(4 * (m.RETAIN_KEYS_MAX + 1))
    ),
    "an announcement of no keys": m.Announce(b""),
    "an announcement of half a key": m.Announce(b"k" * 33),
    "a demote hint about no keys": m.Demote(b"", 0),
    "a demote hint from behind its keys on": m.Demote(key_of(1), 1),
    "a demote hint from before its keys on": m.Demote(key_of(1), -1),
    "a demote hint about too many keys": m.Demote(keys_of(0, TOO_MANY), 0),
    "a group that the layout has not": reserve_alone(1, KEY),
    "a set of no keys": m.Acquire(b"", set_of=1),
    "a set of half a key": m.Acquire(KEY[:-1], set_of=1),
    "a set of too many keys": m.Acquire(keys_of(0, m.SET_KEYS_MAX + 1), set_of=1),
    "a set of a group that the layout has not": m.Acquire(KEY, set_of=2),
    "a set of a group before the first": m.Acquire(KEY, set_of=-1),
    "a set of the last group that a number names": m.Acquire(KEY, set_of=(1 << 63) - 1),
    "a set of a hit": m.Acquire(KEY, 1, set_of=1),
    "a set of a node": m.Acquire(KEY, 0, "node", 1),
    "a save of a set of too many keys": reserve_alone(0, keys_of(0, m.SET_KEYS_MAX + 1)),
}
TWO_OF_A_GROUP = m.Reserve(pack_runs([ReserveRun(FULL, RunForm.ROOT, 1)] * 2), keys_of(1, 2))
OF_SHARES: dict[str, object] = {
    "a part: no keys": reserve_share(*LEFT, b"", b""),
    "a part: half a key": reserve_share(*LEFT, b"", KEY[:-1]),
    "a part: half a parent": reserve_share(*LEFT, KEY[:-1], KEY),
    "a part: a retention of more": reserve_share(*LEFT, b"", KEY, bytes(2), bytes(8)),
    "a part: more keys than a part may have": reserve_share(*LEFT, b"", keys_of(1, m.SHARE_KEYS_MAX + 1)),
    "a part: a priority above the last": reserve_share(*LEFT, b"", KEY, b"\xc8", bytes(4)),
}
OF_GROUPS: dict[str, object] = {
    "no chunks": m.Acquire(b"", 0),
    "a set of a group behind the last": m.Acquire(KEY, set_of=4),
    "a set of a window of half a key": m.Acquire(KEY[:-1], set_of=2),
    "no number of chunks": m.Acquire(keys_of(1, 3)),
    "leaves for an owner": m.Acquire(keys_of(1, 4), 3, "node"),
    "fewer than no chunks": m.Acquire(KEY, -1),
    "more chunks than keys": m.Acquire(keys_of(1, 5), 3),
    "keys behind the last": m.Acquire(keys_of(1, 7), 3),
    "keys that are not whole": m.Acquire(keys_of(1, 6)[:-1], 3),
    "too many chunks": m.Acquire(b"", 1 << 40),
    "a group behind the last": reserve_alone(3, KEY),
    "a window with a parent": reserve_chain(bytes(KEY_BYTES), KEY, group=WINDOW),
    "a chain of states": reserve_chain(b"", keys_of(1, 2), group=STATE),
    "no keys": reserve_chain(b"", b""),
    "a part of a group behind the last": reserve_alone(3, KEY, kv.Share(*PART)),
    "a part of a window with a parent": reserve_share(*PART, bytes(KEY_BYTES), KEY, group=WINDOW),
    "a part of a chain of states": reserve_share(*PART, b"", keys_of(1, 2), group=STATE),
    "a part of no keys": reserve_share(*PART, b"", b""),
    "a part of too many keys": reserve_share(*PART, b"", keys_of(1, m.SHARE_KEYS_MAX + 1)),
    "no runs": m.Reserve(b"", KEY),
    "half a run": m.Reserve(pack_runs([ReserveRun(FULL, RunForm.ROOT, 1)])[:-1], KEY),
    "a run of another form": m.Reserve(RUN_OF_FORM_3, KEY),
    "runs of more chunks than keys": m.Reserve(pack_runs([ReserveRun(FULL, RunForm.ROOT, 2)]), KEY),
    "a parent and no chunk": m.Reserve(pack_runs([ReserveRun(FULL, RunForm.BEHIND, 1)]), KEY),
    "too many runs": m.Reserve(pack_runs([ReserveRun(at, RunForm.ALONE, 1) for at in range(65)]), keys_of(1, 65)),
    "more chunks than a frame has": m.Reserve(pack_runs([ReserveRun(FULL, RunForm.ROOT, (1 << 32) - 1)]), KEY),
    "an announcement of no chunks": m.Announce(b"", 0),
    "an announcement without their number": m.Announce(keys_of(1, 3)),
    "an announcement of more chunks than keys": m.Announce(keys_of(1, 5), 3),
    "an announcement of keys that are not whole": m.Announce(keys_of(1, 6)[:-1], 3),
    "a demote hint about one group alone": m.Demote(keys_of(1, 4), 0),
    "a demote hint from behind its chunks on": m.Demote(keys_of(1, 3), 1),
    "a demote hint from before its chunks on": m.Demote(keys_of(1, 3), -1),
}
REFUSED: dict[str, tuple[kv.Layout, object, str]] = {
    **{f"plain, {name}": (SMALL, request, "^protocol") for name, request in OF_PLAIN.items()},
    **{f"shares, {name}": (SHARED, request, "^protocol") for name, request in OF_SHARES.items()},
    **{f"groups, {name}": (HYBRID, request, "^protocol") for name, request in OF_GROUPS.items()},
    "two runs of a group": (HYBRID, TWO_OF_A_GROUP, "2 runs name a group twice, expected one run of each at most"),
    "fewer claims than none": (SMALL, m.IssueTicket(1, -1), "claims is"),
    "too many claims": (SMALL, m.IssueTicket(1, 1025), "claims is"),
    "claims without end": (SMALL, m.IssueTicket(1, 1 << 62), "claims is"),
    "a share: a layer behind the last": (SHARED, reserve_share(1, 2, 0, 4, b"", KEY), "share is"),
    "a share: a group behind the last": (SHARED, reserve_share(0, 2, 3, 2, b"", KEY), "share is"),
    "a share: far behind the last": (SHARED, reserve_share((1 << 32) - 1, 1, 0, 1, b"", KEY), "share is"),
    "a share: no layer": (SHARED, reserve_share(0, 0, 0, 1, b"", KEY), "share is"),
    "a share: no group": (SHARED, reserve_share(0, 1, 0, 0, b"", KEY), "share is"),
    "a share: more than there are": (SHARED, reserve_share(0, 1 << 31, 0, 1 << 31, b"", KEY), "share is"),
    "a question of a store: no keys": (HYBRID, sk.Seek(bytes(12), b"", 0.1), "column"),
    "a question of a store: fewer keys than it counts": (HYBRID, sk.Seek(COUNTS, keys_of(1, 2), 0.1), "column"),
    "a question of a store: more keys than it counts": (HYBRID, sk.Seek(COUNTS, keys_of(1, 4), 0.1), "column"),
    "a question of a store: one group": (HYBRID, sk.Seek(COUNTS[:4], KEY, 0.1), "column"),
    "a question of a store: too many keys": (HYBRID, sk.Seek(bytes([0, 0, 0, 255, *bytes(8)]), KEY, 0.1), "column"),
    "a part of summaries": (SUMMARIZED, reserve_share(*PART, b"", KEY), "summaries"),
    "a part of all ranks": (replace(SHARED, rank=None), reserve_share(*PART, b"", KEY), "^rank"),
}


@pytest.fixture
def sound(shared_daemon: Daemon) -> Callable[[], None]:
    def holds() -> tuple[int, ...]:
        stats = shared_daemon.stats()
        return stats["leases"], stats["reservations"], stats["joint_chunks"]

    def check() -> None:
        wait_until(lambda: holds() == (0, 0, 0), "nothing is held or reserved once its connection has ended")
        assert shared_daemon.problems() == []

    return check


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_request_is_refused_by_name(shared_daemon: Daemon, sound: Callable[[], None], name: str) -> None:
    layout, request, words = REFUSED[name]
    with engine(shared_daemon, layout) as bad, pytest.raises(Refused, match=words):
        bad.call(request, m.Done)
    sound()


def test_a_hello_with_the_layout_of_one_group_is_refused(shared_daemon: Daemon, sound: Callable[[], None]) -> None:
    with pytest.raises(Refused, match="that of one group"), engine(shared_daemon, HYBRID.of_group(WINDOW)):
        pass
    sound()


def test_a_question_about_a_shared_store_finds_nothing_where_there_is_none(
    shared_daemon: Daemon, sound: Callable[[], None]
) -> None:
    with engine(shared_daemon, HYBRID) as asking:
        for timeout_s in (0.1, 0.0, -1.0, float("nan"), float("inf")):
            answer = asking.call(sk.Seek(COUNTS, keys_of(1, 3), timeout_s), sk.Sought)
            assert answer.there == bytes(3)
    sound()


def test_a_commit_has_the_checksums_of_the_runs_that_are_reserved(
    shared_daemon: Daemon, sound: Callable[[], None]
) -> None:
    """Extents of another group's size would be published as whole chunks."""
    runs = [ReserveRun(STATE, RunForm.ALONE, 1), ReserveRun(WINDOW, RunForm.ALONE, 1)]
    rows = [4 * HYBRID.of_group(group).extents for group in (STATE, WINDOW)]
    for size in (rows[0] - 4, rows[0] + 4, sum(rows) + 4, sum(rows) - 4):
        with engine(shared_daemon, HYBRID) as bad:
            made = bad.call(m.Reserve(pack_runs(runs), keys_of(1, 2)), m.Reserved)
            assert made.states == bytes([SaveState.RESERVED]) * 2
            with pytest.raises(Refused, match=f"checksums have {size} bytes"):
                bad.call(m.Commit(made.reservation, bytes(size), b""), m.Committed)
        sound()


def test_a_lease_of_more_windows_than_a_turn_can_grant_is_refused(
    shared_daemon: Daemon, sound: Callable[[], None]
) -> None:
    with engine(shared_daemon, WIDE) as greedy:
        with pytest.raises(Refused, match="5001 holds, at most 4096") as refused:
            greedy.call(m.Acquire(keys_of(1, 10_000), 5000), m.Leased)
        assert refused.value.code == "full"
        assert greedy.call(m.Acquire(keys_of(1, 2), 1), m.Leased).lease == 0
        assert greedy.call(m.Announce(keys_of(1, 10_000), 5000), m.Announced) == m.Announced(0, 5000)
        assert greedy.call(m.Announce(keys_of(1, 2), 1), m.Announced) == m.Announced(0, 0), "nothing is stored"
    sound()


@pytest.mark.parametrize("sums", [0, 3, 5, 8, 12])
def test_a_commit_of_other_extents_than_were_reserved_ends_the_connection(
    shared_daemon: Daemon, sound: Callable[[], None], sums: int
) -> None:
    with engine(shared_daemon, SHARED) as bad:
        made = bad.call(reserve_share(*LEFT, b"", keys_of(2, 1), b"", b""), m.Reserved)
        assert made.states == bytes([SaveState.RESERVED])
        with pytest.raises(Refused) as refused:
            bad.call(m.Commit(made.reservation, bytes(4 * sums), b""), m.Committed)
        assert refused.value.code == "protocol"
    sound()


def test_checksums_that_are_wrong_are_found_by_whoever_loads(daemon: Daemon) -> None:
    """In place the daemon publishes what the writers have announced: a load compares it."""
    with engine(daemon, SHARED) as liar, daemon.connect(layout=SHARED) as reader:
        keys = reader.keys(np.arange(32, dtype=np.int32))
        for part in (LEFT, (0, 2, 2, 2)):
            made = liar.call(reserve_share(*part, b"", keys.columns()[0], b"", b""), m.Reserved)
            sums = np.full(4, 12345, "<u4").tobytes()
            liar.call(m.Commit(made.reservation, sums, b""), m.Committed)
        with reader.acquire(reader.lookup(keys)) as lease:
            assert lease.chunks == 1
            into = np.zeros((1, SHARED.chunk_bytes), np.uint8)
            assert reader.load(lease, into=into).wait() == kv.LoadResult(0, 0, "checksum")


def test_layers_of_a_part_are_followed_by_nobody_and_in_place_is_not_copied(daemon: Daemon) -> None:
    with engine(daemon, SHARED) as bad:
        made = bad.call(reserve_share(*LEFT, b"", KEY, b"", b""), m.Reserved)
        with pytest.raises(Refused, match="staging"):
            bad.call(sm.CopyStaged(made.reservation, 0, 1, 0, 1, 0), m.Done)
        bad.notify(m.encode(one_way.LandSaved(made.reservation, 0, bytes(4)), 0))
        bad.notify(m.encode(one_way.LandSaved(made.reservation, -1, b"x"), 0))
        answer = bad.call(m.Commit(made.reservation, bytes(16), b""), m.Committed)
        assert answer.states == bytes([SaveState.PART])
