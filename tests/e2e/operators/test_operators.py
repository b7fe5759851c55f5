"""An operator's role across users: the kernel decides, at the real socket."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.daemon import Daemon, spawn

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
ENGINE_UID, ENGINE_GID, OPERATORS_GID = 61_001, 61_002, 61_003

# Answers each line in a process of its own, as the user that it names. The connection is made after the change of user; its
# modules are imported before, as the other user may not read them.
ASK = """
import json, os, sys
from kvpool.errors import Refused
from kvpool.protocol.blocking import BlockingConnection
import kvpool_client as kv
from tests.rigs.daemon import SMALL

def answers_of(directory, groups, gid, uid):
    folder = os.open(directory, os.O_RDONLY)
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    socket = f"/proc/self/fd/{folder}/kvpool.sock"
    with kv.connect(socket, model="m", layout=SMALL) as pool:
        answers = {"engine": pool.connected}
    try:
        with BlockingConnection.admin(socket, 60.0) as connection:
            answers["admin"] = connection.flush(None, None)
    except Refused as error:
        answers["admin"] = str(error)
    return answers

for line in sys.stdin:
    child = os.fork()
    if not child:
        print(json.dumps(answers_of(*json.loads(line))), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(json.dumps({"engine": False, "admin": "died"}))
"""
Ask = Callable[..., dict[str, object]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory for a socket that another user may enter."""
    path = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Asks a daemon as another user."""
    with spawn(ASK) as process:

        def ask_as(daemon: Daemon, groups: Sequence[int], gid: int = ENGINE_GID, uid: int = ENGINE_UID) -> Any:
            os.chown(daemon.socket, 0, ENGINE_GID)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([str(Path(daemon.socket).parent), list(groups), gid, uid]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask_as


def test_an_engines_user_may_save_and_load_and_not_give_orders(folder: Path, ask: Ask) -> None:
    with Daemon(folder) as daemon:
        answers = ask(daemon, [])
        assert answers["engine"]
        assert str(answers["admin"]).startswith(
            f"role: uid {ENGINE_UID} is no operator of this daemon; operators are root: "
        )
        assert "flush by" not in daemon.log()
        assert ask(daemon, [], 0, 0)["admin"] == {"chunks": 0, "bytes": 0, "skipped": 0, "durable": True}
        assert "flush by pid " in daemon.log()
        assert " uid 0: model='' older_than_s=-1.0 tier=''" in daemon.log()


def test_members_of_the_operators_group_may_give_orders(folder: Path, ask: Ask) -> None:
    with Daemon(folder, **{"server.admin_group": str(OPERATORS_GID)}) as daemon:
        assert "add the user to that group" in str(ask(daemon, [])["admin"])
        assert ask(daemon, [OPERATORS_GID, ENGINE_GID])["admin"] == {
            "chunks": 0,
            "bytes": 0,
            "skipped": 0,
            "durable": True,
        }
        assert f" uid {ENGINE_UID}: model=''" in daemon.log()
