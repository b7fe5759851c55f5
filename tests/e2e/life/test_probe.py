"""The self-probe against a real daemon: faults that it finds, and states that it does not report as faults."""

import dataclasses
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.errors import KVPoolError
from kvpool.protocol.records import messages as m
from kvpool.server.health import probe as probe_module
from kvpool.server.health.probe import PROBE_LAYOUT, Probe, ProbeFailed
from kvpool.states import SaveState
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, wait_until
from tests.rigs.kept_daemon import KeptDaemon
from tests.rigs.nodes.two_daemons import options_of
from tests.rigs.payload import store, tokens_of
from tests.rigs.runs.ports import free_port


@pytest.fixture
def discarded() -> list[bytes]:
    """Keys that a probe asked to drop."""
    return []


@pytest.fixture
def make_probe(discarded: list[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Daemon], Probe]]:
    """Makes probes that end with the test."""
    monkeypatch.setattr(probe_module, "STEP_TIMEOUT_S", 60.0)  # a busy machine is no fault
    made: list[Probe] = []

    def make(daemon: Daemon) -> Probe:
        made.append(Probe(daemon.socket, discarded.append))
        return made[-1]

    yield make
    for probe in made:
        probe.close()


@pytest.mark.parametrize("among", ["alone", "nodes"])
def test_a_probe_reads_whatever_comes_with_a_welcome(
    tmp_path: Path, make_probe: Callable[[Daemon], Probe], among: str
) -> None:
    options = options_of("here", free_port()) if among == "nodes" else {}
    with KeptDaemon(tmp_path, **options) as daemon:
        probe = make_probe(daemon)
        probe.run()
        probe.run()
        assert daemon.stats()["saved_chunks"] == 2


def _leases_held(daemon: Daemon) -> int:
    """Leases of all connections, the probe's too."""
    with daemon.admin() as admin:
        return sum(int(row["leases"]) for row in admin.connections()["connections"])


@in_both_write_modes
def test_a_probe_saves_and_loads_and_leaves_one_chunk(
    daemon: Daemon, make_probe: Callable[[Daemon], Probe], discarded: list[bytes]
) -> None:
    probe = make_probe(daemon)
    for expected in (0, 1, 2):
        probe.run()
        assert len(set(discarded)) == expected
        stats = daemon.stats()
        assert (stats["leases"], stats["pins"], stats["reservations"]) == (0, 0, 0), "its own are not counted"
        assert _leases_held(daemon) == 1
    assert (stats["saved_chunks"], stats["aborted_chunks"]) == (3, 0)
    probe.close()
    wait_until(lambda: daemon.stats()["connections"] == 1, "the probe's connection has ended")
    assert len(set(discarded)) == 3
    assert daemon.problems() == []


class Altered:
    """Wraps a part of the probe's session and answers some calls differently."""

    def __init__(self, real: Any, **answers: Callable[[Any], Any]) -> None:
        self._real = real
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if name not in self._answers:
            return getattr(self._real, name)
        return lambda *arguments: self._answers[name](getattr(self._real, name)(*arguments))


def _flip(view: Any) -> Any:
    """The arena: reads see one bit of each byte flipped, writes are real."""

    class Flipping:
        def __setitem__(self, place: slice, value: Any) -> None:
            view[place] = value

        def __getitem__(self, place: slice) -> Any:
            return np.bitwise_xor(view[place], 1)

    return Flipping()


def _answering(kind: type[Any], **fields: Any) -> Callable[[Any], Any]:
    return lambda answer: dataclasses.replace(answer, **fields) if isinstance(answer, kind) else answer


@pytest.mark.parametrize(
    ("part", "method", "alter", "expected"),
    [
        ("arena", "view", _flip, "bytes at offset"),
        ("index", "checksum_at", lambda value: value ^ 1, "checksums of slot"),
        ("index", "generation_at", lambda value: value + 1, "generation of slot"),
        ("index", "lookup", lambda value: (0, b""), "lookup missed"),
        ("connection", "call", _answering(m.Reserved, states=bytes([SaveState.PENDING])), "answered PENDING"),
        ("connection", "call", _answering(m.Reserved, offsets=b""), "column for one chunk has 0 bytes"),
        ("connection", "call", _answering(m.Committed, states=bytes([SaveState.EXPIRED])), "answered EXPIRED"),
        ("connection", "call", _answering(m.Leased, generations=bytes(8)), "generation 0 was leased"),
        ("connection", "call", _answering(m.Leased, offsets=(4096 << 20).to_bytes(8, "little")), "was leased"),
        ("connection", "call", _answering(m.Leased, slots=b"\xff" * 8), "has no words in the index"),
        ("connection", "call", _answering(m.Leased, lease=0), "were gone right after their commit"),
    ],
)
def test_a_wrong_byte_or_answer_is_found(
    shared_daemon: Daemon,
    make_probe: Callable[[Daemon], Probe],
    part: str,
    method: str,
    alter: Callable[[Any], Any],
    expected: str,
) -> None:
    daemon = shared_daemon
    wait_until(lambda: daemon.stats()["connections"] == 1, "earlier probes' connections have ended")
    probe = make_probe(daemon)
    probe.run()
    assert probe._session is not None
    altered: Any = Altered(getattr(probe._session, part), **{method: alter})
    probe._session = dataclasses.replace(probe._session, **{part: altered})
    with pytest.raises(ProbeFailed, match=expected):
        probe.run()
    probe.run()
    wait_until(lambda: daemon.stats()["connections"] == 2, "the failed probe's connection has ended")
    assert _leases_held(daemon) == 1
    assert daemon.problems() == []


def test_a_full_pool_does_not_fail_the_probe(
    start_daemon: Callable[..., Daemon], make_probe: Callable[[Daemon], Probe]
) -> None:
    chunks = 24
    capacity = chunks * SMALL.chunk_bytes + PROBE_LAYOUT.chunk_bytes
    daemon = start_daemon(dram__capacity=f"{capacity}B")
    early, late = make_probe(daemon), make_probe(daemon)
    early.run()
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, chunks * 32))
        assert store(pool, keys).stored == chunks
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == chunks
            for probe in (early, late, early, late):
                probe.run()
            stats = daemon.stats()
            assert stats["declined_full"] == 4
            assert (stats["leases"], stats["pins"], stats["evicted_chunks"]) == (1, chunks, 0)
            assert _leases_held(daemon) == 2, "early still has its chunk and reads it again"


@pytest.mark.parametrize("option", ["server__max_leases", "server__max_reservations"])
def test_the_smallest_limits_leave_room_for_the_probe(
    start_daemon: Callable[..., Daemon], make_probe: Callable[[Daemon], Probe], option: str
) -> None:
    probe = make_probe(start_daemon(**{option: "1"}))
    for _ in range(3):
        probe.run()


def test_connections_that_are_all_in_use_do_not_fail_the_probe(
    start_daemon: Callable[..., Daemon], make_probe: Callable[[Daemon], Probe]
) -> None:
    daemon = start_daemon(server__max_connections="1")
    probe = make_probe(daemon)
    with daemon.connect() as pool:
        wait_until(lambda: pool.connected, "the engine has the only connection")
        probe.run()
    assert repr(probe) == "<Probe away, lease 0>"


def test_an_expired_lease_and_a_flush_do_not_fail_the_probe(
    start_daemon: Callable[..., Daemon], make_probe: Callable[[Daemon], Probe]
) -> None:
    daemon = start_daemon(server__lease_ttl="10ms")
    probe = make_probe(daemon)
    probe.run()
    wait_until(lambda: _leases_held(daemon) == 0, "the probe's lease expires")
    with daemon.admin() as admin:
        assert admin.flush(None, None)["chunks"] == 1
    probe.run()


@pytest.mark.slow
def test_a_daemon_that_hangs_dies_or_recovers_is_reported_as_it_is(
    daemon: Daemon, make_probe: Callable[[Daemon], Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "STEP_TIMEOUT_S", 1.0)
    probe = make_probe(daemon)
    probe.run()
    daemon.signal(signal.SIGSTOP)
    with pytest.raises(ProbeFailed, match="Reserve"):
        probe.run()
    daemon.signal(signal.SIGCONT)
    wait_until(lambda: _is_good(probe), "the daemon answers again")
    daemon.kill()
    with pytest.raises(ProbeFailed):
        probe.run()
    daemon.start()
    probe.run()


def test_a_removed_socket_is_found(daemon: Daemon, make_probe: Callable[[Daemon], Probe]) -> None:
    probe = make_probe(daemon)
    probe.run()
    Path(daemon.socket).unlink()
    with pytest.raises(ProbeFailed, match="no engine can connect any more"):
        probe.run()


def _is_good(probe: Probe) -> bool:
    try:
        probe.run()
    except KVPoolError:
        return False
    return True


def test_the_probes_chunk_is_not_among_those_that_a_stop_drops(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics="127.0.0.1:0")
    wait_until(lambda: daemon.stats()["saved_chunks"] > 0, "the first probe has ended")
    assert daemon.stop() == 0
    assert "stopped by signal: 0 chunks written down, 0 dropped with the DRAM tier, durable: yes" in daemon.log()
