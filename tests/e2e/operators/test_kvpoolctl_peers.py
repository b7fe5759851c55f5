"""`kvpoolctl peers` with real daemons: one that is followed and pulled from, and one that is away."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.remote.test_two_daemons import CHUNKS, load, two_daemons
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import store, tokens_of


def run(daemon: Daemon, *arguments: str) -> str:
    command = [sys.executable, "-m", "kvpool.cli.kvpoolctl", "--socket", daemon.socket, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def row_of(daemon: Daemon) -> dict[str, Any]:
    with daemon.admin() as admin:
        (row,) = admin.peers()["peers"]
    return dict(row)


def scrape(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(path)
        asking.sendall(b"GET /metrics HTTP/1.0\r\nHost: a\r\n\r\n")
        with asking.makefile("rb") as answer:
            return answer.read().decode()


def test_peers_are_shown_with_what_was_taken_from_them(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics")
    with (
        two_daemons(tmp_path, here__server__metrics_socket=path) as (owner, here),
        owner.connect() as there,
        here.connect() as pool,
    ):
        keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        store(there, keys)
        wait_until(lambda: row_of(here)["known_chunks"] == CHUNKS, "it is followed")
        assert load(pool, keys, CHUNKS).chunks == CHUNKS
        wait_until(lambda: row_of(here)["read_bytes"] > 0, "the pull has ended")

        (row,) = json.loads(run(here, "peers", "--json"))["peers"]
        assert (row["node"], row["state"], row["known_chunks"]) == ("owner", "following", CHUNKS)
        assert (row["pulls"], row["failures"], row["last_error"]) == (1, 0, "")
        assert row["read_bytes"] == CHUNKS * SMALL.chunk_bytes
        assert row["bytes_per_s"] > 0
        assert len(row["life"]) == 32

        page = scrape(path)
        assert 'kvpool_peers{state="following"} 1.0' in page
        assert f'kvpool_peer_node_read_bytes_total{{peer="{row["address"][6:]}"}} {row["read_bytes"]}.0' in page
        assert f"kvpool_peer_pulled_chunks_total {CHUNKS}.0" in page
        assert 'kvpool_peer_refused_messages_total{code="domain"} 0.0' in page

        lines = run(here, "peers").splitlines()
        assert len({len(line) for line in lines[1:]}) == 1, "the table aligns"
        assert all(word in lines[2] for word in ("node", "address", "state", "life", "chunks", "pulls", "rate", "wait"))
        for word in ("owner", "127.0.0.1:", "following", row["life"][:8], "480.0 KiB"):
            assert word in lines[4], lines

        owner.kill()
        wait_until(lambda: row_of(here)["state"] == "away", "it is away")
        assert row_of(here)["last_error"]
        owner.start()
        wait_until(lambda: row_of(here)["state"] == "following", "its next life is followed")
        assert row_of(here)["life"] != row["life"]


def test_a_daemon_without_peers_says_so(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        assert run(daemon, "peers") == "no other node is known: peer.members in the configuration names them\n"
        assert json.loads(run(daemon, "peers", "--json")) == {"peers": []}
