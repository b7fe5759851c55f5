"""Three nodes whose engines save and load the same chains at random while nodes are killed, stopped, flushed and go on.

Every byte that any of them serves is compared; in the end nothing is held, and each node knows exactly what the others have.
"""

import random
import select
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.rigs.traffic import Traffic
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.nodes.two_nodes import assert_converged, free_addresses

pytestmark = pytest.mark.campaign

NODES = 3
ENGINES = 3  # of each node
CHAINS = 40
STORM_S = 12.0
# Gauges of what requests hold.
HELD = ("leases", "reservations", "tickets", "peer.pulls_under_way", "peer.offers.offers")


def daemon_of(directory: Path, number: int, addresses: list[str], dice: random.Random) -> Daemon:
    """A node of its own size, with a disk or none."""
    name = f"node-{number}"
    (directory / name).mkdir()
    disk = {"ssd.path": str(directory / name / "ssd"), "ssd.capacity": "64MiB"} if dice.random() < 0.5 else {}
    options = {
        "peer.name": name,
        "peer.listen": f"tcp://{addresses[number]}",
        "peer.stream": "tcp://127.0.0.1:0",
        "peer.members": ", ".join(addresses),
        "dram.capacity": dice.choice(("2MiB", "8MiB")),
        "server.write_mode": dice.choice(("in-place", "copy")),
        **disk,
    }
    return Daemon(directory / name, **options)


def strike(daemon: Daemon, dice: random.Random) -> None:
    """Something that happens to a node, which is whole again afterwards."""
    what = dice.choice(("kill", "stop", "pause", "flush", "demote", "check"))
    if what == "kill":
        daemon.kill()
        daemon.start()
    elif what == "stop":
        assert daemon.stop() == 0
        daemon.start()
    elif what == "pause":
        daemon.signal(signal.SIGSTOP)
        select.select([], [], [], dice.uniform(0.0, 3.0))
        daemon.signal(signal.SIGCONT)
    elif what == "check":
        assert daemon.problems(deep=False) == []
    else:
        with daemon.admin() as admin:
            admin.flush(None, None, "dram") if what == "flush" else admin.demote_all(2.0)


def holds_nothing(daemon: Daemon) -> bool:
    stats = daemon.stats()
    return all(stats[name] == 0 for name in HELD)


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_leaves_right_bytes_and_nodes_that_agree(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    addresses = free_addresses(NODES)
    with ExitStack() as stack:
        nodes = [stack.enter_context(daemon_of(tmp_path, number, addresses, dice)) for number in range(NODES)]
        tallies = []
        with ExitStack() as storm:
            for number in range(NODES * ENGINES):
                traffic = Traffic(nodes[number % NODES], 100 * seed + number, chains=CHAINS)
                tallies.append(storm.enter_context(traffic).tally)
            end = time.monotonic() + STORM_S
            while time.monotonic() < end:
                select.select([], [], [], dice.uniform(0.0, 1.0))
                strike(dice.choice(nodes), dice)
        assert sum(tally.served for tally in tallies) > 0
        for node in nodes:
            wait_until(lambda: holds_nothing(node), f"{node.node} holds nothing")  # noqa: B023 - used at once
            found = [problem for problem in node.problems() if not problem.startswith("ssd: chunk ")]
            assert found == [], "but for rows of slots that were written anew just before a kill"
            assert node.problems() == [], "which are dropped"
        wait_until(
            lambda: all(int(node.stats()["peer.followed.followed"]) == NODES - 1 for node in nodes),
            "the nodes follow each other",
        )
        assert_converged(*nodes)
