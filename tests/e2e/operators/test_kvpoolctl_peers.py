"""`kvpoolctl peers` with real daemons: one that is followed and pulled from, and one that is away."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.kvpoolctl import ctl
from tests.rigs.metrics import samples_of
from tests.rigs.nodes.two_daemons import CHUNKS, load, options_of, two_daemons
from tests.rigs.payload import store, tokens_of
from tests.rigs.runs.ports import free_port


def run(daemon: Daemon, *arguments: str) -> str:
    done = ctl(daemon, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def row_of(daemon: Daemon) -> dict[str, Any]:
    with daemon.admin() as admin:
        (row,) = admin.peers()["peers"]
    return dict(row)


@pytest.mark.slow
def test_peers_are_shown_with_what_was_taken_from_them(tmp_path: Path) -> None:
    with (
        two_daemons(tmp_path, here__server__metrics="127.0.0.1:0") as (owner, here),
        owner.connect() as there,
        here.connect() as pool,
    ):
        keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        store(there, keys)
        wait_until(lambda: row_of(here)["known_chunks"] == CHUNKS, "it is followed")
        assert load(pool, keys, CHUNKS).chunks == CHUNKS
        wait_until(lambda: row_of(here)["read_bytes"] > 0, "the pull has ended")

        report = json.loads(run(here, "peers", "--json"))
        (row,) = report["peers"]
        assert (report["members"], report["problems"]) == (1, [])
        assert report["here"]["node"] == "here"
        assert (report["here"]["members_from"], report["here"]["is_encrypted"]) == ("list", False)
        assert (row["node"], row["state"], row["known_chunks"]) == ("owner", "following", CHUNKS)
        assert (row["pulls"], row["failures"], row["last_error"]) == (1, 0, "")
        assert row["read_bytes"] == CHUNKS * SMALL.chunk_bytes
        assert row["bytes_per_s"] > 0
        assert len(row["life"]) == 32
        found = samples_of(here)
        assert found['kvpool_peers{state="following"}'] == 1
        assert found[f'kvpool_peer_node_read_bytes_total{{peer="{row["address"][6:]}"}}'] == row["read_bytes"]
        assert found["kvpool_peer_pulled_chunks_total"] == CHUNKS
        assert found['kvpool_peer_refused_messages_total{code="domain"}'] == 0

        lines = run(here, "peers").splitlines()
        assert re.fullmatch(r"this node: here at 127\.0\.0\.1:\d+, no keys, chunks not encrypted", lines[0])
        assert len({len(line) for line in lines[2:]}) == 1, "the table aligns"
        words = ("node", "address", "state", "seen", "life", "chunks", "pulls", "rate", "wait")
        assert all(word in lines[3] for word in words)
        for word in ("owner", "127.0.0.1:", "following", "now", row["life"][:8], "480.0 KiB"):
            assert word in lines[5], lines

        owner.kill()
        wait_until(lambda: row_of(here)["state"] == "away", "it is away")
        gone = row_of(here)
        assert gone["last_error"]
        assert 0 <= gone["away_s"] < 60
        unchanged = ("node", "life", "pulls", "failures", "read_bytes")
        assert [gone[name] for name in unchanged] == [row[name] for name in unchanged]
        shown = run(here, "peers")
        assert re.search(r"owner .* away .* ago ", shown)
        assert re.search(
            r"latest error of owner: (the connection ended|it cannot be connected: nobody listens there)", shown
        )
        owner.start()
        wait_until(lambda: row_of(here)["state"] == "following", "its next life is followed")
        assert row_of(here)["life"] != row["life"]


def test_a_daemon_without_peers_says_so(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        assert run(daemon, "peers") == (
            "this node has no peers: set peer.listen and peer.stream, and restart the daemon (docs/cluster.md)\n"
        )
        expected: dict[str, Any] = {"here": None, "problems": [], "members": 0, "peers": []}
        assert json.loads(run(daemon, "peers", "--json")) == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ("", "no other node is known: peer.members in the configuration names them"),
        ("127.0.0.1:{port}", "no other node is known: peer.members lists none but this one that may be used"),
    ],
)
def test_a_node_that_knows_no_other_one_reports_why(tmp_path: Path, members: str, expected: str) -> None:
    port = free_port()
    options = {**options_of("alone", port), "peer.members": members.format(port=port)}
    with Daemon(tmp_path, **options) as daemon:
        lines = run(daemon, "peers").splitlines()
        assert lines == [f"this node: alone at 127.0.0.1:{port}, no keys, chunks not encrypted", expected]


def test_the_ready_line_has_this_node_among_others(tmp_path: Path) -> None:
    port = free_port()
    with Daemon(tmp_path, **options_of("alone", port, 1, 2)) as daemon:
        (line,) = [line for line in daemon.log().splitlines() if " ready in " in line]
        assert line.endswith(f", peers: alone at 127.0.0.1:{port}, 2 members, no keys, encryption off")
    with Daemon(tmp_path) as daemon:
        (line,) = [line for line in daemon.log().splitlines() if " ready in " in line][1:]
        assert line.endswith(", no peers")


def test_an_address_that_cannot_be_bound_is_named_with_its_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for name in ("listen", "stream"):
            daemon = Daemon(tmp_path, **{**options_of("alone", 0), f"peer.{name}": address, "peer.members": ""})
            daemon.launch()
            assert daemon.process is not None
            assert daemon.process.wait(60.0) == 1
            assert f"peer.{name} {address} cannot be bound: Address already in use" in daemon.log()


@pytest.mark.slow
def test_a_source_that_cannot_be_asked_is_shown(tmp_path: Path) -> None:
    options = {**options_of("alone", free_port()), "peer.members": "etcd:http://127.0.0.1:1"}
    with Daemon(tmp_path, **options) as daemon:
        wait_until(lambda: "it cannot be connected" in run(daemon, "peers"), "the problem is shown")
        *_, problem, nobody = run(daemon, "peers").splitlines()
        assert problem.startswith("problem: peers: etcd:http://127.0.0.1:1 gives no members, 0 known ones stay: ")
        assert nobody == "no other node is known: etcd:http://127.0.0.1:1 has none yet"
        assert json.loads(run(daemon, "peers", "--json"))["problems"] == [problem.removeprefix("problem: ")]
