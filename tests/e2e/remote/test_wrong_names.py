"""A node with another node's name by mistake: reported with what to do, and forgotten when the operator has corrected it."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpool.config.curve_keys import make_key_pair, write_key_file
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.nodes.two_nodes import free_addresses

NAMES = ("here", "mistaken", "right")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Daemon]]:
    """Three nodes with keys, none of them started."""
    addresses, pairs = free_addresses(len(NAMES)), [make_key_pair() for _ in NAMES]
    listed = [f"{address} {pair.public.decode()}" for address, pair in zip(addresses, pairs, strict=True)]
    (tmp_path / "allow").write_text("".join(f"{pair.public.decode()}\n" for pair in pairs))
    with ExitStack() as stack:
        made = []
        for name, address, pair in zip(NAMES, addresses, pairs, strict=True):
            (tmp_path / name).mkdir()
            write_key_file(str(tmp_path / name / "key"), pair)
            options = {
                "peer.listen": f"tcp://{address}",
                "peer.stream": "tcp://127.0.0.1:0",
                "peer.name": name,
                "peer.members": ", ".join(listed),
                "peer.keys": str(tmp_path / name / "key"),
                "peer.allow": str(tmp_path / "allow"),
            }
            made.append(Daemon(tmp_path / name, **options))
            stack.callback(made[-1].__exit__)
        yield made


def rows_of(daemon: Daemon) -> dict[str, tuple[str, str]]:
    """State and error of each peer, by its port."""
    with daemon.admin() as admin:
        peers = admin.peers()["peers"]
    return {row["address"].rpartition(":")[2]: (row["state"], row["code"]) for row in peers}


def states_of(daemon: Daemon) -> list[str]:
    return sorted(state for state, _ in rows_of(daemon).values())


def links_of(daemon: Daemon) -> tuple[Any, Any]:
    stats = daemon.stats()
    return stats["peer.links.ready"], stats["peer.links.doubles"]


def test_a_corrected_name_is_free_for_its_node_without_a_restart_of_others(nodes: list[Daemon]) -> None:
    here, mistaken, right = nodes
    here.start()
    mistaken.start("--set=peer.name=right")
    wait_until(lambda: "following" in states_of(here), "the wrong name is known first")
    right.start()
    wait_until(lambda: ("refused", "name") in rows_of(here).values(), "the right node is a double")
    assert links_of(here) == (1, 1)
    assert any("calls itself 'right'" in line and "peer.name of its own" in line for line in here.problems())
    assert any("has this node's name, 'right'" in line for line in right.problems())

    assert mistaken.stop() == 0
    mistaken.start()
    wait_until(lambda: states_of(here) == ["following", "following"], "both are followed")
    assert links_of(here) == (2, 0)
    wait_until(lambda: here.problems() == right.problems() == [], "nothing is wrong any more")
