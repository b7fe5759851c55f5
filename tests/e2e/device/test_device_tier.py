"""The device tier of a real daemon on the emulated driver: copies come and go, and a device that fails costs nothing else."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.protocol.records import memory as mm
from kvpool.tiers.hbm.tier import ERRORS_UNTIL_OFFLINE
from kvpool_native import Device
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.device.device_daemon import DeviceDaemon, DeviceEngine, ForkedDeviceDaemon
from tests.rigs.device.emulated import REAL, count_devices, driver_path
from tests.rigs.kvpoolctl import ctl, ctl_json
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

CHUNKS = 40


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DeviceDaemon]:
    """A daemon with 2 MiB of an emulated device."""
    with DeviceDaemon(tmp_path) as daemon:
        daemon.wait_for_state("ok")
        yield daemon


@pytest.fixture
def empty_daemon(module_daemon: DeviceDaemon) -> DeviceDaemon:
    """The module's daemon, empty."""
    module_daemon.empty()
    return module_daemon


def stored(daemon: DeviceDaemon, number: int, chunks: int = CHUNKS) -> list[bytes]:
    """The keys of a chain that is stored."""
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(number, chunks * SMALL.chunk_tokens))
        assert store(pool, keys).declined == 0
        return [keys[at] for at in range(chunks)]


def test_leased_chunks_are_copied_found_and_have_the_bytes_of_their_keys(empty_daemon: DeviceDaemon) -> None:
    daemon, before = empty_daemon, empty_daemon.stats()
    keys = stored(daemon, 1)
    with DeviceEngine(daemon) as engine, daemon.connect() as pool:
        assert daemon.stats()["hbm.chunks"] == 0
        engine.use(keys)
        daemon.wait_for_copies(CHUNKS)
        leased = engine.lease(keys)
        assert set(leased.tiers) == {kv.Level.HBM}
        assert len(engine.copies_of(leased)) == CHUNKS
        assert engine.copies_of(leased, CHUNKS - 3) == engine.copies_of(leased)[-3:]
        engine.release(leased)
        assert engine.use(keys) == CHUNKS
        chain = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        assert pool.lookup(chain).tiers.tolist() == [kv.Level.HBM] * CHUNKS
        loaded, into = load_all(pool, chain)
        assert loaded.chunks == CHUNKS
        assert_right_bytes(chain, SMALL, loaded, into)
    counted = daemon.stats()
    assert counted["hbm.promoted_bytes"] - before["hbm.promoted_bytes"] == CHUNKS * SMALL.chunk_bytes
    assert counted["hbm.served_chunks"] - before["hbm.served_chunks"] == 2 * CHUNKS
    assert counted["hbm.state"] == "ok"
    assert daemon.info()["hbm_copy_method"] == "batch" or REAL
    assert driver_path() in " ".join(daemon.command())
    assert daemon.info()["tiers"] == ["hbm", "dram"]
    assert daemon.problems() == []


def test_an_engine_elsewhere_is_refused_and_a_daemon_without_a_device_has_none(
    empty_daemon: DeviceDaemon, tmp_path: Path
) -> None:
    keys = stored(empty_daemon, 2)
    with DeviceEngine(empty_daemon) as engine:
        with pytest.raises(Refused, match="device: the engine is on device"):
            engine.connection.call_for_descriptor(mm.OpenMemory(bytes(16)), mm.Memory)
        assert engine.lease(keys).chunks == CHUNKS
    with Daemon(tmp_path, **{"hbm.device": "off"}) as without, without.connect() as pool:
        assert pool.connected
        assert "hbm_state" not in without.info()
        assert without.info()["tiers"] == ["dram"]


def test_a_device_whose_memory_is_taken_at_the_start_is_opened_later(tmp_path: Path) -> None:
    daemon = DeviceDaemon(tmp_path)
    daemon.control.order("fail cuMemCreate 0 2")
    with daemon:
        daemon.wait_for_state("offline")
        assert "CUDA_ERROR_OUT_OF_MEMORY" in daemon.info()["hbm_reason"]
        assert any("could not be opened" in problem for problem in daemon.problems())
        keys = stored(daemon, 5)
        daemon.control.order("clear 1")
        daemon.wait_for_state("ok")
        with DeviceEngine(daemon) as engine:
            engine.use(keys)
            daemon.wait_for_copies(CHUNKS)
        assert daemon.problems() == []


def test_a_device_is_found_by_its_uuid_beside_one_that_cannot_be_opened(tmp_path: Path) -> None:
    second = "GPU-" + str(UUID(bytes=b"emulated-device1"))
    daemon = DeviceDaemon(tmp_path, **{"hbm.device": second})
    daemon.control.order("fail cuDevicePrimaryCtxRetain 1 2")
    with daemon:
        daemon.wait_for_state("ok")
        assert daemon.info()["hbm_uuid"] == second
        assert "OFFLINE" not in daemon.log(), "the first attempt has found it"


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("device", "GPU-" + str(UUID(int=7)), lambda: str(UUID(bytes=Device(driver_path(), count_devices() - 1).uuid))),
        ("driver", "libnothing-of-that-name.so.1", lambda: "libnothing-of-that-name.so.1"),
    ],
)
def test_a_device_or_driver_that_is_not_there_is_named_and_the_daemon_serves(
    tmp_path: Path, option: str, value: str, named: Callable[[], str]
) -> None:
    with ForkedDeviceDaemon(tmp_path, **{f"hbm.{option}": value}) as daemon:
        daemon.wait_for_state("offline")
        assert named() in daemon.info()["hbm_reason"]
        stored(daemon, 6)
        assert daemon.stop() == 0


def test_copies_that_fail_in_a_row_take_the_tier_offline_until_a_restart_and_leave_dram_alone(
    daemon: DeviceDaemon,
) -> None:
    keys = stored(daemon, 7)
    with DeviceEngine(daemon) as engine:
        engine.use(keys)
        daemon.wait_for_copies(CHUNKS)
        with daemon.admin() as admin:
            admin.flush(None, None, "hbm")
        daemon.control.order("fail cuEventQuery 0 719\nfail cuEventRecord 0 719")
        for _ in range(ERRORS_UNTIL_OFFLINE):
            failed = daemon.stats()["hbm.failed_copies"]
            engine.use(keys)
            wait_until(lambda: daemon.stats()["hbm.failed_copies"] > failed, "copies have failed")  # noqa: B023 - called here
        daemon.wait_for_state("offline")
        assert daemon.stats()["hbm.chunks"] == 0
        assert engine.lease(keys).chunks == CHUNKS
        assert any("until the daemon restarts" in problem for problem in daemon.problems())
    daemon.control.order("clear 1")
    assert daemon.stop() == 0
    daemon.start()
    daemon.wait_for_state("ok")
    assert stored(daemon, 7) == keys
    with DeviceEngine(daemon) as engine:
        assert daemon.stats()["hbm.chunks"] == 0, "it begins without copies"
        engine.use(keys)
        daemon.wait_for_copies(CHUNKS)
        assert engine.use(keys) == CHUNKS


@pytest.mark.slow
def test_a_device_that_hangs_delays_no_request_and_no_stop(daemon: DeviceDaemon) -> None:
    keys, others = stored(daemon, 8), stored(daemon, 9)
    with DeviceEngine(daemon) as engine, daemon.connect() as pool:
        engine.use(keys)
        daemon.wait_for_copies(CHUNKS)
        daemon.control.order("hang 1")
        leased = engine.lease(others)
        assert leased.chunks == CHUNKS
        wait_until(lambda: daemon.stats()["hbm.promoting_bytes"] > 0, "copies are under way")
        chain = pool.keys(tokens_of(9, CHUNKS * SMALL.chunk_tokens))
        loaded, into = load_all(pool, chain)
        assert_right_bytes(chain, SMALL, loaded, into)
        assert engine.copies_of(leased) == []
    assert daemon.stop() == 0


@pytest.mark.slow
def test_the_operators_commands_know_the_tier(daemon: DeviceDaemon) -> None:
    def run(*arguments: str) -> str:
        done = ctl(daemon, *arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    keys = stored(daemon, 10)
    with DeviceEngine(daemon) as engine:
        engine.use(keys)
        daemon.wait_for_copies(CHUNKS)
    assert "hbm_state:ok\n" in run("info")
    assert f"hbm.chunks:{CHUNKS}\n" in run("stats", "hbm")
    assert ctl_json(daemon, "why", keys[0].hex())[0]["tiers"] == ["hbm", "dram"]
    run("verify", "--sample", "10", "--tier", "hbm")
    assert daemon.stats()["hbm.mover_checked_bytes"] == 10 * SMALL.chunk_bytes
    run("check", "--deep")
    run("flush", "--tier", "hbm", "--yes")
    assert "hbm.chunks:0\n" in run("stats", "hbm")
    assert ctl_json(daemon, "why", keys[0].hex())[0]["tiers"] == ["dram"]
