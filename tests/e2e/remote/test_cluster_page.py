"""docs/cluster.md as a program: its commands and its configuration make a fleet of three nodes, on loopback addresses."""

import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvpool.states import Level
from kvpool_tools.cli.kvpoolctl import cli
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.nodes.two_nodes import free_addresses
from tests.rigs.payload import assert_right_bytes, chunks_leased, load_all, store, tokens_of

PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
NODES = 3
CHUNKS = 10
STATS = re.compile(r"`(peer\.[a-z_.]+)`")


def _blocks(language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def _run(command: str) -> str:
    """What a command of the page prints."""
    program, *arguments = shlex.split(command, comments=True)
    assert program == "kvpoolctl"
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def _command(beginning: str) -> str:
    return next(line for block in _blocks() for line in block.splitlines() if line.startswith(beginning))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[list[Daemon]]:
    """Three daemons with the page's configuration, its paths, keys and addresses replaced."""
    listed = next(block for block in _blocks() if "node-2" in block and "kvpoold" not in block)
    replaced: dict[str, str] = {}
    addresses = free_addresses(NODES)
    for number, line in enumerate(listed.splitlines()):
        shown, name = line.split()
        directory = tmp_path / name
        directory.mkdir()
        made = _run(_command("kvpoolctl keygen").replace("/etc/kvpool", str(directory)))
        replaced |= {shown: made.strip(), f"192.0.2.1{number + 1}:9470": addresses[number]}
    (tmp_path / "nodes.allow").write_text(_with(listed, replaced))
    with ExitStack() as stack:
        daemons = []
        for number in range(NODES):
            directory = tmp_path / f"node-{number + 1}"
            paths = {"/etc/kvpool/nodes.allow": str(tmp_path / "nodes.allow"), "/etc/kvpool": str(directory)}
            (text,) = _blocks("toml")
            head, members = text.split("members", 1)
            head = head.replace("192.0.2.11:9471", "127.0.0.1:0").replace("node-1", f"node-{number + 1}")
            head = head.replace("192.0.2.11:9470", addresses[number])
            (directory / "kvpool.toml").write_text(_with(f"{head}members{members}", replaced | paths))
            daemon = Daemon(directory)
            stack.callback(daemon.__exit__)
            daemon.launch("--config", str(directory / "kvpool.toml"))
            daemons.append(daemon)
        wait_until(lambda: all(daemon.answers() for daemon in daemons), "all daemons answer")
        yield daemons


def _with(text: str, replaced: dict[str, str]) -> str:
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def _stats(daemon: Daemon) -> dict[str, str]:
    command = _command("kvpoolctl stats peer").replace("kvpoolctl", f"kvpoolctl --socket {daemon.socket}")
    lines = [line.partition(":") for line in _run(command).splitlines()]
    return {name: value for name, _, value in lines}


def test_the_page_makes_a_fleet_of_three_nodes(fleet: list[Daemon]) -> None:
    rows = re.findall(r"^\| (`peer\..*?) \| (\w+)", PAGE, re.MULTILINE)
    named = {name: expected for cell, expected in rows for name in STATS.findall(cell)}
    wait_until(lambda: all(_stats(daemon)["peer.followed.followed"] == "2" for daemon in fleet), "all follow all")
    for daemon in fleet:
        shown = _stats(daemon)
        assert set(named) <= set(shown), "the table has lines that are not printed"
        assert {name: shown[name] for name, value in named.items() if value.isdecimal()} == {
            name: value for name, value in named.items() if value.isdecimal()
        }
    one, _, three = fleet
    with one.connect() as there, three.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        assert store(there, keys).stored == CHUNKS
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the hint has come")
        assert set(pool.lookup(keys).tiers) == {Level.PEER}
        one_more = pool.keys(tokens_of(2, CHUNKS * SMALL.chunk_tokens))
        store(there, one_more)
        wait_until(lambda: pool.lookup(one_more).chunks == CHUNKS, "the hint has come")
        result, into = load_all(pool, keys)
        assert result.chunks == CHUNKS
        assert_right_bytes(keys, SMALL, result, into)
        one.kill()
        wait_until(lambda: _stats(three)["peer.links.ready"] == "1", "the dead node is known to be dead")
        assert chunks_leased(pool, pool.lookup(one_more)) == 0
        assert set(pool.lookup(keys).tiers) == {Level.DRAM}, "what was pulled stays"
        assert _run(f"kvpoolctl --socket {three.socket} info").count("tiers:dram,peer") == 1
    assert three.problems() == []
