"""Log lines of a daemon: for the journal and for a file, of refused handshakes, and of operators' orders."""

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvpool.cli import kvpoold
from kvpool.errors import Refused
from kvpool.key_column import KeyColumn
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from tests.hostile.rigs.raw_clients import keys_of
from tests.rigs.daemon import SMALL, Daemon, Start, wait_until
from tests.rigs.payload import store, tokens_of

REFUSALS = 50


@pytest.mark.slow
def test_lines_for_the_journal_begin_with_a_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is a pipe here, named as systemd names its own."""
    read, write = os.pipe()
    found = os.fstat(write)
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
    daemon = Daemon(tmp_path)
    with os.fdopen(read) as journal, daemon:
        assert daemon.stop() == 0
        daemon.process = subprocess.Popen(daemon.command(), stderr=write)
        os.close(write)
        wait_until(daemon.answers, "the daemon answers")
        assert daemon.stop() == 0
        lines = journal.read().splitlines()
    assert any(re.match(r"<6>kvpool\.server\.app kvpoold .* ready", line) for line in lines)
    assert all(re.match(r"<[2-7]>kvpool\.", line) for line in lines)


def test_lines_elsewhere_begin_with_a_time(daemon: Daemon) -> None:
    assert daemon.stop() == 0
    lines = daemon.log().splitlines()
    assert lines
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d{4} (INFO|WARNING) kvpool\.", line), line


def test_a_client_that_is_refused_again_and_again_is_one_line(daemon: Daemon) -> None:
    hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "nobody", "m", SMALL.to_wire())
    for _ in range(REFUSALS):
        with pytest.raises(Refused, match=r"^role: role is 'nobody'"):
            BlockingConnection(daemon.socket, hello, 60.0)
    wait_until(lambda: daemon.stats()["refused_connections"] == REFUSALS, "all were refused")
    lines = [line for line in daemon.log().splitlines() if "handshake refused" in line]
    assert len(lines) == 1
    assert f"handshake refused: pid {os.getpid()} uid {os.getuid()}: role: role is 'nobody', expected" in lines[0]


def test_a_full_daemon_names_its_code_once(start_daemon: Start) -> None:
    daemon = start_daemon(server__max_connections="1")
    wait_until(lambda: daemon.stats()["connections"] == 1, "the starter's connection has ended")
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # one, and those that are reserved for operators
            stack.enter_context(daemon.admin())
        with pytest.raises(Refused) as refused:
            daemon.admin()
    full = "busy: server.max_connections is 1 and all are in use"
    assert str(refused.value) == full
    assert f"uid {os.getuid()}: {full}\n" in daemon.log()


def test_every_order_of_an_operator_names_its_user_and_what_it_was_carried_out_on(start_daemon: Start) -> None:
    daemon = start_daemon(log__level="error")
    who = f"by pid {os.getpid()} uid {os.getuid()}"
    with daemon.admin() as admin, daemon.connect(model="two\nlines") as pool:
        keys = pool.keys(tokens_of(1, 3 * SMALL.chunk_tokens))
        assert store(pool, keys).stored == 3
        admin.retain(KeyColumn(keys[1] + keys_of(0, 1)), 80, 0.0)
        assert admin.flush(None, None, "dram")["chunks"] == 3
        admin.flush("two\nlines", 60.0, "dram")
        admin.demote_all(1.0, is_forced=False)
        admin.demote_all(2.0, is_forced=True)
        admin.retain(KeyColumn(keys_of(0, 3)), 80, 1.0)
        admin.log_level("error")
        assert not admin.disconnect(1 << 40)
        admin.reload()
        admin.info()
        admin.log_level()
    lines = [line.partition(" INFO kvpool.")[2] for line in daemon.log().splitlines()]
    assert lines[-1] == "server.reload reloaded: no option has changed"
    nothing, size = "chunks=0 bytes=0 skipped=0 durable=True", 3 * SMALL.chunk_bytes
    assert [line.removeprefix("audit ") for line in lines[:-1]] == [
        f"retain {who}: priority=80 duration_s=0.0",
        f"retain ended {who}: chunks=2 first_key='{keys[1].hex()[:16]}' accepted=1 clipped=0 absent=1",
        f"flush {who}: model='' older_than_s=-1.0 tier='dram'",
        f"flush ended {who}: chunks=3 bytes={size} skipped=0 durable=True",
        f"flush {who}: model='two\\nlines' older_than_s=60.0 tier='dram'",
        f"flush ended {who}: {nothing}",
        f"demote {who}: timeout_s=1.0 is_forced=False",
        f"demote ended {who}: chunks=0 left=0 durable=True",
        f"demote {who}: timeout_s=2.0 is_forced=True",
        f"demote ended {who}: chunks=0 left=0 durable=True",
        f"retain {who}: priority=80 duration_s=1.0",
        f"retain ended {who}: chunks=3 first_key='{keys_of(0, 3).hex()[:16]}' accepted=0 clipped=0 absent=3",
        f"log-level {who}: level='error'",
        f"disconnect {who}: connection={1 << 40}",
        f"reload {who}",
    ], "looking is no order"


def test_a_fault_printed_at_the_start_is_one_line_for_any_file_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvpool.toml"
    config.write_text('[server]\n"so\\ncket\\u001b[2J" = 1\n')
    assert kvpoold.run([f"--config={config}", "--set=no\nsuch=1", "--set=a\rb"]) == 2
    assert sorted(capsys.readouterr().err.split("\n")) == [
        "",
        r"kvpoold: --set a\rb: expected section.key=value",
        r"kvpoold: no\nsuch is no option",
        r"kvpoold: server.so\ncket\x1b[2J is no option, did you mean server.socket?",
    ]
