"""Two daemons that find each other by etcd: joining, leaving, a new life, and etcd away."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.nodes.two_daemons import load
from tests.rigs.payload import store, tokens_of
from tests.rigs.runs.etcd import Etcd
from tests.rigs.runs.ports import free_port

CHUNKS = 8
pytestmark = pytest.mark.slow


@contextmanager
def fleet(directory: Path, etcd: Etcd, *names: str) -> Iterator[list[Daemon]]:
    """Daemons that are members of one fleet, none of them started."""
    made = []
    for name in names:
        (directory / name).mkdir()
        options = {
            "peer.listen": f"tcp://127.0.0.1:{free_port()}",
            "peer.stream": "tcp://127.0.0.1:0",
            "peer.name": name,
            "peer.members": f"etcd:{etcd.url}/test/fleet",
            "peer.members_refresh": "100ms",
        }
        made.append(Daemon(directory / name, **options))
    try:
        yield made
        for daemon in made:
            assert daemon.process is None or daemon.process.poll() is not None or daemon.problems() == []
    finally:
        for daemon in made:
            daemon.__exit__()


def wait_members(daemon: Daemon, count: int) -> None:
    wait_until(lambda: daemon.stats()["peer.members.members"] == count, f"{count} members are known")


def wait_hit(pool: kv.Pool, keys: kv.KeyChain) -> None:
    wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the hint has come")
    assert load(pool, keys, CHUNKS).reason == "complete"


def test_nodes_join_leave_and_begin_new_lives_and_go_on_without_etcd(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd, fleet(tmp_path, etcd, "owner", "here") as (owner, here):
        here.start()
        assert here.stats()["peer.members.members"] == 0
        owner.start()
        wait_members(here, 1)
        wait_members(owner, 1)
        with here.connect() as pool:
            chains = [pool.keys(tokens_of(number, CHUNKS * SMALL.chunk_tokens)) for number in range(3)]
            with owner.connect() as there:
                store(there, chains[0])
                wait_hit(pool, chains[0])

            owner.kill()
            owner.start()
            wait_until(lambda: here.stats()["peer.links.ready"] == 1, "the new life is connected")
            with owner.connect() as there:
                store(there, chains[1])
                wait_hit(pool, chains[1])

                etcd.kill()
                wait_until(lambda: any("gives no members" in line for line in here.problems()), "it is reported")
                store(there, chains[2])
                wait_hit(pool, chains[2])
            assert here.stats()["peer.members.members"] == 1

        etcd.start()
        wait_until(lambda: owner.problems() == here.problems() == [], "etcd is back")
        assert here.stats()["peer.links.ready"] == 1
        assert owner.stop() == 0
        wait_members(here, 0)
        assert here.stats()["peer.links.links"] == 0
        owner.start()
        wait_members(here, 1)
        owner.kill()
        wait_members(here, 0)
