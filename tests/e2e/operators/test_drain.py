"""`kvpoolctl drain` of a live daemon: saves are declined, loads are served, and health shows it until the order is undone."""

import json
from pathlib import Path

import numpy as np

from tests.rigs.daemon import Daemon, Start, wait_until
from tests.rigs.kvpoolctl import ctl
from tests.rigs.payload import payload_of, store, tokens_of


def test_a_drained_daemon_serves_loads_and_declines_saves_until_it_is_undone(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", server__metrics="127.0.0.1:0")
    daemon.wait_open()
    wait_until(lambda: daemon.info()["health"] == "ready", "the first probe has ended")
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 96))
        store(pool, keys)
        drained = ctl(daemon, "drain", "--json")
        assert drained.exit_code == 0, drained.output
        assert json.loads(drained.stdout)["left"] == 0
        assert daemon.stats()["ssd.chunks"] >= 3
        assert daemon.info()["health"] == "draining"
        assert store(pool, pool.keys(tokens_of(2, 64))).reasons == {"stopping": 1, "no-parent": 1}
        into = np.zeros((3, pool.layout.chunk_bytes), np.uint8)
        with pool.acquire(pool.lookup(keys)) as lease, pool.load(lease, into=into) as load:
            assert load.wait().chunks == 3
        assert np.array_equal(into, payload_of(keys, pool.layout))
        probes = daemon.info()["probe_age_s"]
        assert probes is not None
        assert daemon.info()["problems"] == []
        undone = ctl(daemon, "drain", "--undo")
        assert (undone.exit_code, undone.stdout) == (0, "new saves are taken again\n")
        assert store(pool, pool.keys(tokens_of(2, 64))).stored == 2
        assert daemon.info()["health"] == "ready"
    assert ctl(daemon, "drain", "--undo").stdout == "new saves were not declined\n"
    assert "drain by pid " in daemon.log()


def test_who_writes_chunks_down_learns_why_some_are_not_durable(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    daemon.wait_open()
    with daemon.connect() as pool:
        store(pool, pool.keys(tokens_of(1, 96)))
        (tmp_path / "ssd").rename(tmp_path / "elsewhere")
        assert ctl(daemon, "flush", "--demote").exit_code == 1
        removed = f"{tmp_path}/ssd has been removed while it is in use: restart the daemon"
        wait_until(lambda: any(removed in one for one in daemon.info()["problems"]), "a probe has found it")
        done = ctl(daemon, "flush", "--demote")
    assert done.exit_code == 1
    assert done.stdout.endswith("a power cut now could take some\n")
    assert removed in done.stderr


def test_a_drain_fails_where_chunks_stay_in_dram_alone(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        store(pool, pool.keys(tokens_of(1, 96)))
        drained = ctl(daemon, "drain")
    assert drained.exit_code == 1
    assert drained.stdout == ("new saves are declined; 0 chunks are written to the SSD tier, 3 are in DRAM alone\n")
    assert drained.stderr == "kvpoolctl: there is no SSD tier: set ssd.path and ssd.capacity\n"
    assert daemon.info()["health"] == "draining"
