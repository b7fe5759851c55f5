"""Requests about groups that the client library would never send: refused by name, and nothing is held or reserved."""

from collections.abc import Callable

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import seeking as sk
from kvpool.protocol.reserve_runs import ReserveRun, RunForm, pack_runs, reserve_chain
from kvpool.types import KEY_BYTES, SaveState
from tests.hostile.rigs.raw_clients import engine, keys_of
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.layouts import CHUNK, FULL, HYBRID, STATE, WINDOW
from tests.rigs.reserve_requests import reserve_alone, reserve_share

KEY = keys_of(1, 1)
PART = (0, 1, 0, 1)
COUNTS = np.ones(3, "<u4").tobytes()
WIDE = kv.Layout(
    chunk_tokens=CHUNK,
    groups=(HYBRID.groups[FULL], kv.Group(kind="window", window=1 << 30, layers=1, kv_heads=1, head_dim=8)),
)
RUN_OF_FORM_3 = np.array([FULL, 3, 1, 0, 0, 0, 0], "<u4").tobytes()
ENDING: dict[str, object] = {
    "no chunks": m.Acquire(b"", 0),
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
    "runs of more chunks than keys": m.Reserve(pack_runs([ReserveRun(FULL, RunForm.ROOT, 1)] * 2), KEY),
    "a parent and no chunk": m.Reserve(pack_runs([ReserveRun(FULL, RunForm.BEHIND, 1)]), KEY),
    "too many runs": m.Reserve(pack_runs([ReserveRun(STATE, RunForm.ALONE, 1)] * 257), keys_of(1, 257)),
    "more chunks than a frame has": m.Reserve(pack_runs([ReserveRun(FULL, RunForm.ROOT, (1 << 32) - 1)] * 2), KEY),
    "an announcement of no chunks": m.Announce(b"", 0),
    "an announcement without their number": m.Announce(keys_of(1, 3)),
    "an announcement of more chunks than keys": m.Announce(keys_of(1, 5), 3),
    "an announcement of keys that are not whole": m.Announce(keys_of(1, 6)[:-1], 3),
    "a demote hint about one group alone": m.Demote(keys_of(1, 4), 0),
    "a demote hint from behind its chunks on": m.Demote(keys_of(1, 3), 1),
    "a demote hint from before its chunks on": m.Demote(keys_of(1, 3), -1),
}
INVALID_QUESTIONS: dict[str, object] = {
    "no keys": sk.Seek(bytes(12), b"", 0.1),
    "fewer keys than it counts": sk.Seek(COUNTS, keys_of(1, 2), 0.1),
    "more keys than it counts": sk.Seek(COUNTS, keys_of(1, 4), 0.1),
    "one group": sk.Seek(COUNTS[:4], KEY, 0.1),
    "too many keys": sk.Seek(bytes([0, 0, 0, 255, *bytes(8)]), KEY, 0.1),
}


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Daemon:
    """One for the module: nothing of a test stays."""
    return shared_daemon


@pytest.fixture
def sound(daemon: Daemon) -> Callable[[], None]:
    def holds() -> tuple[int, int]:
        stats = daemon.stats()
        return stats["leases"], stats["reservations"]

    def check() -> None:
        wait_until(lambda: holds() == (0, 0), "nothing is held or reserved once its connection has ended")
        assert daemon.problems() == []

    return check


def test_a_hello_with_the_layout_of_one_group_is_refused(daemon: Daemon, sound: Callable[[], None]) -> None:
    with pytest.raises(Refused, match="that of one group"), engine(daemon, HYBRID.of_group(WINDOW)):
        pass
    sound()


@pytest.mark.parametrize("name", ENDING)
def test_an_invalid_request_ends_its_connection(daemon: Daemon, sound: Callable[[], None], name: str) -> None:
    with engine(daemon, HYBRID) as bad:
        with pytest.raises(Refused) as refused:
            bad.call(ENDING[name], m.Done)
        assert refused.value.code == "protocol"
    sound()


def test_a_group_that_a_layout_does_not_have_is_refused(daemon: Daemon, sound: Callable[[], None]) -> None:
    with engine(daemon) as bad, pytest.raises(Refused, match="group is 1, this connection's layout has none"):
        bad.call(reserve_alone(1, KEY), m.Done)
    sound()


@pytest.mark.parametrize("name", INVALID_QUESTIONS)
def test_an_invalid_question_about_a_shared_store_is_refused(
    daemon: Daemon, sound: Callable[[], None], name: str
) -> None:
    with engine(daemon, HYBRID) as bad, pytest.raises(Refused, match="column"):
        bad.call(INVALID_QUESTIONS[name], sk.Sought)
    sound()


def test_a_question_about_a_shared_store_finds_nothing_where_there_is_none(
    daemon: Daemon, sound: Callable[[], None]
) -> None:
    with engine(daemon, HYBRID) as asking:
        for timeout_s in (0.1, 0.0, -1.0, float("nan"), float("inf")):
            answer = asking.call(sk.Seek(COUNTS, keys_of(1, 3), timeout_s), sk.Sought)
            assert answer.there == bytes(3)
    sound()


def test_a_commit_has_the_checksums_of_the_runs_that_are_reserved(daemon: Daemon, sound: Callable[[], None]) -> None:
    """Extents of another group's size would be published as whole chunks."""
    runs = [ReserveRun(STATE, RunForm.ALONE, 1), ReserveRun(WINDOW, RunForm.ALONE, 1)]
    rows = [4 * HYBRID.of_group(group).extents for group in (STATE, WINDOW)]
    for size in (rows[0] - 4, rows[0] + 4, sum(rows) + 4, sum(rows) - 4):
        with engine(daemon, HYBRID) as bad:
            made = bad.call(m.Reserve(pack_runs(runs), keys_of(1, 2)), m.Reserved)
            assert made.states == bytes([SaveState.RESERVED]) * 2
            with pytest.raises(Refused, match=f"checksums have {size} bytes"):
                bad.call(m.Commit(made.reservation, bytes(size), b""), m.Committed)
        sound()


def test_a_lease_of_more_windows_than_a_turn_can_grant_is_refused(daemon: Daemon, sound: Callable[[], None]) -> None:
    with engine(daemon, WIDE) as greedy:
        with pytest.raises(Refused, match="5001 holds, at most 4096") as refused:
            greedy.call(m.Acquire(keys_of(1, 10_000), 5000), m.Leased)
        assert refused.value.code == "full"
        assert greedy.call(m.Acquire(keys_of(1, 2), 1), m.Leased).lease == 0
        assert greedy.call(m.Announce(keys_of(1, 10_000), 5000), m.Announced) == m.Announced(0, 5000)
        assert greedy.call(m.Announce(keys_of(1, 2), 1), m.Announced) == m.Announced(0, 0), "nothing is stored"
    sound()
