"""Names of connections: operators see them in the list, the audit and the refusals; they are bounded, escaped and no proof."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

import kvpool_client as kv
from kvpool.errors import InvalidArgument, Refused
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool_tools.cli.kvpoolctl import cli
from tests.rigs.daemon import SMALL, Daemon

BOUND = m.CONNECTION_NAME_BYTES_MAX


def _named(daemon: Daemon) -> dict[str, Any]:
    run = CliRunner().invoke(cli, ["--socket", daemon.socket, "connections", "--json"], catch_exceptions=False)
    return {row["name"]: row for row in json.loads(run.stdout)["connections"]}


def _greet(daemon: Daemon, name: bytes, model: str = "m") -> BlockingConnection:
    hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, model, SMALL.to_wire(), name=name)
    return BlockingConnection(daemon.socket, hello, 30.0)


def test_a_connection_is_listed_by_its_name(daemon: Daemon) -> None:
    with daemon.connect(name="vllm pod-7 rank 1 of 2"), daemon.connect():
        rows = _named(daemon)
        assert set(rows) == {"vllm pod-7 rank 1 of 2", "", "kvpoolctl"}
        assert rows["vllm pod-7 rank 1 of 2"]["model"] == "test-model"
        text = CliRunner().invoke(cli, ["--socket", daemon.socket, "connections"]).stdout
        assert "vllm pod-7 rank 1 of 2" in text
        number = rows["vllm pod-7 rank 1 of 2"]["id"]
        ended = CliRunner().invoke(cli, ["--socket", daemon.socket, "disconnect", str(number)])
        assert ended.exit_code == 0
    log = daemon.log()
    assert f"(kvpoolctl): connection={number}" in log, "the audit names the operator's"
    assert "(vllm pod-7 rank 1 of 2) ends: an operator asked for it" in log


def test_a_name_cannot_forge_lines(daemon: Daemon) -> None:
    with _greet(daemon, b"a\nb\x1b[2J\xff"):
        assert "a\\nb\\x1b[2J\ufffd" in _named(daemon)


@pytest.mark.parametrize("name", [b"x" * (BOUND + 1), "é".encode() * BOUND])
def test_a_name_that_is_too_long_is_refused(daemon: Daemon, name: bytes) -> None:
    with pytest.raises(Refused, match=f"connection name has {len(name)} bytes, expected at most {BOUND}"):
        _greet(daemon, name)
    with pytest.raises(InvalidArgument, match=r"name is 'x+'?.*, expected text of at most 128 bytes"):
        kv.connect(daemon.socket, model="m", layout=SMALL, name="x" * (BOUND + 1))


def test_a_refused_connection_is_named_in_the_log(daemon: Daemon) -> None:
    with pytest.raises(Refused):
        _greet(daemon, b"the llama", model="m" * 1000)
    assert " (the llama): model: model name has more than 512 bytes" in daemon.log()
