"""An operator's role across users: the kernel decides, at the real socket."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.rigs.daemon import Daemon

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
ENGINE_UID, ENGINE_GID, OPERATORS_GID = 61_001, 61_002, 61_003

# The connection is made after the change of user; its modules are imported before, as the other user may not read them.
ASK = """
import json, os, sys
from kvpool.errors import Refused
from kvpool.protocol.blocking import BlockingConnection
import kvpool_client as kv
from tests.rigs.daemon import SMALL
folder = os.open(sys.argv[1], os.O_RDONLY)
os.setgroups(json.loads(sys.argv[2]))
os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[4]))
socket = f"/proc/self/fd/{folder}/kvpool.sock"
with kv.connect(socket, model="m", layout=SMALL) as pool:
    answers = {"engine": pool.connected}
try:
    with BlockingConnection.admin(socket, 5.0) as connection:
        answers["admin"] = connection.flush(None, None)
except Refused as error:
    answers["admin"] = str(error)
print(json.dumps(answers))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory for a socket that another user may enter."""
    path = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def _ask(daemon: Daemon, groups: Sequence[int], gid: int = ENGINE_GID, uid: int = ENGINE_UID) -> dict[str, object]:
    os.chown(daemon.socket, 0, ENGINE_GID)
    command = [sys.executable, "-c", ASK, str(Path(daemon.socket).parent), json.dumps(list(groups)), str(gid), str(uid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    answers: dict[str, object] = json.loads(done.stdout)
    return answers


def test_an_engines_user_may_save_and_load_and_not_give_orders(folder: Path) -> None:
    with Daemon(folder) as daemon:
        answers = _ask(daemon, [])
        assert answers["engine"]
        assert str(answers["admin"]).startswith(
            f"role: uid {ENGINE_UID} is no operator of this daemon; root, uid 0 and no group"
        )
        assert "flush by" not in daemon.log()
        assert _ask(daemon, [], 0, 0)["admin"] == {"chunks": 0, "bytes": 0, "skipped": 0}
        assert "flush by pid " in daemon.log()
        assert " uid 0: model='' older_than_s=-1.0 tier=''" in daemon.log()


def test_members_of_the_operators_group_may_give_orders(folder: Path) -> None:
    with Daemon(folder, **{"server.admin_group": str(OPERATORS_GID)}) as daemon:
        assert "add the user to that group" in str(_ask(daemon, [])["admin"])
        assert _ask(daemon, [OPERATORS_GID, ENGINE_GID])["admin"] == {"chunks": 0, "bytes": 0, "skipped": 0}
        assert f" uid {ENGINE_UID}: model=''" in daemon.log()
