"""A disk that fails in every way our file system can fail: DRAM serves on, the tier is suspended and comes back."""

import contextlib
import errno
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool.errors import DaemonUnreachable
from kvpool.tiers.ssd.corruption import REST_S
from tests.faults.rigs.batches import batches
from tests.faults.rigs.fault_filesystem import FaultFilesystem
from tests.faults.rigs.power_cut import cut_and_restore
from tests.faults.rigs.tiered import assert_sound, is_dead, let_pass, restart, tier_options
from tests.faults.rigs.traffic import CHAIN, DramClient, Tally, Traffic, chain_of, load_chains
from tests.rigs.daemon import Daemon, Start, wait_connected, wait_until
from tests.rigs.payload import store

CHAINS = 150
DRAM_CHUNKS = 96
TURNS = 20
HANGING_TURNS = 14
# Engines of a node with a slow or failing disk wait for DRAM alone. The bound leaves room for two busy shared cores.
TURN_S_MAX = 1.0
BACK_WITHIN_S = 60.0
DELAY_US = 20_000
HANG_US = 1_000_000
NEVER_US = 30_000_000
STALL_US, STALL_MS = 4_000_000, 300
END_S_MAX = 40.0
SEGMENTS, CATALOGUE, FLUSHED = "segment-", "data.mdb", "flushed"

# Faults that the tier must notice: name, what is set.
FAILURES: dict[str, dict[str, int | str]] = {
    "write-eio": {"match": SEGMENTS, "write_error": errno.EIO},
    "write-enospc": {"match": SEGMENTS, "write_error": errno.ENOSPC},
    "read-eio": {"match": SEGMENTS, "read_error": errno.EIO},
    "sync-eio": {"match": SEGMENTS, "sync_error": errno.EIO},
    "everything-eio": {"read_error": errno.EIO, "write_error": errno.EIO, "sync_error": errno.EIO, "match": SEGMENTS},
    "catalogue-write-eio": {"match": CATALOGUE, "write_error": errno.EIO},
    "catalogue-write-enospc": {"match": CATALOGUE, "write_error": errno.ENOSPC},
    "catalogue-meta-write-eio": {"match": CATALOGUE, "write_error": errno.EIO, "below": 8192},
    "catalogue-sync-eio": {"match": CATALOGUE, "sync_error": errno.EIO},
}
# Faults that no call reports: reading back what was written finds them.
TEARS: dict[str, dict[str, int | str]] = {
    "torn-in-the-header": {"match": SEGMENTS, "torn_bytes": 100},
    "torn-in-the-chunk": {"match": SEGMENTS, "torn_bytes": 4096 + 5000},
}
SLOW: dict[str, int | str] = {"match": SEGMENTS, "delay_us": DELAY_US}
# Not the torn ones: several of them suspend the tier for REST_S.
QUICK = {"write-enospc", "catalogue-meta-write-eio"}


def _cases(faults: dict[str, dict[str, int | str]]) -> Iterator[object]:
    for name, values in faults.items():
        yield pytest.param(values, marks=() if name in QUICK else (pytest.mark.campaign,), id=name)


def flush_all(daemon: Daemon) -> None:
    """Blocks until the daemon has answered, or has ended."""
    with contextlib.suppress(DaemonUnreachable), daemon.admin() as admin:
        admin.flush(None, None)


@pytest.fixture
def start_on_mount(fault_filesystem: FaultFilesystem, start_daemon: Start) -> Start:
    """Starts daemons whose tier lies on the mount, and is open."""
    tier = tier_options(fault_filesystem.path / "ssd", dram_chunks=DRAM_CHUNKS, capacity=64 << 20, policy="lru")

    def start(**options: str) -> Daemon:
        daemon = start_daemon(**tier, **options)
        daemon.wait_open()
        return daemon

    return start


@pytest.fixture
def tiered(start_on_mount: Start) -> Daemon:
    """A daemon whose tier lies on the mount."""
    return start_on_mount()


def _expect_all_well(daemon: Daemon) -> Tally:
    """The tier stores chunks, keeps them over a kill, and serves right bytes alone."""
    load_chains(daemon, CHAINS)
    with daemon.connect(timeout_s=10.0) as pool, daemon.admin() as admin:
        wait_connected(pool)
        for number in range(1000, 1008):
            store(pool, chain_of(pool, number))
        assert admin.demote_all(10.0)["left"] == 0
        daemon.kill()
        restart(daemon)
        daemon.wait_open()
        wait_connected(pool)
        kept = Tally()
        for number in range(1000, 1008):
            kept.load(pool, number)
    assert (kept.missed, kept.wrong) == (0, [])
    assert_sound(daemon)
    return load_chains(daemon, CHAINS)


class Turns:
    """An engine in DRAM beside others' traffic, whose turns go on while a fault comes, is seen, and goes."""

    def __init__(self, daemon: Daemon, filesystem: FaultFilesystem, seed: int) -> None:
        self._daemon, self._filesystem = daemon, filesystem
        self._traffic = Traffic(daemon, seed, chains=CHAINS)
        self._client = DramClient(daemon, first_chain=50_000)

    def until(self, is_seen: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 180.0) -> None:
        """Turns until the statistics show something."""

        def look() -> bool:
            self._client.turn()
            return is_seen(self._daemon.stats())

        wait_until(look, what, timeout_s)

    @contextlib.contextmanager
    def beside(self, summary: Callable[[str], None], *, back_within_s: float = BACK_WITHIN_S) -> Iterator[None]:
        """The block sets the fault and sees it. Afterwards the tier comes back, and a kill loses nothing of it."""
        with self._traffic, self._client:
            yield
            for _ in range(TURNS):
                self._client.turn()
            self._filesystem.clear()
            before = int(self._daemon.stats()["ssd.demoted_chunks"])
            self.until(
                lambda stats: stats["ssd.state"] == "ok" and int(stats["ssd.demoted_chunks"]) > before,
                "the tier is tried again and takes chunks",
                back_within_s,
            )
        assert not is_dead(self._daemon)
        found = _expect_all_well(self._daemon)
        summary(
            f"{self._client.turns} turns of an engine, slowest {1e3 * self._client.slowest_s:.0f} ms, "
            f"{self._traffic.tally.served} chunks served, {found.served} after a kill"
        )
        assert self._client.slowest_s <= TURN_S_MAX


@pytest.fixture
def turns(tiered: Daemon, fault_filesystem: FaultFilesystem, seed: int) -> Turns:
    return Turns(tiered, fault_filesystem, seed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(_cases(FAILURES)))
def test_a_failing_disk_does_not_affect_dram_and_is_probed_again(
    fault_filesystem: FaultFilesystem,
    tiered: Daemon,
    turns: Turns,
    summary: Callable[[str], None],
    fault: dict[str, int | str],
) -> None:
    with turns.beside(summary):
        wait_until(lambda: int(tiered.stats()["ssd.demoted_chunks"]) > CHAIN, "chunks are written")
        fault_filesystem.set(**fault)
        turns.until(lambda stats: stats["ssd.state"] in ("readonly", "offline"), "the tier gives up")
        assert tiered.info()["ssd_reason"] != ""


def _problems(daemon: Daemon) -> list[str]:
    with daemon.admin() as admin:
        info = admin.info()
    assert info["health"] == ("degraded" if info["problems"] else "ready")
    return list(info["problems"])


def test_reads_that_fail_while_writes_work_are_tried_later_each_time_and_shown(
    fault_filesystem: FaultFilesystem, tiered: Daemon, seed: int, summary: Callable[[str], None]
) -> None:
    """Engines load from the disk all the time: each period in which it is in use breaks promises."""
    states: list[str] = []

    def note_state() -> str:
        state = str(tiered.stats()["ssd.state"])
        if states[-1:] != [state]:
            states.append(state)
        return state

    with Traffic(tiered, seed, chains=CHAINS), DramClient(tiered, first_chain=50_000) as client:
        wait_until(lambda: int(tiered.stats()["ssd.read_bytes"]) > 0, "chunks are read")
        fault_filesystem.set(match=SEGMENTS, read_error=errno.EIO)

        def is_offline() -> bool:
            client.turn()
            return note_state() == "offline"

        wait_until(is_offline, "the tier is not read any more")
        problem = next(one for one in _problems(tiered) if one.startswith("ssd: "))
        assert "neither read nor written: read of " in problem
        assert "failed: [Errno 5] Input/output error" in problem
        promised = int(tiered.stats()["ssd.promotion_failed_chunks"])
        for _ in range(4 * TURNS):
            client.turn()
            note_state()
        assert states.count("ok") <= 1, "it is not in use again before a read has succeeded"
        assert int(tiered.stats()["ssd.promotion_failed_chunks"]) - promised <= CHAIN, "what was under way, and no more"
        assert "errors in" in next(one for one in _problems(tiered) if one.startswith("ssd: "))
        fault_filesystem.clear()

        def is_well() -> bool:
            client.turn()
            return note_state() == "ok" and _problems(tiered) == []

        wait_until(is_well, "it is used again after a read, and nothing is degraded", BACK_WITHIN_S)
    summary(f"states {' '.join(states)}, {promised} promotions failed before the tier was suspended")


def test_a_catalogue_that_cannot_be_read_suspends_the_tier_and_the_daemon_lives(
    fault_filesystem: FaultFilesystem, tiered: Daemon
) -> None:
    """LMDB reads its file through a memory map. Opening a file of this file system takes its pages from memory."""
    catalogue = fault_filesystem.path / "ssd" / "catalogue" / CATALOGUE
    with tiered.connect(timeout_s=10.0) as pool, tiered.admin() as admin:
        wait_connected(pool)
        store(pool, chain_of(pool, 1))
        assert admin.demote_all(60.0)["durable"]
        fault_filesystem.set(match=CATALOGUE, read_error=errno.EIO)
        catalogue.open("rb").close()
        store(pool, chain_of(pool, 2))
        assert not admin.demote_all(60.0)["durable"]
        wait_until(lambda: tiered.stats()["ssd.state"] == "readonly", "the tier is suspended")
        assert f"[Errno 5] cannot read {catalogue} into its map: Input/output error" in str(admin.info()["ssd_reason"])
        fault_filesystem.clear()
        wait_until(lambda: tiered.stats()["ssd.state"] == "ok", "the tier is used again", BACK_WITHIN_S)
        store(pool, chain_of(pool, 3))
        wait_until(lambda: bool(admin.demote_all(60.0)["durable"]), "all is durable", BACK_WITHIN_S)
        fault_filesystem.set(match=f"catalogue/{CATALOGUE}", read_error=errno.EIO)  # not of one that is being made
        tiered.kill()
        restart(tiered)
        wait_until(lambda: tiered.stats()["ssd.state"] == "offline", "the tier cannot be opened", BACK_WITHIN_S)
        fault_filesystem.clear()
        tiered.wait_open()
        wait_connected(pool)
        kept = Tally()
        for number in (1, 3):
            kept.load(pool, number)
        assert (kept.missed, kept.wrong) == (0, [])
    assert not is_dead(tiered)


@pytest.mark.parametrize("fault", list(_cases(TEARS)))
def test_a_disk_that_tears_writes_is_detected_and_probed_again(
    fault_filesystem: FaultFilesystem,
    tiered: Daemon,
    turns: Turns,
    summary: Callable[[str], None],
    fault: dict[str, int | str],
) -> None:
    with turns.beside(summary, back_within_s=REST_S + BACK_WITHIN_S):
        fault_filesystem.set(**fault)
        turns.until(lambda stats: int(stats["ssd.bad_writes"]) > 0, "a torn write is read back", BACK_WITHIN_S)
        assert tiered.stats()["ssd.io_distrusted"] == 1


@pytest.mark.campaign
def test_a_slow_disk_costs_misses(
    fault_filesystem: FaultFilesystem, turns: Turns, summary: Callable[[str], None]
) -> None:
    with turns.beside(summary):
        fault_filesystem.set(**SLOW)
        turns.until(
            lambda stats: int(stats["ssd.demoted_chunks"]) > 4 * CHAIN and int(stats["ssd.read_bytes"]) > 0,
            "chunks move to the disk and back",
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "match",
    [
        pytest.param("", id="all"),
        pytest.param(SEGMENTS, id="segments", marks=pytest.mark.campaign),
        pytest.param(CATALOGUE, id="catalogue", marks=pytest.mark.campaign),
    ],
)
def test_a_daemon_that_starts_on_a_failing_disk_serves_from_dram(
    fault_filesystem: FaultFilesystem, tiered: Daemon, match: str
) -> None:
    load_chains(tiered, CHAINS)
    assert tiered.stop() == 0
    fault_filesystem.set(match=match, read_error=errno.EIO, write_error=errno.EIO, sync_error=errno.EIO)
    restart(tiered)
    with DramClient(tiered, first_chain=50_000) as client:
        for _ in range(TURNS):
            client.turn()
    assert_sound(tiered)
    tiered.kill()
    fault_filesystem.clear()
    restart(tiered)
    tiered.wait_open()
    _expect_all_well(tiered)


@pytest.mark.slow
def test_a_disk_that_hangs_delays_nobody_for_long(
    fault_filesystem: FaultFilesystem, tiered: Daemon, summary: Callable[[str], None]
) -> None:
    with DramClient(tiered, first_chain=50_000) as client:
        fault_filesystem.set(match=SEGMENTS, delay_us=HANG_US)
        while not tiered.stats()["ssd.demotions_under_way"]:
            client.turn()
        for _ in range(HANGING_TURNS):
            client.turn()
        fault_filesystem.clear()
    assert not is_dead(tiered)
    load_chains(tiered, CHAINS)
    assert tiered.problems() == []
    summary(f"{client.turns} turns of an engine, slowest {1e3 * client.slowest_s:.0f} ms")
    assert client.slowest_s <= TURN_S_MAX


@pytest.mark.slow
def test_an_unresponsive_disk_is_not_used_until_it_answers(
    fault_filesystem: FaultFilesystem, start_on_mount: Start, summary: Callable[[str], None]
) -> None:
    daemon = start_on_mount(ssd__stall_timeout=f"{STALL_MS}ms")

    def state() -> object:
        client.turn()
        return daemon.stats()["ssd.state"]

    with DramClient(daemon, first_chain=50_000) as client:
        fault_filesystem.set(match=SEGMENTS, delay_us=STALL_US)
        wait_until(lambda: state() == "offline", "the tier rests")
        with daemon.admin() as admin:
            assert "unanswered" in str(admin.info()["ssd_reason"])
        assert float(daemon.stats()["ssd.unanswered_s"]) >= STALL_MS / 1e3
        for _ in range(TURNS):
            assert state() == "offline"  # nor is it probed meanwhile
        fault_filesystem.clear()
        wait_until(lambda: state() == "ok", "the tier is back", BACK_WITHIN_S)
    summary(f"{client.turns} turns of an engine, slowest {1e3 * client.slowest_s:.0f} ms")
    assert client.slowest_s <= TURN_S_MAX
    _expect_all_well(daemon)


@pytest.mark.parametrize("match", [CATALOGUE, FLUSHED])
def test_what_waits_for_the_disk_for_long_is_shown(
    fault_filesystem: FaultFilesystem, start_on_mount: Start, match: str
) -> None:
    """The segment files answer meanwhile."""
    daemon = start_on_mount(ssd__stall_timeout=f"{STALL_MS}ms")
    with daemon.connect(timeout_s=10.0) as pool, daemon.admin() as admin:
        store(pool, chain_of(pool, 1))
        assert admin.demote_all(60.0)["durable"]
        fault_filesystem.set(match=match, delay_us=2 * STALL_US)
        store(pool, chain_of(pool, 2))
        flushing = threading.Thread(target=flush_all, args=(daemon,))
        flushing.start()
        what = {CATALOGUE: "the catalogue", FLUSHED: "a flush"}[match]
        shown = re.compile(rf"ssd: {what} has taken [0-9.]+ s so far")
        wait_until(lambda: any(shown.fullmatch(one) for one in _problems(daemon)), "it is shown", BACK_WITHIN_S)
        fault_filesystem.clear()
        flushing.join()
        wait_until(lambda: _problems(daemon) == [], "all is well", BACK_WITHIN_S)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("match", "line"),
    [
        (SEGMENTS, "I/O of the ssd tier is left under way"),
        (CATALOGUE, "the catalogue is left as it is: the disk does not answer"),
        (FLUSHED, "a restart may bring back what was flushed: the file of flushes is not written within"),
    ],
)
def test_a_daemon_stops_although_its_disk_never_answers(
    fault_filesystem: FaultFilesystem, start_on_mount: Start, match: str, line: str
) -> None:
    daemon = start_on_mount(server__stop_timeout="100ms")
    fault_filesystem.set(match=match, delay_us=NEVER_US)
    with daemon.connect() as pool:
        store(pool, chain_of(pool, 1))
    flushing = threading.Thread(target=flush_all, args=(daemon,))
    if match == FLUSHED:
        flushing.start()
        let_pass(1.0)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: line in daemon.log(), "the daemon gives the disk up", END_S_MAX)
    fault_filesystem.clear()
    # The kernel itself lets no process go before its requests to such a file system are answered.
    assert daemon.process.wait(END_S_MAX) == 0


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [pytest.param(2, id="some"), *batches(10, of=40)])
def test_a_power_cut_that_keeps_any_part_of_unsynced_writes_costs_no_checkpoint(
    fault_filesystem: FaultFilesystem, tiered: Daemon, seed: int, summary: Callable[[str], None], cuts: int
) -> None:
    """Each unsynced write is kept whole, in part or not at all, in no order: disks may do so."""
    dice = random.Random(seed)
    kept, found, counts = Tally(), Tally(), {"kept": 0, "torn": 0, "dropped": 0}
    for number in range(cuts):
        with tiered.admin() as admin:
            admin.flush(None, None)
        fault_filesystem.set(record=1)
        of_checkpoint, of_all, _ = cut_and_restore(tiered, fault_filesystem, dice, number)
        for name in counts:
            counts[name] += fault_filesystem.lost.get(name, 0)
        kept += of_checkpoint
        found += of_all
        assert tiered.problems() == []
    _expect_all_well(tiered)
    summary(
        f"{cuts} cuts, writes not synced: {counts}; {kept.served} chunks of checkpoints kept, "
        f"{found.served} others served, {found.missed} missed"
    )
