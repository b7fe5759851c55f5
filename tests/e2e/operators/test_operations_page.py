"""Every command of the operations page, run as the page has it; what it says of answers and log lines is in the code."""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.protocol.blocking import BlockingConnection
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.kvpoolctl import PROGRAM, ctl
from tests.rigs.payload import store, tokens_of
from tests.rigs.runs.ports import free_port

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()
SOURCES = "\n".join(
    path.read_text() for folder in ("kvpool", "tools") for path in sorted((ROOT / folder).rglob("*.py"))
)
# Before a command that needs what another one undoes.
ORDER = ("info", "stats", "check", "verify", "drain", "drain --undo", "flush --demote", "flush --all")
# What no command line shows: an argument of the reader's.
PLACEHOLDERS = {"[SECTION]": "ssd", "SECTION": "ssd"}
NEEDS_AN_ARGUMENT = {"disconnect"}
# Only with a device.
CONDITIONAL = {"hbm_state"}


def _commands() -> list[str]:
    """The invocations of kvpoolctl on the page, without its name and comments, those of ORDER first."""
    found = re.findall(r"`kvpoolctl ([^`]+)`", PAGE)
    for block in re.findall(r"(?ms)^```\n(.*?)^```", PAGE):
        found += re.findall(r"(?m)^kvpoolctl ([^#\n]+)", block)
    distinct = dict.fromkeys(" ".join(PLACEHOLDERS.get(word, word) for word in one.split()) for one in found)
    return sorted(distinct, key=lambda one: ORDER.index(one) if one in ORDER else -1)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One with a configuration file, a disk smaller than DRAM, metrics and chunks."""
    directory = tmp_path_factory.mktemp("page")
    config = directory / "kvpool.toml"
    config.write_text(f'[ssd]\npath = "{directory}/ssd"\ncreate = true\ncapacity = "16MiB"\n')
    address = "tcp://127.0.0.1"
    peers = {"peer.listen": f"{address}:{free_port()}", "peer.stream": f"{address}:0"}
    one = Daemon(directory, **{"dram.capacity": "32MiB", "server.metrics": "127.0.0.1:0", **peers})
    one.start("--config", str(config))
    with one:
        one.wait_open()
        with one.connect() as pool:
            store(pool, pool.keys(tokens_of(1, 256)))
        yield one


def _is_ready(daemon: Daemon) -> bool:
    with BlockingConnection.admin(daemon.socket, 60.0) as admin:
        return bool(admin.info()["health"] == "ready")


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_the_page_does_what_it_is_for(daemon: Daemon, command: str) -> None:
    if command in NEEDS_AN_ARGUMENT:
        done = ctl(daemon, *command.split())
        assert (done.exit_code, "Missing argument" in done.stderr) == (2, True)
        return
    wait_until(lambda: "drain" in command or _is_ready(daemon), "the daemon is ready")
    if "--watch" in command:
        words = [*PROGRAM, "--socket", daemon.socket, *command.split()]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            assert watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            watching.stdout.read()
        assert watching.returncode == 0
        return
    done = ctl(daemon, "--timeout", "60s", *command.split(), answer="y\n")
    with daemon.admin() as admin:
        admin.drain(is_on=False)  # the command that does so may be another worker's
    assert done.exit_code == 0, done.stderr
    assert done.stdout


def test_fields_that_the_page_names_are_in_the_answers(daemon: Daemon) -> None:
    with daemon.admin() as admin:
        answers = {"info": admin.info(), **{f"stats {name}": values for name, values in admin.stats().items()}}
    answers["stats"] = daemon.stats()
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`(?: \([^)]*\))?,? in `kvpoolctl (info|stats(?: [a-z]+)?)`", PAGE)
    assert len(named) > 6
    missing = [(name, command) for name, command in named if name not in answers[command] and name not in CONDITIONAL]
    assert missing == []


def _lines_of_tables(heading: str) -> list[str]:
    table = PAGE[PAGE.index(heading) :].split("\n\n")[0]
    return [line for row in table.splitlines()[2:] for line in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize("heading", ["| log line | meaning |", "| problem | meaning |"])
def test_lines_that_the_page_explains_are_written_by_the_daemon(heading: str) -> None:
    """A line's words without what stands for numbers and names."""
    lines = _lines_of_tables(heading)
    assert len(lines) > 6
    unknown = []
    for line in lines:
        words = [part.strip(" :") for part in re.split(r"…|cuda:0|\b\d+\w*\b", line) if len(part.strip(" :")) > 6]
        pieces = [piece for word in words for piece in re.split(r"[:,(]\s*", word) if len(piece.strip()) > 6]
        unknown += [(line, piece) for piece in pieces if _written(piece) is None]
    assert unknown == []


def _written(piece: str) -> "re.Match[str] | None":
    """Where the code has these words, some of which it may fill in."""
    words = (rf"(?:{re.escape(word)}|\{{[^}}]*\}}|%\w)" for word in piece.split())
    return re.search(r"\s+".join(words), SOURCES)
