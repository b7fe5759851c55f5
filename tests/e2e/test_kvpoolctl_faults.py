"""`kvpoolctl` with values that nobody means, and with a standard output that cannot be written: usage errors and one line."""

import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from kvpool.cli.kvpoolctl import load_commands
from tests.daemon import Daemon

HUGE = "9" * 400
PRINTING = [
    "info",
    "stats",
    "stats --json",
    "stats --watch --count 2 --interval 10ms",
    "connections",
    "events",
    "check",
]


def _run(daemon: Daemon, *arguments: str) -> Result:
    return CliRunner().invoke(load_commands(), ["--socket", daemon.socket, *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["events", "--since", "9" * 30], rf"{'9' * 30} is not in the range -1<=x<=9223372036854775807"),
        (["events", "--since", str(1 << 63)], "is not in the range"),
        (["stats", "--watch", "--interval", "90000d"], "--interval is 90000d, expected 10ms to 1d"),
        (["stats", "--watch", "--interval", "0s"], "--interval is 0s, expected 10ms to 1d"),
        (["stats", "--watch", "--interval", f"{HUGE}s"], "is too long a duration, expected at most 100000d"),
        (["flush", "--yes", "--older-than", f"{HUGE}d"], "is too long a duration, expected at most 100000d"),
        (["mrc", "--add", f"{HUGE}TiB"], "is too large a size, expected less than 8388608TiB"),
        (["mrc", "--add", f"{HUGE}.5TiB"], "is too large a size"),
        (["disconnect", "9" * 30], "is not in the range 1<=x<="),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_values_that_nobody_means_are_wrong_usage(shared_daemon: Daemon, arguments: list[str], said: str) -> None:
    refused = _run(shared_daemon, *arguments)
    assert refused.exit_code == 2, refused.output
    assert said in refused.output
    assert isinstance(refused.exception, SystemExit)


@pytest.mark.parametrize("arguments", PRINTING)
def test_what_cannot_be_printed_is_one_line_and_a_failure(shared_daemon: Daemon, arguments: str) -> None:
    command = [sys.executable, "-m", "kvpool.cli.kvpoolctl", "--socket", shared_daemon.socket, *arguments.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "kvpoolctl: standard output cannot be written: No space left on device\n",
    )
