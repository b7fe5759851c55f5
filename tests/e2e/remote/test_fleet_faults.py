"""Each row of the table of faults in docs/cluster.md: what an operator is shown, and that it is over when it is mended."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from kvpool.config.curve_keys import KeyPair, make_key_pair, write_key_file
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.nodes.two_nodes import free_addresses, wait_known
from tests.rigs.payload import load_all, store, tokens_of

PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
CHUNKS = 8


def rows_of_page() -> dict[str, str]:
    """What health shows, by the symptom's first words."""
    table = PAGE.partition("## What is wrong with a fleet")[2].partition("\n## ")[0]
    rows = [row.strip("|").split(" | ") for row in table.splitlines() if row.startswith("| ") and " | " in row]
    return {row[0].strip(): row[1].strip().strip("`") for row in rows[1:]}


class Fleet:
    """Two nodes with keys of their own. `addresses`: of their listeners."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.addresses = free_addresses(2)
        self.pairs = [make_key_pair() for _ in self.addresses]
        self.nodes: list[Daemon] = []
        self._stack = stack

    def allow(self, node: int, pairs: list[KeyPair]) -> None:
        """Write a node's list of admitted keys."""
        (self.directory / f"allow-{node}").write_text("".join(f"{pair.public.decode()}\n" for pair in pairs))

    def make(self, node: int, **further: str) -> Daemon:
        """A node, not started, which admits both keys."""
        (self.directory / str(node)).mkdir()
        key = self.directory / f"key-{node}"
        write_key_file(str(key), self.pairs[node])
        self.allow(node, self.pairs)
        listed = zip(self.addresses, self.pairs, strict=True)
        options = {
            "peer.listen": f"tcp://{self.addresses[node]}",
            "peer.stream": "tcp://127.0.0.1:0",
            "peer.name": f"node-{node}",
            "peer.members": ", ".join(f"{address} {pair.public.decode()}" for address, pair in listed),
            "peer.keys": str(key),
            "peer.allow": str(self.directory / f"allow-{node}"),
            "peer.shm": "false",
        }
        made = Daemon(self.directory / str(node), **{**options, **further})
        self._stack.callback(made.__exit__)
        self.nodes.append(made)
        return made


@contextmanager
def fleet_of(directory: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(directory, stack)


def health_of(daemon: Daemon) -> str:
    """All that health says, in one text."""
    with daemon.admin() as admin:
        return "\n".join(admin.info()["problems"])


def is_shown(daemon: Daemon, symptom: str, *names: str) -> Callable[[], bool]:
    """Whether health has the page's words for a symptom, with these names."""
    words = rows_of_page()[symptom]
    pattern = re.compile(".*".join(re.escape(part.strip("…` ")) for part in re.split(r"ADDRESS|NODE|…", words)))

    def look() -> bool:
        text = health_of(daemon)
        return bool(pattern.search(text)) and all(name in text for name in names)

    return look


def is_well(daemon: Daemon) -> bool:
    return "peers:" not in health_of(daemon) and daemon.stats()["peer.links.ready"] == 1


def test_a_key_that_is_not_admitted_is_shown_and_admitted_by_a_reload(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        here, there = fleet.make(0), fleet.make(1)
        fleet.allow(1, fleet.pairs[1:])
        here.start()
        there.start()
        wait_until(is_shown(here, "a wrong key", fleet.addresses[1]), "health says whose key is wrong")
        wait_until(lambda: "is not in peer.allow" in health_of(there), "the other node says so of the member")
        assert f"{fleet.addresses[1]}: it cannot be connected" in here.log()
        fleet.allow(1, fleet.pairs)
        there.signal(signal.SIGHUP)
        wait_until(lambda: "peer.allow: 2 keys, 1 of them new, 0 no longer" in there.log(), "it is read again")
        wait_until(lambda: is_well(here) and is_well(there), "nothing is wrong any more")
        fleet.allow(1, fleet.pairs[1:])
        there.signal(signal.SIGHUP)
        wait_until(lambda: "1 keys, 0 of them new, 1 no longer" in there.log(), "it is read again")
        wait_until(lambda: there.stats()["peer.asked.pullers"] == there.stats()["peer.links.ready"] == 0, "it is out")
        there.signal(signal.SIGHUP)
        wait_until(lambda: "reloaded: no option has changed" in there.log(), "the same keys are no change")


def test_a_reload_that_adds_a_key_interrupts_nothing(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        here, there = fleet.make(0), fleet.make(1, **{"peer.rate": "64KiB"})
        here.start()
        there.start()
        wait_until(lambda: is_well(here) and is_well(there), "the nodes are connected")
        with there.connect() as owner, here.connect() as pool:
            keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
            store(owner, keys)
            wait_known(here, CHUNKS)
            with pool.acquire(pool.lookup(keys)) as lease:
                fleet.allow(1, [*fleet.pairs, make_key_pair()])
                there.signal(signal.SIGHUP)
                wait_until(lambda: "peer.allow: 3 keys, 1 of them new, 0 no longer" in there.log(), "it is read again")
                into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
                assert pool.load(lease, into=into).wait().reason == "complete"
        assert here.stats()["peer.links.disconnects"] == 0


def test_another_domain_is_shown_on_both_sides(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    with fleet_of(tmp_path) as fleet:
        here, there = fleet.make(0), fleet.make(1, **{"server.domain_secret_file": str(secret)})
        here.start()
        there.start()
        for daemon, address in zip((here, there), reversed(fleet.addresses), strict=True):
            wait_until(is_shown(daemon, "another trust domain", address), "health names the domain")


def test_a_second_node_of_a_name_is_shown_everywhere_and_the_first_is_used(tmp_path: Path) -> None:
    """Without keys of their own, nothing shows which one is the right one."""
    addresses = free_addresses(3)
    with ExitStack() as stack:
        nodes = []
        for number, (name, address) in enumerate(zip(("here", "twin", "twin"), addresses, strict=True)):
            (tmp_path / str(number)).mkdir()
            options = {
                "peer.listen": f"tcp://{address}",
                "peer.stream": "tcp://127.0.0.1:0",
                "peer.name": name,
                "peer.members": ", ".join(addresses),
            }
            nodes.append(Daemon(tmp_path / str(number), **options))
            stack.callback(nodes[-1].__exit__)
        here, first, second = nodes
        here.start()
        first.start()
        wait_until(lambda: here.stats()["peer.followed.followed"] == 1, "the first one is followed")
        second.start()
        wait_until(is_shown(here, "a name twice", addresses[2], addresses[1]), "health names both")
        wait_until(lambda: "is the second of its name" in health_of(second), "the second one says so")
        with first.connect() as there, here.connect() as pool:
            keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
            store(there, keys)
            wait_known(here, CHUNKS)
            assert load_all(pool, keys)[0].chunks == CHUNKS, "the first one is asked"
        assert first.stop() == 0
        with second.connect() as there, here.connect() as pool:
            keys = pool.keys(tokens_of(2, CHUNKS * SMALL.chunk_tokens))
            store(there, keys)
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the second one is used now")
            assert load_all(pool, keys)[0].chunks == CHUNKS


def test_a_daemon_that_is_down_is_no_problem_of_health_and_the_log_has_its_comings_and_goings(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        here, there = fleet.make(0), fleet.make(1)
        here.start()
        wait_until(lambda: "it cannot be connected: nobody listens there" in here.log(), "it is logged")
        with here.admin() as admin:
            (row,) = admin.peers()["peers"]
        assert (row["state"], row["last_error"]) == ("away", "it cannot be connected: nobody listens there")
        assert "peers:" not in health_of(here)
        there.start()
        wait_until(lambda: is_well(here), "it is connected")
