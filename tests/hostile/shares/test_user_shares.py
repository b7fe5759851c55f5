"""A user who opens every possible chunk size: another user's engine can still connect, and the first one's waits for room."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.daemon import Daemon, spawn

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
# A segment for each of 64 sizes.
ROOMY = {"dram.capacity": "128MiB", "dram.segment": "1MiB"}
GREEDY_UID, OTHER_UID, GROUP = 61_011, 61_012, 61_013

# Prints how many connections with different chunk sizes it got, from which number on the command line; then obeys commands.
OPEN_SIZES = """
import os, sys
from dataclasses import replace
import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.protocol.blocking import BlockingConnection
from tests.rigs.daemon import SMALL, wait_connected
from tests.hostile.rigs.raw_clients import TIMEOUT_S, hello_of
folder = os.open(sys.argv[1], os.O_RDONLY)
os.setgroups([])
os.setgid(int(sys.argv[4]))
os.setuid(int(sys.argv[2]))
socket = f"/proc/self/fd/{folder}/kvpool.sock"
layouts = [replace(SMALL, layers=1 + number % 8, chunk_tokens=1 + number // 8) for number in range(72)]
opened, reason = [], ""
for layout in layouts[int(sys.argv[3]) :]:
    try:
        opened.append(BlockingConnection(socket, hello_of(layout), TIMEOUT_S))
    except Refused as error:
        reason = str(error)
        break
print(len(opened), reason)
with kv.connect(socket, model="m", layout=layouts[-1]) as waiting:
    print(waiting.connected)
    for line in sys.stdin:
        opened.pop().close()
        wait_connected(waiting)
        print(waiting.connected)
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon whose socket other users may pass to."""
    path = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
    path.chmod(0o755)
    with Daemon(path, **{"server.user_quota": "0.75", "server.socket_mode": "0660", **ROOMY}) as started:
        yield started
        assert started.problems() == []
    shutil.rmtree(path)


def _says(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
def test_another_users_engine_connects_though_a_user_opens_every_chunk_size(daemon: Daemon) -> None:
    folder = str(Path(daemon.socket).parent)
    os.chown(daemon.socket, 0, GROUP)
    with spawn(OPEN_SIZES, folder, str(GREEDY_UID), "0", str(GROUP)) as greedy:
        assert _says(greedy).startswith(f"48 full: uid {GREEDY_UID} keeps chunk sizes by its")
        assert _says(greedy) == "False"
        with spawn(OPEN_SIZES, folder, str(OTHER_UID), "56", str(GROUP)) as other:
            assert _says(other).startswith("12 full")  # three quarters of what is left
            assert _says(other) == "False"
            _close_one(other)
            assert _says(other) == "True"
        _close_one(greedy)
        assert _says(greedy) == "True"


# Stores a chunk of every size, one connection after the other; prints how many were stored.
STORE_SIZES = """
import os, sys
from dataclasses import replace
import numpy as np
import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.protocol.blocking import BlockingConnection
from tests.rigs.daemon import SMALL, wait_connected
from tests.hostile.rigs.raw_clients import TIMEOUT_S, hello_of
folder = os.open(sys.argv[1], os.O_RDONLY)
os.setgroups([])
os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[2]))
socket = f"/proc/self/fd/{folder}/kvpool.sock"
stored = 0
for number in range(72):
    layout = replace(SMALL, layers=1 + number % 8, chunk_tokens=1 + number // 8)
    try:
        BlockingConnection(socket, hello_of(layout), TIMEOUT_S).close()
    except Refused:
        continue
    with kv.connect(socket, model="m", layout=layout) as pool:
        wait_connected(pool)
        keys = pool.keys(list(range(layout.chunk_tokens)))
        stored += pool.save(keys, from_=np.zeros((1, layout.chunk_bytes), np.uint8)).commit().stored
print(stored)
"""


def test_chunks_left_behind_in_every_size_do_not_take_the_share_of_others(daemon: Daemon) -> None:
    folder = str(Path(daemon.socket).parent)
    os.chown(daemon.socket, 0, GROUP)
    with spawn(STORE_SIZES, folder, str(GREEDY_UID), str(GROUP)) as greedy:
        assert _says(greedy) == "48"
    with spawn(OPEN_SIZES, folder, str(OTHER_UID), "60", str(GROUP)) as other:
        assert _says(other).startswith("12")
        assert _says(other) == "True"


def _close_one(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("close one\n")
    process.stdin.flush()
