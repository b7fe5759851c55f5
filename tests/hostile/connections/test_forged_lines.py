"""Names with line breaks and markup: a client's model or adapter name is escaped wherever people read it."""

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.escaping import escaped
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool_tools.cli.kvpoolctl import cli
from kvpool_tools.cli.output import print_table
from tests.hostile.rigs.raw_clients import hello_of
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.payload import store, tokens_of

CHUNK = SMALL.chunk_tokens
FORGED = "     999  removed   every chunk  flushed"
EVIL = f"evil\n{FORGED}\r\x1b[2J\x9b31m\u202e\u2028[bold]x[/bold]"


def _run(daemon: Daemon, *arguments: str) -> str:
    return CliRunner().invoke(cli, ["--socket", daemon.socket, *arguments]).output


def _assert_clean(text: str) -> None:
    for line in text.split("\n"):
        assert line.isprintable(), repr(line)
        assert not line.startswith(FORGED)


def test_only_unprintable_characters_are_escaped() -> None:
    assert escaped("modèle-8B 漢字 [x] a\\b") == "modèle-8B 漢字 [x] a\\b"
    assert escaped("a\nb\x1b[0m\u202e") == "a\\nb\\x1b[0m\\u202e"
    assert escaped("\udc80") == "\\udc80"


def test_no_name_forges_a_line_of_any_command(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(log__level="debug")
    with daemon.connect(model=EVIL) as pool:
        keys = pool.keys(tokens_of(1, CHUNK * 2), adapter=f"a\n{FORGED}")
        store(pool, keys)
        output = _run(daemon, "events")
        assert len(output.splitlines()) == 2
        assert "evil\\n" in output
        for arguments in (
            ["events"],
            ["why", keys[0].hex()],
            ["why", keys[0].hex(), "--model", "other"],
            ["info"],
            ["stats"],
            ["check"],
            ["verify"],
            ["stats", EVIL],
            ["connections"],
            ["flush", "--model", EVIL, "--yes"],
        ):
            _assert_clean(_run(daemon, *arguments))
        assert json.loads(_run(daemon, "events", "--json"))[1]["model"] == EVIL


def test_no_name_forges_a_line_of_the_log(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(log__level="debug")
    daemon.connect(model=EVIL).close()
    with pytest.raises(Refused):
        BlockingConnection(daemon.socket, hello_of(role=EVIL), 60.0)
    with daemon.admin() as admin, pytest.raises(Refused):
        admin.call(m.Flush(EVIL, -1.0, EVIL), m.Report)
    _assert_clean(daemon.log())
    assert "engine of model evil\\n" in daemon.log()


def test_no_name_is_markup_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("models", [{"model": EVIL, "chunks": 1}, {"model": "[red]b[/red]", "chunks": 2}])
    output = capsys.readouterr().out
    _assert_clean(output)
    assert "[bold]x[/bold]" in output
    assert "[red]b[/red]" in output


def test_a_client_is_not_disturbed_by_its_own_name(daemon: Daemon) -> None:
    with daemon.connect(model=EVIL) as pool:
        keys = pool.keys(tokens_of(1, CHUNK))
        assert store(pool, keys).stored == 1
        assert pool.lookup(keys).chunks == 1
        assert isinstance(pool, kv.Pool)
