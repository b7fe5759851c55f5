"""Early ends: of leases, reservations, clients, daemons, bytes. The right answer is a shorter one, in every layout."""

import contextlib
import os
import random
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import DaemonUnreachable, Refused
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool_client.connection.reserved_saves import ReservedSaves
from tests.e2e.pool.conftest import TIMEOUT_S, Shared
from tests.rigs.daemon import SMALL, Daemon, spawn, wait_connected, wait_until
from tests.rigs.layouts import CHUNK, DIVIDED, FULL, HYBRID, STATE, WINDOW, Case, over, over_in_alternate_modes
from tests.rigs.payload import assert_right_bytes, chunks_leased
from tests.rigs.prompts import (
    CHUNKS,
    Ranks,
    assert_served,
    begin,
    begin_load,
    flip,
    key_of,
    load,
    prompt,
    row_of,
    store,
    whole_result,
)

DRAM_CHUNKS = 24
CAPACITY = f"{DRAM_CHUNKS * SMALL.chunk_bytes}B"
SOME = over("plain", "hybrid", "divided")
Start = Callable[..., Daemon]

# Is killed with a load and a save under way, and with each group of a prompt alone saved.
CLIENT = """
import sys
import kvpool_client as kv
from tests.rigs.layouts import CASES
from tests.rigs.prompts import begin, begin_load, prompt, store

case = CASES[sys.argv[2]]
pool = kv.connect(sys.argv[1], model="test-model", layout=case.layout, share=case.shares[0], timeout_s=20.0)
lease = pool.acquire(pool.lookup(prompt(pool, 1)))
load = begin_load(pool, lease)
save = begin(pool, prompt(pool, 2))
save.layer(0)
groups = len(pool.layout.groups)
for group in range(groups):
    keys = prompt(pool, 3 + group)
    of_group = [chunks if number == group else () for number, chunks in enumerate(pool.chunks_to_save(keys))]
    assert store(pool, keys, chosen=of_group).declined == 0
print(lease.chunks, groups)
sys.stdin.readline()
"""


@over_in_alternate_modes("plain", "hybrid", "divided")
def test_a_killed_client_holds_and_leaves_nothing_that_is_not_whole(
    case: Case, daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    with Ranks(case, daemon.connect) as ranks:
        loaded, saved = ranks.prompt(1), ranks.prompt(2)
        ranks.store(loaded)
        groups = len(case.layout.groups)
        with spawn(CLIENT, daemon.socket, request.node.callspec.params["case"]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{CHUNKS} {groups}\n"
            assert daemon.stats()["reservations"] == 1
            process.kill()
        for name in ("reservations", "leases"):
            wait_until(lambda name=name: daemon.stats()[name] == 0, f"the dead client's {name} end")  # type: ignore[misc]
        stats = daemon.stats()
        assert stats["pins"] == stats["joint_chunks"], "parts of chunks wait for the others"
        assert ranks.first.lookup(saved).chunks == 0
        ranks.store(saved)
        for group in range(groups):
            keys = ranks.prompt(3 + group)
            assert ranks.first.lookup(keys).chunks == 0
            if len(ranks.pools) == 1:
                counts = list(map(len, ranks.first.chunks_to_save(keys)))
                again = store(ranks.first, keys)
                assert [one.present for one in again.groups] == [
                    count if number == group else 0 for number, count in enumerate(counts)
                ]
        for keys in (loaded, saved):
            ranks.assert_served(keys)
    assert daemon.problems() == []


def test_an_expired_lease_shortens_the_load(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY, server__lease_ttl="200ms")
    with daemon.connect() as pool:
        keys = prompt(pool, 1, DRAM_CHUNKS)
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        wait_until(lambda: daemon.stats()["leases"] == 0, "the unused lease ends")
        assert store(pool, prompt(pool, 3, 10)).stored == 10
        with pytest.raises(kv.InvalidArgument):
            pool.load(lease, into=np.zeros((DRAM_CHUNKS - 1, SMALL.chunk_bytes), np.uint8))
        result, (into,) = load(pool, lease)
        assert (result.chunks, result.reason) == (DRAM_CHUNKS - 10, "gone")
        assert_right_bytes(keys, SMALL, result, into)
    assert daemon.problems() == []


@over_in_alternate_modes("plain", "hybrid", "divided")
def test_an_expired_reservation_is_declined_and_its_slots_wait_for_its_writer(
    case: Case, start_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ReservedSaves, "expired_saves", lambda _saves: []
    )  # a client that gets no processor for a while
    daemon = start_daemon(server__reservation_ttl="200ms")
    with Ranks(case, daemon.connect) as ranks:
        keys = ranks.prompt(1)
        save, *others = ranks.begin(keys)
        chunks = ranks.needed(keys)
        wait_until(lambda: daemon.stats()["dram.zombie_slots"] == chunks, "the reservation expires")
        result = save.commit()
        assert (result.stored, dict(result.reasons)) == (0, {"expired": chunks})
        for other in others:
            other.abort()
        wait_until(lambda: daemon.stats()["dram.zombie_slots"] == 0, "its writer has ended")
        assert ranks.first.lookup(keys).chunks == 0
    assert daemon.problems() == []


def test_slots_of_a_late_writer_are_nobodys(start_daemon: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReservedSaves, "expired_saves", lambda _saves: [])
    daemon = start_daemon(dram__capacity=CAPACITY, server__reservation_ttl="200ms")
    with daemon.connect() as pool, daemon.connect() as other:
        save, keys = begin(pool, prompt(pool, 1, DRAM_CHUNKS)), prompt(other, 2, 3)
        wait_until(lambda: daemon.stats()["dram.zombie_slots"] == DRAM_CHUNKS, "the reservation expires")
        assert store(other, keys).declined == 3
        save.abort()
        # Its own reservations expire as fast, where the machine is slow.
        wait_until(lambda: store(other, keys).declined == 0, "the slots are used again")


@over_in_alternate_modes()
def test_a_daemon_killed_and_restarted_is_found_again(case: Case, daemon: Daemon) -> None:
    with Ranks(case, daemon.connect) as ranks:
        pool, keys = ranks.first, ranks.prompt(1)
        ranks.store(keys)
        epoch, hit = pool.epoch, pool.lookup(keys)
        lease = pool.acquire(hit)
        saves = ranks.begin(ranks.prompt(2))
        saves[0].layer(0)
        daemon.kill()
        wait_until(lambda: not any(each.connected for each in ranks.pools), "the client notices")
        result = load(pool, lease)[0]
        assert (result.chunks, {each.reason for each in (result, *result.groups)}) == (0, {"disconnected"})
        for save in (*saves, begin(pool, keys)):
            assert dict(save.commit().reasons) == {"disconnected": ranks.needed(keys)}
        assert pool.lookup(keys).chunks == chunks_leased(pool, hit) == 0
        daemon.start()
        for each in ranks.pools:
            wait_connected(each)
        assert pool.epoch not in (b"", epoch)
        assert pool.lookup(keys).chunks == 0
        assert load(pool, lease)[0].reason == "disconnected"
        lease.release()
        ranks.store(keys)
        ranks.assert_served(keys)


@SOME
def test_a_daemon_killed_in_a_load_gives_right_bytes_or_fewer(case: Case, daemon: Daemon) -> None:
    with Ranks(case, daemon.connect) as ranks:
        pool, keys = ranks.first, ranks.prompt(1, 60)
        ranks.store(keys)
        lease = pool.acquire(pool.lookup(keys))
        begun, into = begin_load(pool, lease)
        daemon.kill()
        result = begun.wait()
        if not case.layout.groups:
            assert_right_bytes(keys, case.layout, result, into[0])
        assert result.chunks in (0, 60) or not case.has_windows


@pytest.mark.parametrize("ending", ["request", "close"])
def test_a_turn_that_an_interrupted_thread_has_kept_costs_the_session_alone(shared: Shared, ending: str) -> None:
    """A signal's exception may come between taking the turn and using it."""
    with shared.connect(timeout_s=1.0) as pool:
        keys = prompt(pool, 31)
        store(pool, keys)
        assert pool._link.session is not None
        pool._link.session._turn.acquire()
        if ending == "request":
            assert pool.acquire(pool.lookup(keys)).chunks == 0
            wait_until(lambda: pool.stats()["reconnects"] == 1 and pool.connected, "there is another session")
            assert pool.stats()["last_error"] == "a request was interrupted"
            assert_served(pool, keys, CHUNKS)


def test_a_turn_of_what_has_no_answer_is_no_interrupted_one(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    notify, has_begun, may_end = BlockingConnection.notify, threading.Event(), threading.Event()

    def slow(connection: BlockingConnection, frame: bytes) -> bool:
        has_begun.set()
        assert may_end.wait(60.0)
        return notify(connection, frame)

    with shared.connect() as pool:
        keys, session = prompt(pool, 32), pool._link.session
        store(pool, keys)
        assert session is not None
        monkeypatch.setattr(BlockingConnection, "notify", slow)
        sender = threading.Thread(target=session.drop_leases, args=([1 << 40],))
        sender.start()
        assert has_begun.wait(60.0)
        with pytest.raises(DaemonUnreachable, match="not answered another request, what has no answer of thread"):
            session.call(m.Renew(b""), m.Done, 0.01)
        may_end.set()
        sender.join()
        assert session.is_alive
        assert_served(pool, keys, CHUNKS)


def test_connect_without_a_daemon_misses_until_one_appears(daemon: Daemon) -> None:
    daemon.kill()
    with daemon.connect() as pool:
        keys = prompt(pool, 1, 2)
        assert (pool.connected, pool.epoch) == (False, b"")
        assert pool.lookup(keys).chunks == 0
        assert dict(store(pool, keys).reasons) == {"disconnected": 2}
        daemon.start()  # and replaces the socket that the killed one has left
        wait_connected(pool)
        assert store(pool, keys).stored == 2


def test_a_stopped_daemon_costs_one_timeout(daemon: Daemon) -> None:
    with daemon.connect(timeout_s=20.0) as patient, daemon.connect(timeout_s=0.3) as pool:
        keys = prompt(pool, 1, 2)
        store(patient, keys)
        hit = pool.lookup(keys)
        daemon.signal(signal.SIGSTOP)
        assert chunks_leased(pool, hit) == 0
        assert not pool.connected
        assert chunks_leased(pool, hit) == 0
        daemon.signal(signal.SIGCONT)
        wait_until(lambda: chunks_leased(pool, pool.lookup(keys)) == 2, "the pool is served again")


@pytest.mark.parametrize(
    ("case", "group"),
    [
        *((name, 0) for name in ("plain", "latent", "summaries", "stages", "heads")),
        *(("hybrid", group) for group in (FULL, WINDOW, STATE)),
        *(("divided", group) for group in (FULL, WINDOW, STATE)),
    ],
    indirect=["case"],
)
def test_a_flipped_bit_ends_the_load_of_whoever_reads_it_and_drops_that_chunk(
    ranks: Ranks, case: Case, shared: Shared, group: int
) -> None:
    before = shared.daemon.stats()["checksum_failures"]
    pool, keys = ranks.first, ranks.prompt(1)
    ranks.store(keys, [4, CHUNKS])
    bad = CHUNKS - 1 if case.layout.groups else 3
    leases = [each.acquire(each.lookup(keys)) for each in ranks.pools]
    part, share = case.layout.group_layouts[group], pool.shares[group]
    flip(leases[0], row_of(leases[0], group, bad), (share.extents(part)[-1] + 1) * part.extent_bytes - 1)
    for each, lease in reversed(list(zip(ranks.pools, leases, strict=True))):
        result, _ = load(each, lease)
        if each is not pool:
            assert result == whole_result(case.layout, CHUNKS), "its own extents are good"
    good = 0 if case.layout.groups else bad
    assert (result.chunks, result.tokens, result.reason) == (good, good * CHUNK, "checksum")
    ends = [(bad, "checksum") if number == group else (CHUNKS, "complete") for number in range(len(result.groups))]
    assert [(each.chunks, each.reason) for each in result.groups] == ends
    for lease in leases:
        lease.release()
    served = 4 if case.has_windows else bad
    ranks.assert_served(keys, served)  # of windows the boundary before
    assert pool.lookup(keys).full_chunks == (bad if part.is_chained else CHUNKS)
    assert shared.daemon.stats()["checksum_failures"] == before + 1
    saves = [save.commit() for save in ranks.begin(keys, [4, CHUNKS])]
    dropped = 1 if case.layout.groups else CHUNKS - bad
    assert (saves[-1].stored, [save.declined for save in saves]) == (dropped, [0] * len(saves))
    ranks.assert_served(keys)


@pytest.mark.parametrize(
    ("layout", "extent", "named"),
    [
        (SMALL, 1, ""),
        (
            kv.Layout(layers=3, kv_heads=4, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=4),
            9,
            "layer 2 head group 1",
        ),
        (HYBRID, 4, "window 59 group, layer 4"),
        (DIVIDED, 3, "window 59 group, layer 1 head group 1"),
    ],
)
def test_a_full_check_names_the_place_of_wrong_bytes(
    shared: Shared, layout: kv.Layout, extent: int, named: str
) -> None:
    with shared.connect(layout) as pool:
        keys = prompt(pool, 7, 2)
        store(pool, keys)
        group = WINDOW if layout.groups else 0
        with pool.acquire(pool.lookup(keys)) as lease:
            flip(lease, row_of(lease, group, 1), extent * layout.group_layouts[group].extent_bytes)
        (problem,) = shared.daemon.problems(deep=True)
    assert problem.endswith(f": bad checksum{named and ' in '}{named}, dropped")


def test_a_report_about_a_good_chunk_drops_nothing(shared: Shared) -> None:
    with shared.connect() as pool:
        keys = prompt(pool, 1, 3)
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.hold.session is not None
            for number in (lease.hold.id, lease.hold.id + 9):
                lease.hold.session.call(m.ReportCorrupt(number, 1), m.Done)
        assert pool.lookup(keys).chunks == 3


def test_a_restart_serves_what_disk_has_and_half_a_boundary_is_none(start_daemon: Start, tmp_path: Path) -> None:
    """The headers of a window's chunk are wiped: with the catalogue lost it is not restored, and the boundary before serves."""
    ssd = tmp_path / "ssd"
    daemon = start_daemon(dram__capacity="4MiB", ssd__path=str(ssd), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    with daemon.connect(HYBRID) as pool:
        keys = prompt(pool, 5, 10)
        assert store(pool, keys, [4, 10]).declined == 0
        wanted = key_of(keys, WINDOW, 8)
    for is_wiped in (False, True):
        assert daemon.stop() == 0
        if is_wiped:
            shutil.rmtree(ssd / "catalogue")
            assert _wipe_headers(ssd, wanted) > 0
        daemon.start()
        wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
        with daemon.connect(HYBRID) as pool:
            assert_served(pool, prompt(pool, 5, 10), 4 if is_wiped else 10)
    assert daemon.problems() == []


def _wipe_headers(ssd: Path, key: bytes) -> int:
    """Zero every header of a chunk's slots on disk. How many there were."""
    wiped = 0
    for file in ssd.glob("segment-*.kvs"):
        content = bytearray(file.read_bytes())
        for at in range(0, len(content), kvpool_native.SSD_HEADER_BYTES):
            page = bytes(content[at : at + kvpool_native.SSD_HEADER_BYTES])
            if page.startswith(b"KVPSLOT1") and key in page:
                content[at : at + len(page)] = bytes(len(page))
                wiped += 1
        file.write_bytes(content)
    return wiped


@pytest.mark.parametrize("steps", [40, pytest.param(400, marks=pytest.mark.slow)])
@over("plain", "hybrid", "divided")
def test_random_faults_never_bring_other_bytes(ranks: Ranks, case: Case, shared: Shared, seed: int, steps: int) -> None:
    """Saves at random boundaries, flushes and flipped bits: what a load claims is right in every group."""
    chance = random.Random(seed)
    chains = [ranks.prompt(chance.randrange(1 << 30), 8) for _ in range(3)]
    for _ in range(steps):
        keys, act, pool = chance.choice(chains), chance.random(), chance.choice(ranks.pools)
        end = chance.randrange(1, 9)
        boundaries = sorted(chance.sample(range(1, end + 1), chance.randrange(0, min(3, end) + 1)))
        if act < 0.45:
            ranks.store(keys, boundaries, chunks=end)
            continue
        if act < 0.5:
            with shared.daemon.admin() as operator:
                operator.flush(shared.model, None)
            continue
        hit = pool.lookup(keys)
        with pool.acquire(hit) as lease:
            assert lease.chunks == hit.chunks
            if is_flipped := lease.chunks and chance.random() < 0.3:
                row = chance.randrange(len(lease.hold.rows.offsets))
                group = next(at for at in range(len(lease.ranges)) if row < sum(map(len, lease.ranges[: at + 1])))
                part = case.layout.group_layouts[group]
                flip(lease, row, pool.shares[group].extents(part)[0] * part.extent_bytes + 3)
            result, _ = load(pool, lease)
            assert result.chunks == lease.chunks or is_flipped
            assert not is_flipped or result.reason == "checksum"
        if hit.chunks and not is_flipped:
            assert_served(pool, keys, hit.chunks)
    wait_until(lambda: shared.daemon.stats()["leases"] == shared.daemon.stats()["reservations"] == 0, "nothing is held")


def test_a_chunk_asked_for_by_key_names_its_group(shared: Shared) -> None:
    with shared.connect(HYBRID) as pool, shared.daemon.admin() as admin:
        keys = prompt(pool, 8, 4)
        store(pool, keys)
        asked = [key_of(keys, group, 3) for group in (FULL, WINDOW, STATE)]
        for _ in range(2):
            assert [row["group"] for row in admin.chunk_history(asked)] == ["full", "window 59", "state"]
            admin.flush(shared.model, None)


@over_in_alternate_modes("plain", "hybrid", "divided")
def test_saves_under_way_are_committed_during_the_drain_and_the_socket_goes(case: Case, daemon: Daemon) -> None:
    with Ranks(case, daemon.connect) as ranks:
        keys = ranks.prompt(1)
        saves = ranks.begin(keys)
        daemon.signal(signal.SIGTERM)
        wait_until(lambda: not daemon.connect().connected, "new connections are refused")
        results = [save.commit() for save in saves]
        assert (results[-1].stored, results[-1].declined) == (ranks.needed(keys), 0)
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
    assert not os.path.exists(daemon.socket)
    assert "stopped" in daemon.log()


def test_a_second_daemon_on_a_live_socket_refuses(daemon: Daemon, tmp_path: Path) -> None:
    second = Daemon(tmp_path)
    second.socket = daemon.socket
    second.launch()
    assert second.process is not None
    assert second.process.wait(60) == 1
    assert "already serves" in second.log()
    with daemon.connect() as pool:
        assert pool.connected


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (
            m.Hello(m.MAGIC, m.PROTOCOL_VERSION + 1, m.ROLE_ENGINE, "model", SMALL.to_wire(), m.PROTOCOL_VERSION + 1),
            "version",
        ),
        (m.Hello(b"LPVK", m.PROTOCOL_VERSION, m.ROLE_ENGINE, "model", SMALL.to_wire()), "protocol"),
        (m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "root", "model", SMALL.to_wire()), "role"),
        (m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, "model", SMALL.to_wire()[:-1]), "layout"),
        (m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, "model", [0, *SMALL.to_wire()[1:]]), "layout"),
    ],
)
def test_a_wrong_hello_is_refused_by_name(shared: Shared, hello: m.Hello, code: str) -> None:
    with pytest.raises(Refused) as refusal:
        BlockingConnection(shared.daemon.socket, hello, TIMEOUT_S)
    assert refusal.value.code == code


def test_garbage_ends_the_connection_and_nothing_else(shared: Shared, seed: int) -> None:
    chance = np.random.default_rng(seed)
    with shared.connect() as pool:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
                raw.settimeout(TIMEOUT_S)
                raw.connect(shared.daemon.socket)
                raw.sendall(chance.bytes(int(chance.integers(1, 200))))
                with contextlib.suppress(ConnectionResetError):  # the daemon need not read what it refuses
                    raw.shutdown(socket.SHUT_WR)
                    while raw.recv(4096):
                        pass
        assert store(pool, prompt(pool, 1, 2)).stored == 2
