"""Clients of a daemon that was killed, while the next one has its memory: their writers, their loads, their registrations.

Slots that a client may still write are used for nothing until it has stopped; a load that is under way returns no bytes of
another chunk; what a client has mapped stays.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool import failpoint
from kvpool.errors import KVPoolError
from kvpool.ids import PAGE_BYTES
from kvpool.layouts.share import Share
from kvpool.server.keeping.own_keeper import OwnKeeper
from kvpool.tiers.dram.kept.book import PLACE_BYTES
from kvpool.tiers.dram.kept.keeper import BOOK
from tests.rigs.daemon import SMALL, freeze, spawn, wait_connected, wait_until
from tests.rigs.kept_daemon import KeptDaemon
from tests.rigs.payload import load_all, payload_of, store, tokens_of
from tests.rigs.sets import names_of, rows_for, store_set
from tests.rigs.tiered_chains import CHAIN, chains, fill, load_right, store_whole

SIZE = SMALL.chunk_bytes
WITHHELD = "dram_withheld_slots"
# More than the arena has room for.
CHAINS = 24
OPTIONS = {"dram.capacity": "1MiB", "server.stop": "keep", "server.stop_timeout": "0s"}
# Reserves slots, names them, and copies a layer into them; then on request the rest.
WRITER = f"""
import sys
import numpy as np
import kvpool_client as kv
from kvpool_client.copying.copies import Copies
from tests.rigs.daemon import SMALL, freeze
own_save = Copies.save
def save_named(self, session, blocks, reserved):
    print(*reserved.offsets.tolist(), flush=True)
    return own_save(self, session, blocks, reserved)
Copies.save = save_named
with kv.connect(sys.argv[1], model="test-model", layout=SMALL, timeout_s=30.0) as pool:
    keys = pool.keys(np.arange({CHAIN} * SMALL.chunk_tokens))
    save = pool.save(keys, from_=np.full(({CHAIN}, {SIZE}), 0xAB, np.uint8))
    save.layer(0)
    print("writing", flush=True)
    input()
    result = save.commit()
    print(result.stored, *sorted(result.reasons), flush=True)
    input()
"""

# The first process: starts the daemon, kills it when it is asked to, and starts the next one.
INIT = """
trap 'kill -KILL $daemon' USR1
while :; do
    "$@" & daemon=$!
    while kill -0 $daemon 2> /dev/null; do wait $daemon; done
done
"""
UNSHARED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
UNSEEN = f"{CHAIN} of processes in another PID namespace: whether they have ended is not seen, their return frees them"


class UnseeingDaemon(KeptDaemon):
    """One kvpoold after another in one PID namespace, with its keeper; it ends with the namespace."""

    def command(self) -> list[str]:
        """See `Daemon`."""
        return [*UNSHARED, "bash", "-c", INIT, "init", *super().command()]

    def __exit__(self, *given: object) -> None:
        super().kill()
        super().__exit__(*given)

    def kill_and_start(self) -> None:
        """SIGKILL, and the next life."""
        assert self.process is not None
        life, parent = int(self.info()["dram_life"]), self.process.pid
        (init,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        os.kill(int(init), signal.SIGUSR1)

        def has_begun() -> bool:
            with contextlib.suppress(KVPoolError, OSError):
                return bool(self.info()["dram_life"] == life + 1)
            return False

        wait_until(has_begun, "the next life serves")


def _mapped_here(name: str) -> set[str]:
    """The numbers of the files of this name that this process has mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:{name} " in line]
    return {fields[4] for fields in lines}


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptDaemon]:
    """A daemon with little memory and a keeper, started."""
    daemon = KeptDaemon(tmp_path, **OPTIONS)
    with daemon:
        yield daemon


@pytest.fixture
def unverified(tmp_path: Path) -> Iterator[KeptDaemon]:
    """The same, where loads compare no checksums."""
    daemon = KeptDaemon(tmp_path, **OPTIONS, **{"dram.verify": "cold"})
    with daemon:
        yield daemon


@pytest.fixture
def may_unshare() -> None:
    """Skips where no namespace may be made."""
    if os.geteuid() != 0 or subprocess.run([*UNSHARED, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no right to make a PID namespace")


def _offsets_of(writer: "subprocess.Popen[str]") -> list[int]:
    assert writer.stdout is not None
    offsets = [int(word) for word in writer.stdout.readline().split()]
    assert writer.stdout.readline() == "writing\n"
    return offsets


def _say(writer: "subprocess.Popen[str]") -> None:
    assert writer.stdin is not None
    writer.stdin.write("go on\n")
    writer.stdin.flush()


def _withheld(daemon: KeptDaemon) -> int:
    return int(daemon.info().get(WITHHELD, 0))


def _arena(pool: kv.Pool) -> Any:
    session = pool._link.session
    assert session is not None
    return session.arena.view()


def _fill_all(daemon: KeptDaemon) -> None:
    """Use every slot that may be used, several times over, and find the right bytes behind the keys that are left."""
    with daemon.connect() as pool:
        stored = fill(pool, CHAINS)
        assert sum(load_right(pool, keys).chunks for keys in stored) >= 5 * CHAIN
    assert daemon.problems() == []


def _used(daemon: KeptDaemon, offsets: list[int]) -> list[int]:
    """Which of these slots get other bytes while the whole arena is used."""
    with daemon.connect() as pool:
        view = _arena(pool)
        before = [view[offset : offset + SIZE].copy() for offset in offsets]
        _fill_all(daemon)
        return [
            offset
            for offset, was in zip(offsets, before, strict=True)
            if not np.array_equal(view[offset : offset + SIZE], was)
        ]


def _end(daemon: KeptDaemon, by: str) -> None:
    if by == "kill":
        daemon.kill()
    else:
        assert daemon.stop() == 0


@pytest.mark.parametrize("lives", [1, 3])
@pytest.mark.parametrize("by", ["kill", "stop"])
def test_slots_of_a_stopped_writer_are_used_for_nothing_until_it_is_back(kept: KeptDaemon, lives: int, by: str) -> None:
    with spawn(WRITER, kept.socket) as writer:
        offsets = _offsets_of(writer)
        freeze(writer)
        try:
            for _ in range(lives):
                _end(kept, by)
                kept.start()
                assert _withheld(kept) == CHAIN
            assert _used(kept, offsets) == []
            assert _withheld(kept) == CHAIN
            assert kept.info()["dram_withheld_bytes"] >= CHAIN * SIZE
        finally:
            writer.send_signal(signal.SIGCONT)
        wait_until(lambda: not _withheld(kept), "its client is back")
        _say(writer)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "0 disconnected\n"
        assert len(_used(kept, offsets)) == CHAIN
        _say(writer)
    assert kept.problems() == []


@pytest.mark.parametrize("by", ["kill", "stop"])
def test_a_writer_that_the_daemon_has_dropped_keeps_its_slots_in_both_lives(kept: KeptDaemon, by: str) -> None:
    with spawn(WRITER, kept.socket) as writer:
        offsets = _offsets_of(writer)
        freeze(writer)
        with kept.admin() as admin:
            (row,) = [row for row in admin.connections()["connections"] if row["pid"] == writer.pid]
            assert admin.disconnect(row["id"])
        assert _used(kept, offsets) == [], "it has not hung up"
        _end(kept, by)
        kept.start()
        assert _withheld(kept) == CHAIN
        assert _used(kept, offsets) == []
        writer.send_signal(signal.SIGCONT)
        wait_until(lambda: not _withheld(kept), "its client is back")
        _say(writer)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "0 disconnected\n"
        _say(writer)


def test_a_writer_that_has_hung_up_leaves_nothing_behind(kept: KeptDaemon) -> None:
    with spawn(WRITER, kept.socket) as writer:
        offsets = _offsets_of(writer)
        writer.kill()
    wait_until(lambda: not kept.stats()["reservations"], "its connection has ended")
    _end(kept, "stop")
    kept.start()
    assert _withheld(kept) == 0
    assert len(_used(kept, offsets)) == CHAIN


def test_a_damaged_book_is_not_forgotten_while_somebody_that_it_named_may_write(kept: KeptDaemon) -> None:
    with spawn(WRITER, kept.socket) as writer, kept.connect() as idle:
        offsets = _offsets_of(writer)
        wait_connected(idle)
        freeze(writer)
        kept.kill()
        _damage_holders(kept)
        for _ in range(3):
            kept.start()
            assert kept.info()["dram_withheld_slots"] == CHAIN
            assert kept.info()["dram_withheld_for"].startswith(f"{CHAIN} for good, since a damaged book does not name")
            (line,) = kept.problems()
            assert line.startswith(f"former writers: {CHAIN} slots are withheld for good, ")
            wait_connected(idle)
            kept.kill()
        writer.kill()
        writer.wait()
    kept.start()
    assert _withheld(kept) == CHAIN, "nobody knows that it was the one"
    with kept.connect() as pool:
        view = _arena(pool)
        before = [view[offset : offset + SIZE].copy() for offset in offsets]
        fill(pool, CHAINS)
        assert all(np.array_equal(view[at : at + SIZE], was) for at, was in zip(offsets, before, strict=True))


def _damage_holders(daemon: KeptDaemon) -> None:
    """Flip a byte of each place for a holder that is not free. REQUIRES: no daemon runs."""
    keeper = OwnKeeper(daemon.socket, 600)
    found = keeper.take_memory()
    keeper.close()
    (book,) = [descriptor for name, descriptor in found.items() if name.startswith(BOOK)]
    table = os.pread(book, 100 * PLACE_BYTES, PAGE_BYTES)
    for at in range(0, len(table), PLACE_BYTES):
        if any(table[at : at + PLACE_BYTES]):
            os.pwrite(book, bytes([table[at + 8] ^ 0xFF]), PAGE_BYTES + at + 8)
    for descriptor in found.values():
        os.close(descriptor)


def test_slots_of_a_writer_that_never_comes_back_are_free_when_it_is_dead(kept: KeptDaemon) -> None:
    with spawn(WRITER, kept.socket) as writer:
        offsets = _offsets_of(writer)
        freeze(writer)
        kept.kill()
        kept.start()
        assert _withheld(kept) == CHAIN
        writer.kill()
        wait_until(lambda: not _withheld(kept), "its process has ended")
    assert len(_used(kept, offsets)) == CHAIN


def test_a_writer_that_died_with_the_daemon_withholds_nothing(kept: KeptDaemon) -> None:
    with spawn(WRITER, kept.socket) as writer:
        offsets = _offsets_of(writer)
        freeze(writer)
        kept.kill()
        writer.kill()
        writer.wait()
        kept.start()
        assert _withheld(kept) == 0
    assert len(_used(kept, offsets)) == CHAIN


def test_what_ranks_save_together_is_withheld_until_the_last_of_them_is_back(kept: KeptDaemon) -> None:
    layout = replace(SMALL, head_groups=2)
    shares = [Share.of_rank(layout, rank, 2) for rank in range(2)]
    with kept.connect(layout, share=shares[0]) as first, spawn(WRITER, kept.socket) as writer:
        keys = first.keys(tokens_of(5, 3 * SMALL.chunk_tokens))
        with kept.connect(layout, share=shares[1]) as second:
            rows = np.zeros((3, SIZE // 2), np.uint8)
            saves = [first.save(keys, from_=rows), second.save(keys, from_=rows)]
            _offsets_of(writer)
            freeze(writer)
            kept.kill()
            kept.start()
            wait_connected(first)
            wait_connected(second)
            assert _withheld(kept) == CHAIN + 3
            assert [save.commit().stored for save in saves] == [0, 0]
            writer.send_signal(signal.SIGCONT)
            wait_until(lambda: not _withheld(kept), "all of them are back")
            _say(writer)
            _say(writer)


def test_nobody_frees_the_slots_of_another_process(kept: KeptDaemon) -> None:
    with spawn(WRITER, kept.socket) as writer:
        _offsets_of(writer)
        with kept.connect() as here:
            welcome = here._link.session.welcome  # type: ignore[union-attr]
            freeze(writer)
            kept.kill()
            kept.start()
            wait_connected(here)
            assert _withheld(kept) == CHAIN
            for number in range(1, welcome.connection + 1):
                session = here._link.session
                assert session is not None
                session.welcome.proof, session.welcome.connection = welcome.proof, number
                session.end_session("the test says so")
                wait_until(lambda: here._link.session not in (None, session), "it is back")  # noqa: B023 - called here
            assert _withheld(kept) == CHAIN
        writer.kill()


def test_pools_that_were_closed_while_the_daemon_was_away_leave_nothing_behind(kept: KeptDaemon) -> None:
    for _ in range(3):
        with kept.connect() as pool:
            save = pool.save(
                pool.keys(tokens_of(0, CHAIN * SMALL.chunk_tokens)), from_=np.zeros((CHAIN, SIZE), np.uint8)
            )
            save.layer(0)
            kept.kill()
        kept.start()
        assert _withheld(kept) == CHAIN, "the process goes on, and nobody names what it has stopped"
        with kept.connect():
            assert not _withheld(kept)


@pytest.mark.parametrize("name", ["kvpool-arena", "kvpool-index"])
def test_a_process_keeps_nothing_of_a_former_life_mapped(kept: KeptDaemon, name: str) -> None:
    of_others = _mapped_here(name)
    with kept.connect() as pool:
        for options in ((), ("--set=dram.capacity=2MiB",), ("--set=server.keep_memory=off",)):
            kept.kill()
            kept.start(*options)
            wait_connected(pool)
            wait_until(lambda: len(_mapped_here(name) - of_others) == 1, "the former one is gone")


def test_a_life_for_fewer_connections_is_kept_too(kept: KeptDaemon) -> None:
    with contextlib.ExitStack() as pools:
        for _ in range(20):
            pools.enter_context(kept.connect())
        kept.kill()
        kept.start("--set=server.max_connections=8")
        assert "keeper" in str(kept.info()["dram_kept_by"])


@pytest.mark.usefixtures("may_unshare")
def test_an_unseen_writer_frees_its_own_slots_by_its_return_and_nobody_elses(tmp_path: Path) -> None:
    daemon = UnseeingDaemon(tmp_path, **OPTIONS)
    with daemon, spawn(WRITER, daemon.socket) as writer, daemon.connect() as another:
        offsets = _offsets_of(writer)
        with daemon.admin() as admin:
            assert {row["pid"] for row in admin.connections()["connections"] if row["role"] == "engine"} == {0}
        freeze(writer)
        for _ in range(2):
            daemon.kill_and_start()
            wait_until(lambda: another.connected, "another unseen client is back")
            assert _withheld(daemon) == CHAIN
            assert daemon.info()["dram_withheld_for"] == UNSEEN
            assert daemon.problems() == []
        assert _used(daemon, offsets) == []
        writer.send_signal(signal.SIGCONT)
        wait_until(lambda: not _withheld(daemon), "its client is back")
        assert len(_used(daemon, offsets)) == CHAIN
        _say(writer)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "0 disconnected\n"
        _say(writer)


def test_a_save_under_way_is_declined_and_writes_nothing_more(kept: KeptDaemon) -> None:
    with kept.connect() as pool:
        keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
        save = pool.save(keys, from_=payload_of(keys, SMALL))
        save.layer(0)
        kept.kill()
        kept.start()
        wait_connected(pool)
        assert _withheld(kept) == 0, "its hello names the connection before"
        _fill_all(kept)
        save.layer(1)
        assert save.commit().reasons == {"disconnected": CHAIN}
        with kept.connect() as other:
            assert sum(load_right(other, each).chunks for each in chains(other, CHAINS)) >= 5 * CHAIN
        assert kept.problems() == []
        assert store(pool, keys).stored == CHAIN


def test_a_load_under_way_never_has_the_bytes_that_its_slot_got_later(
    unverified: KeptDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unverified.connect() as pool:
        keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
        store_whole(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        assert lease.chunks == CHAIN
        into = np.zeros((CHAIN, SIZE), np.uint8)
        reached, may_go_on = threading.Event(), threading.Event()
        own_reach = failpoint.reach

        def reach(name: str, *arguments: Any) -> None:
            if name == "client.load.before" and threading.current_thread() is loading:
                reached.set()
                assert may_go_on.wait(600)
            own_reach(name, *arguments)

        results: list[kv.LoadResult] = []
        loading = threading.Thread(target=lambda: results.append(pool.load(lease, into=into).wait()))
        monkeypatch.setattr(failpoint, "reach", reach)
        loading.start()
        assert reached.wait(600)
        unverified.kill()
        unverified.start()
        wait_connected(pool)
        _fill_all(unverified)
        assert pool.lookup(keys).chunks == 0, "other chunks have its slots"
        may_go_on.set()
        loading.join()
        assert (results[0].chunks, results[0].reason) == (0, "gone")
        assert not into.any()


def test_what_a_dead_daemon_has_left_is_read_until_the_next_one_begins(unverified: KeptDaemon) -> None:
    with unverified.connect() as pool:
        names = names_of(1, 2, 3)
        rows = rows_for(pool, names)
        store_set(pool, names)
        keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
        store_whole(pool, keys)
        lease = pool.acquire_set(names)
        with pool.leased_memory(pool.acquire(pool.lookup(keys))) as memory:
            assert memory.verify().chunks == CHAIN
            unverified.kill()
            wait_until(lambda: not pool.connected, "the client knows")
            assert memory.are_current() == CHAIN
            into = np.zeros_like(rows)
            assert pool.load_set(lease, into, may_outlive=True).wait().reason == "complete"
            assert np.array_equal(into, rows)
            unverified.start()
            assert memory.are_current() == 0, "another life may use it for others now"
        wait_connected(pool)
        into = np.zeros_like(rows)
        assert pool.load_set(lease, into, may_outlive=True).wait().reason == "complete", "it has taken them over"
        assert np.array_equal(into, rows)
        _fill_all(unverified)
        states = pool.load_set(lease, np.zeros_like(rows), may_outlive=True).wait().states
        assert states == ("gone",) * 3


def test_what_hangs_on_the_arena_stays_and_older_leases_are_empty(kept: KeptDaemon) -> None:
    with kept.connect() as pool:
        keys = chains(pool, 1)[0]
        store_whole(pool, keys)
        session = pool._link.session
        assert session is not None
        arena, side = session.shared_arena, SimpleNamespace(device=None)
        pinned = pool._copies._arena_of(session, side)  # type: ignore[arg-type]
        lease = pool.acquire(pool.lookup(keys))
        for _ in range(2):
            kept.kill()
            kept.start()
            wait_connected(pool)
            now = pool._link.session
            assert now is not None
            assert now.shared_arena is arena
            assert pool._copies._arena_of(now, side) is pinned  # type: ignore[arg-type]
            assert pool.load(lease, into=np.zeros((CHAIN, SIZE), np.uint8)).wait().reason == "disconnected"
            assert load_right(pool, keys).chunks == CHAIN
        unkept = kept.keeper_of_running
        kept.kill()
        os.kill(unkept.pid, signal.SIGKILL)
        kept.wait_keeper_ended(unkept)
        kept.start()
        wait_connected(pool)
        now = pool._link.session
        assert now is not None
        assert now.shared_arena is not arena
        assert load_all(pool, keys)[0].chunks == 0
