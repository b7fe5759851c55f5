"""Prometheus' own tool on a live scrape of a node with peers, a disk and events, and on the alerting rules."""

import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.nodes.two_nodes import two_nodes, wait_known
from tests.rigs.payload import load_all, store, tokens_of

pytestmark = [
    pytest.mark.skipif("KVPOOL_ROUTERS" not in os.environ, reason="needs the readers: make test-routers"),
]
RULES = Path(__file__).parents[2] / "configs" / "kvpool-alerts.yml"
CHUNKS = 6


def promtool(*arguments: str, text: str = "") -> str:
    """What it prints about something that is sound."""
    program = shutil.which("promtool")
    assert program is not None, "promtool is missing: scripts/install-routers installs it as root (Debian's prometheus)"
    done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def used_nodes(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """Two nodes, of which one has pulled from the other."""
    options = {"server.metrics": "127.0.0.1:0", "events.publish": "tcp://127.0.0.1:0", "events.insecure": "true"}
    with two_nodes(tmp_path, may_have_spaces=False, **options) as nodes:
        with nodes[0].connect() as there, nodes[1].connect() as pool:
            keys = pool.keys(tokens_of(1, CHUNKS * pool.layout.chunk_tokens))
            store(there, keys)
            wait_known(nodes[1], CHUNKS)
            assert load_all(pool, keys)[0].chunks == CHUNKS
        yield nodes


def test_a_live_scrape_is_sound_and_without_a_complaint(used_nodes: tuple[Daemon, Daemon]) -> None:
    for daemon in used_nodes:
        wait_until(lambda: daemon.stats()["peer.links.ready"] == 1, "the nodes are connected")  # noqa: B023 - used at once
        with daemon.admin() as admin:
            address = admin.info()["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            page = answer.read().decode()
        assert "kvpool_peer" in page
        assert promtool("check", "metrics", text=page).strip() == ""


def test_the_alerting_rules_are_sound() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
