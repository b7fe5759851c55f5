"""`kvpoold --check`: every fault of every stage of a start at once, what the machine lacks, and no trace."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.config.config import read_config
from kvpool.config.curve_keys import make_key_pair, write_key_file
from kvpool.server.listeners import fault_of_address
from kvpool.server.start_checks import lacks_that_degrade
from tests.rigs.daemon import PROGRAM, Daemon

# A fault of each stage: the value, values together, and what secrets, descriptors, nodes, keys, places and peers show.
FAULTY = """
[server]
lease_ttl = "soon"
socket = "{directory}/kvpool.sock"
domain_secret_file = "{directory}/secret"

[dram]
numa = 1000
connection_quota = 0

[ssd]
path = "{directory}/ssd"
capacity = "16MiB"
max_chunks = 4000000

[events]
publish = "ipc://{directory}/no-socket"
replay = "tcp://127.0.0.1:5557"
keys = "{directory}/absent"
allow = "{directory}/clients"

[peer]
listen = "tcp://127.0.0.1:5557"
stream = "tcp://127.0.0.1:9471"
members = "10.0.0.1"
keys = "{directory}/key"
"""
FAULTS = (
    "server.lease_ttl is 'soon', expected a duration",
    "dram.connection_quota is 0, expected a number above 0",
    "server.domain_secret_file is ",
    "dram.numa is '1000'; this machine has memory on nodes",
    "ssd.capacity is 16MiB, expected more",
    "no-socket, which exists and is no socket",
    "events.replay is 127.0.0.1:5557, expected another address than that of peer.listen",
    "events.keys is ",
    "events.allow is ",
    "peer.keys and peer.allow: expected both or none",
    "peer.members, ",
)


def _check(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PROGRAM, "--check", *arguments], capture_output=True, text=True, timeout=120, check=False)


def _trace(directory: Path) -> list[tuple[str, int, int]]:
    return sorted((str(one), one.lstat().st_mtime_ns, one.lstat().st_size) for one in directory.rglob("*"))


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A configuration with a fault of each stage."""
    (tmp_path / "secret").write_text("known to all")
    (tmp_path / "secret").chmod(0o644)
    (tmp_path / "no-socket").write_text("")
    (tmp_path / "clients").write_text("no key\n")
    write_key_file(str(tmp_path / "key"), make_key_pair())
    file = tmp_path / "kvpool.toml"
    file.write_text(FAULTY.format(directory=tmp_path))
    return file


def test_faults_of_all_stages_are_printed_at_once_and_nothing_is_touched(faulty: Path) -> None:
    before = _trace(faulty.parent)
    done = _check("--config", str(faulty))
    assert done.returncode == 2
    assert [fault for fault in FAULTS if fault not in done.stderr] == []
    assert len(done.stderr.splitlines()) == len(FAULTS), done.stderr
    started = subprocess.run(
        [*PROGRAM, "--config", str(faulty)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (started.returncode, started.stderr) == (2, done.stderr), "a start finds the same"
    assert _trace(faulty.parent) == before


def test_a_good_configuration_is_checked_beside_its_running_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        before = _trace(tmp_path)
        done = _check(*daemon.command()[len(PROGRAM) :])
        assert (done.returncode, done.stderr) == (0, "")
        assert "no fault" in done.stdout
        assert "a daemon serves there" in done.stdout
        assert _trace(tmp_path) == before
        assert daemon.problems() == []


def test_what_the_machine_lacks_is_printed_and_what_no_start_can_do_without_is_a_fault(tmp_path: Path) -> None:
    socket, absent = f"--set=server.socket={tmp_path}/kvpool.sock", tmp_path / "absent"
    done = _check(socket, "--set=dram.capacity=4TiB")
    assert done.returncode == 2
    assert "dram.capacity 4.0 TiB takes" in done.stderr
    tier = [f"--set=ssd.path={absent}", "--set=ssd.capacity=64MiB"]
    done = _check(socket, "--set=dram.capacity=1MiB", "--set=dram.huge_pages=hugetlb", *tier)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"ssd.path {absent} cannot be opened: there is no such directory" in done.stdout
    assert not absent.exists()


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("server.socket={}/file", "server.socket cannot be there: {}/file exists and is no socket"),
        ("server.socket={}/folder", "server.socket cannot be there: {}/folder exists and is no socket"),
        ("server.socket={}/t", "server.socket cannot be there: {}/t.lock exists and is no file: remove it"),
        ("server.socket={}/u", "server.socket cannot be there: {}/u.new exists and is a directory: remove it"),
        ("server.metrics_socket={}/file", "server.metrics_socket cannot be there: {}/file exists and is no socket"),
        ("server.socket={}/t/", "expected an absolute path of at most"),
        ("server.metrics_socket={}//s.lock", "server.metrics_socket is {}/s.lock, expected another path"),
        ("events.publish=ipc://{}/./s", "events.publish is {}/s, expected another path"),
        ("server.metrics=127.0.0.1:9471", "peer.stream is 127.0.0.1:9471, expected another address"),
        ("server.domain_secret_file={}/empty", "which is empty, expected 1 to 4096 bytes"),
        ("server.domain_secret_file={}/long", "which is longer than 4096 bytes"),
    ],
)
def test_a_place_or_a_secret_that_cannot_be_used_is_a_fault(tmp_path: Path, option: str, fault: str) -> None:
    for name in ("folder", "t.lock", "u.new"):
        (tmp_path / name).mkdir()
    for name, size in (("file", 1), ("empty", 0), ("long", 4097)):
        (tmp_path / name).write_bytes(bytes(size))
        (tmp_path / name).chmod(0o600)
    peers = ["--set=peer.listen=tcp://127.0.0.1:9470", "--set=peer.stream=tcp://127.0.0.1:9471"]
    done = _check(f"--set=server.socket={tmp_path}/s", *peers, f"--set={option.format(tmp_path)}")
    assert done.returncode == 2
    assert fault.format(tmp_path) in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "option", ["server.metrics={}", "peer.listen=tcp://{}", "peer.stream=tcp://{}", "events.publish=tcp://{}"]
)
def test_an_address_that_cannot_be_bound_now_is_a_fault(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        name, address = option.format(f"127.0.0.1:{other.getsockname()[1]}").split("=")
        others = {"peer.listen": "tcp://127.0.0.1:0", "peer.stream": "tcp://127.0.0.1:0", "events.insecure": "true"}
        given = {**others, name: address, "server.socket": f"{tmp_path}/s"}
        done = _check(*(f"--set={one}={value}" for one, value in given.items()))
    assert done.returncode == 2
    assert f"{name} {address} cannot be bound: Address already in use" in done.stderr
    assert _check(*(f"--set={one}={value}" for one, value in given.items())).returncode == 0


def test_a_socket_that_another_process_serves_is_a_fault(tmp_path: Path) -> None:
    given = [f"--set=server.socket={tmp_path}/s", f"--set=events.publish=ipc://{tmp_path}/e"]
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/e")
        assert _check(*given).returncode == 0, "bound, and nobody listens"
        other.listen()
        done = _check(*given)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"kvpoold: events.publish {tmp_path}/e is served by another process: stop it, or choose another path\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_port_of_roots_is_a_fault_for_others() -> None:
    code = "import os; from kvpool.server.listeners import fault_of_address as f; os.setuid(65534); print(f('127.0.0.1:81'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    first = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text().strip()
    assert done.stdout.strip() == ("" if int(first) <= 81 else f"Permission denied (ports below {first} are root's)")
    assert fault_of_address("127.0.0.1:81") == ""


def test_an_address_of_another_host_is_a_fault(tmp_path: Path) -> None:
    """The addresses are of the networks for documentation."""
    write_key_file(str(tmp_path / "key"), pair := make_key_pair())
    (tmp_path / "clients").write_text(pair.public.decode())
    keys = [f"--set=events.keys={tmp_path}/key", f"--set=events.allow={tmp_path}/clients"]
    done = _check(f"--set=server.socket={tmp_path}/s", *keys, "--set=events.publish=tcp://198.51.100.7:9470")
    assert done.returncode == 2
    assert done.stderr == (
        "kvpoold: events.publish tcp://198.51.100.7:9470 cannot be bound: Cannot assign requested address\n"
    )
    assert fault_of_address("[2001:db8::7]:9470") == "Cannot assign requested address"
    for own in ("127.3.4.5:0", "[::1]:0"):
        assert fault_of_address(own) == ""


@pytest.mark.parametrize(
    ("options", "lack"),
    [
        (["store.master=localhost:1"], "store.master is set, and mooncake-transfer-engine is not installed"),
        (["peer.transport=rdma", "peer.listen=tcp://127.0.0.1:1", "peer.stream=tcp://127.0.0.1:2"], "come by TCP"),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, options: list[str], lack: str) -> None:
    config = read_config(None, options).config
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert [lack in line for line in lacks_that_degrade(config)] == [True]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert list(lacks_that_degrade(config)) == []


def test_a_place_that_cannot_be_made_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = _check(f"--set=server.socket={tmp_path}/file/kvpool.sock")
    assert done.returncode == 2
    assert f"server.socket cannot be there: {tmp_path}/file is no directory" in done.stderr


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({"ssd.path": "/x"}, "ssd.capacity is 0"),
        ({"hbm.capacity": "2MiB"}, "hbm.device is off"),
        ({"peer.name": "a"}, "peer.listen is off"),
        ({"peer.transport": "off", "peer.name": "a"}, "peer.listen is off"),
        ({"peer.rdma_buffer": "1GiB", "peer.listen": "tcp://127.0.0.1:1", "peer.stream": "tcp://127.0.0.1:2"}, "rdma"),
        ({"store.replicas": "2"}, "store.master is empty"),
        ({"events.topic": "kv"}, "events.publish is off"),
        ({"events.replay_messages": "5", "events.publish": "ipc:///run/x"}, "events.replay is off"),
        ({"server.staging": "1MiB"}, "server.write_mode is in-place"),
        ({"dram.token_ids": "1MiB", "server.keep_token_ids": "false"}, "server.keep_token_ids is false"),
        ({"dram.prefault_threads": "5", "dram.prefault": "false"}, "dram.prefault is false"),
        ({"ssd.path": "", "hbm.device": "off", "server.staging": "64MiB", "events.history_chunks": "100"}, ""),
    ],
)  # fmt: skip
def test_an_option_that_does_nothing_is_named_with_the_reason(given: dict[str, str], because: str) -> None:
    idle = read_config(None, [f"{name}={value}" for name, value in given.items()]).idle
    assert [because in line for line in idle] == ([True] if because else [])


def test_a_start_logs_what_does_nothing(tmp_path: Path) -> None:
    with Daemon(tmp_path, **{"peer.name": "a"}) as daemon:
        assert "peer.name is 'a', which does nothing because peer.listen is off" in daemon.log()
