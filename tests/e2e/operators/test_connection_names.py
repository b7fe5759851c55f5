"""Names of connections: operators see them in the list, the audit and the refusals; they are bounded, escaped and no proof."""

from typing import Any

import pytest

import kvpool_client as kv
from kvpool.errors import InvalidArgument, Refused
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.kvpoolctl import ctl, ctl_json

BOUND = m.CONNECTION_NAME_BYTES_MAX


def _named(daemon: Daemon) -> dict[str, Any]:
    return {row["name"]: row for row in ctl_json(daemon, "connections")["connections"]}


def _greet(daemon: Daemon, name: bytes, model: str = "m") -> BlockingConnection:
    hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, model, SMALL.to_wire(), name=name)
    return BlockingConnection(daemon.socket, hello, 30.0)


def test_a_connection_is_listed_by_its_name(daemon: Daemon) -> None:
    with daemon.connect(name="vllm pod-7 rank 1 of 2"), daemon.connect():
        rows = _named(daemon)
        assert set(rows) == {"vllm pod-7 rank 1 of 2", "", "kvpoolctl"}
        assert rows["vllm pod-7 rank 1 of 2"]["model"] == "test-model"
        text = ctl(daemon, "connections").stdout
        assert "vllm pod-7 rank 1 of 2" in text
        number = rows["vllm pod-7 rank 1 of 2"]["id"]
        ended = ctl(daemon, "disconnect", number)
        assert ended.exit_code == 0
    log = daemon.log()
    assert f"(kvpoolctl): connection={number}" in log, "the audit names the operator's"
    assert "(vllm pod-7 rank 1 of 2) ends: an operator asked for it" in log


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
