"""Two daemons whose chunks come by TransferEngine or NIXL, and what a stranger can do to what is registered with it.

KVPOOL_RDMA_PROTOCOL (tcp), KVPOOL_RDMA_DEVICE and KVPOOL_RDMA_HOST choose what it uses, so that the same tests run where there
is RDMA. The packages are optional: `needs_engine`, `needs_nixl` and `LIBRARY` skip where one is missing, with the reason.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.config.curve_keys import make_key_pair, write_key_file
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.payload import assert_right_bytes
from tests.rigs.runs.ports import free_port

PROTOCOL = os.environ.get("KVPOOL_RDMA_PROTOCOL", "tcp")
DEVICES = os.environ.get("KVPOOL_RDMA_DEVICE", "")
HOST = os.environ.get("KVPOOL_RDMA_HOST", "127.0.0.1")
# Emulated RDMA in an emulated machine is slow: waits last so much longer there.
PATIENCE = 1.0 if PROTOCOL == "tcp" else 8.0
CHILD = "kvpool.transfer.engine.child"


def _missing(package: str, module: str) -> str:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{package} is not installed"
    found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    last = (found.stderr.strip().splitlines() or [""])[-1]
    return f"{module} cannot be imported: {last}" if found.returncode else ""


REASON = _missing("mooncake-transfer-engine-non-cuda", "mooncake.engine")
NIXL_REASON = _missing("nixl-cu12", "nixl_cu12._api")
needs_engine = pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")
needs_nixl = pytest.mark.skipif(bool(NIXL_REASON), reason=NIXL_REASON or "it is there")
# Of tests that hold for both.
LIBRARY = pytest.mark.parametrize(
    "library", [pytest.param("mooncake", marks=needs_engine), pytest.param("nixl", marks=needs_nixl)]
)
TRANSPORTS = {"mooncake": "rdma", "nixl": "nixl"}


@contextmanager
def engine_daemons(directory: Path, library: str = "mooncake", **further: str) -> Iterator[tuple[Daemon, Daemon]]:
    """Two peers, owner and puller, both with the library. Options that differ: `owner__NAME`, `here__NAME`."""
    pair = make_key_pair()
    write_key_file(str(directory / "key"), pair)
    (directory / "allow").write_text(pair.public.decode() + "\n")
    ports = {"owner": free_port(HOST), "here": free_port(HOST)}
    made = {}
    for name in ("owner", "here"):
        (directory / name).mkdir()
        options = {
            "peer.listen": f"tcp://{HOST}:{ports[name]}",
            "peer.stream": f"tcp://{HOST}:0",
            "peer.name": name,
            "peer.members": ", ".join(f"{HOST}:{port}" for port in ports.values()),
            "peer.keys": str(directory / "key"),
            "peer.allow": str(directory / "allow"),
            "peer.transport": TRANSPORTS[library],
            "peer.shm": "false",
            "peer.rdma_protocol": PROTOCOL,
            "peer.rdma_devices": DEVICES,
            "peer.rdma_buffer": "8MiB",
            "peer.answer_timeout": f"{2 * PATIENCE:g}s",
            "peer.stall_timeout": f"{2 * PATIENCE:g}s",
            "peer.pull_timeout": f"{5 * PATIENCE:g}s",
        }
        for key, value in further.items():
            if key.startswith(f"{name}__"):
                options[key.removeprefix(f"{name}__").replace("__", ".")] = value
        made[name] = Daemon(directory / name, **options)
    with made["owner"] as owner, made["here"] as here:
        yield owner, here
        for daemon in (owner, here):
            assert daemon.process is None or daemon.process.poll() is not None or daemon.problems() == []


def serving(*daemons: Daemon) -> None:
    """Wait until these daemons' libraries serve."""
    for daemon in daemons:
        until(lambda daemon=daemon: daemon.stats().get("peer.rdma.serving") == 1, "the library serves")  # type: ignore[misc]


def connected(owner: Daemon, here: Daemon) -> None:
    """Wait until both serve, and `here` has connected to the owner."""
    serving(owner, here)
    until(lambda: here.stats()["peer.rdma.connections"] > 0, "it is connected")


def until(condition: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
    """Until the condition holds, as long as it takes with this protocol."""
    wait_until(condition, what, timeout_s * PATIENCE)


def child_of(daemon: Daemon) -> int:
    """The process of a daemon's library."""
    assert daemon.process is not None
    children = Path(f"/proc/{daemon.process.pid}/task").glob("*/children")
    found = {int(one) for path in children for one in path.read_text().split()}
    (child,) = [one for one in found if CHILD in Path(f"/proc/{one}/cmdline").read_text()]
    return child


def load(pool: kv.Pool, keys: kv.KeyChain, layout: kv.Layout) -> kv.LoadResult:
    """Load what there is of a chain, and compare its bytes."""
    into = np.zeros((len(keys), layout.chunk_bytes), np.uint8)
    lease = pool.acquire(pool.lookup(keys))
    result = pool.load(lease, into=into[: lease.chunks]).wait()
    lease.release()
    assert_right_bytes(keys, layout, result, into)
    return result
