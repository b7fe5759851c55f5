"""Connections that take more than their share: unfinished requests, saves that never end. Operators see and end them."""

import contextlib
import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from kvpool.errors import DaemonUnreachable, Refused
from kvpool.protocol import frames
from kvpool.protocol.records import messages as m
from kvpool.server.connections.input_budget import UNFINISHED_BYTES_MAX
from kvpool_tools.cli.kvpoolctl import cli
from tests.hostile.rigs.daemon_watch import private_bytes
from tests.hostile.rigs.raw_clients import (
    answers_until_eof,
    engine,
    keys_of,
    next_answer,
    raw_engine,
    read_back,
    reserve,
    store,
)
from tests.rigs.daemon import SMALL, Daemon, wait_connected, wait_until

UNFINISHED = frames.LENGTH.pack(frames.FRAME_BYTES_MAX) + bytes(frames.FRAME_BYTES_MAX - 1)


def kvpoolctl(daemon: Daemon, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--socket", daemon.socket], prog_name="kvpoolctl")


def test_unfinished_requests_take_bounded_memory_and_the_oldest_are_disconnected(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon()
    count = UNFINISHED_BYTES_MAX // len(UNFINISHED) + 8
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(engine(daemon))
        store(good, keys_of(0, 4))
        before = private_bytes(daemon)
        raws = [stack.enter_context(raw_engine(daemon)) for _ in range(count)]
        for raw in raws:
            raw.sendall(UNFINISHED)
        (kind, _, values), *_ = answers_until_eof(raws[0])
        assert (kind, values[0]) == (m.Failure.KIND, "disconnected")
        assert "unfinished" in str(values[1])
        assert read_back(good, keys_of(0, 4)) == [True] * 4
        assert private_bytes(daemon) - before < 3 * UNFINISHED_BYTES_MAX
    assert daemon.problems() == []


@pytest.mark.slow
def test_a_long_overdue_writer_is_disconnected_and_holds_its_slots_until_it_closes(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(server__reservation_ttl="50ms")
    with engine(daemon) as slow, engine(daemon) as good:
        store(slow, keys_of(50, 2))
        leased = slow.call(m.Acquire(keys_of(50, 2)), m.Leased)
        assert leased.chunks == 2
        reserve(slow, keys_of(0, 8))
        store(good, keys_of(100, 4))
        (kind, _, values), *rest = answers_until_eof(slow._socket)
        assert (kind, values[0], rest) == (m.Failure.KIND, "disconnected", [])
        assert "server.reservation_ttl" in str(values[1])
        wait_until(lambda: daemon.stats()["leases"] == 0, "its leases have ended")
        stats = daemon.stats()
        assert stats["held.zombie_bytes"] == 8 * SMALL.chunk_bytes  # it may still write: nobody else gets these slots
        assert read_back(good, keys_of(100, 4)) == [True] * 4
        slow.close()
        wait_until(lambda: daemon.stats()["held.zombie_bytes"] == 0, "its slots are free")
    assert daemon.problems() == []


def test_an_operator_sees_who_holds_what_and_ends_it(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect(SMALL, model="engine\nforged") as pool, engine(daemon) as greedy:
        wait_connected(pool)
        store(greedy, keys_of(0, 8))
        greedy.call(m.Acquire(keys_of(0, 8)), m.Leased)
        reserve(greedy, keys_of(100, 3))
        rows = json.loads(kvpoolctl(daemon, "connections", "--json").stdout)["connections"]
        first = rows[0]
        assert (first["role"], first["model"], first["leases"], first["reservations"]) == ("engine", "test-model", 1, 1)
        assert first["held_bytes"] == first["leased_bytes"] + first["reserved_bytes"]
        assert first["reserved_bytes"] == 3 * 12288
        assert {row["role"] for row in rows} == {"engine", "admin"}
        table = kvpoolctl(daemon, "connections").stdout
        assert "test-model" in table
        assert "\nforged" not in table
        done = kvpoolctl(daemon, "disconnect", str(first["id"]))
        assert (done.exit_code, done.stdout) == (0, f"connection {first['id']} ends\n")
        assert answers_until_eof(greedy._socket)[0][2][0] == "disconnected"
        mine = next(row["id"] for row in rows if row["model"].startswith("engine"))
        assert kvpoolctl(daemon, "disconnect", str(mine)).exit_code == 0
        wait_until(lambda: pool.connected and _ids(daemon).isdisjoint({mine}), "the library has connected again")
    gone = kvpoolctl(daemon, "disconnect", "4711")
    assert (gone.exit_code, gone.stderr[:38]) == (1, "kvpoolctl: there is no connection 4711")
    assert daemon.problems() == []


def _ids(daemon: Daemon) -> set[int]:
    with daemon.admin() as admin:
        return {row["id"] for row in admin.connections()["connections"] if row["role"] == "engine"}


def test_idle_connections_keep_no_memory_of_earlier_requests(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(raw_engine(daemon)) for _ in range(60)]
        before = private_bytes(daemon)
        request = m.encode(m.Acquire(keys_of(0, 28_000)), 1)
        small = m.encode(m.Renew(b""), 1) * 9000 + b"\0"  # whole frames, and a byte of the next one
        for number, raw in enumerate(raws):
            raw.sendall(request if number % 2 else small)
            # All are read before the next connection asks: answers that wait are memory, whose small pieces Python keeps.
            for _ in range(1 if number % 2 else 9000):
                assert next_answer(raw)[0] in (m.Leased.KIND, m.Done.KIND)
        wait_until(lambda: private_bytes(daemon) - before < 16 << 20, "what was asked is forgotten")


def test_two_hundred_connections_and_more_can_be_listed(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with contextlib.ExitStack() as stack:
        for _ in range(230):
            stack.enter_context(raw_engine(daemon))
        with daemon.admin() as admin:
            report = admin.connections()
        assert len(report["connections"]) + report["left_out"] == 231


@pytest.mark.slow
def test_an_operator_may_end_his_own_connection_and_an_overdue_writer_is_logged_once(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(server__reservation_ttl="50ms")
    with daemon.admin() as admin, engine(daemon) as slow:
        reserve(slow, keys_of(0, 2))
        wait_until(lambda: "reservation_ttl" in daemon.log(), "its end is logged")
        own = next(row["id"] for row in admin.connections()["connections"] if row["role"] == "admin")
        with contextlib.suppress(Refused, DaemonUnreachable):
            admin.disconnect(own)
        wait_until(lambda: daemon.stats()["uptime_s"] >= 1, "some looks have passed")
    assert daemon.log().count("for twice server.reservation_ttl") == 1
    assert "Traceback" not in daemon.log()
    assert daemon.problems() == []
