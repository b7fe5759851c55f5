"""`kvpoolctl` as tests run it: in this process, or as a program."""

import json
import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from kvpool_tools.cli.kvpoolctl import cli
from tests.rigs.daemon import Daemon

PROGRAM = (sys.executable, "-m", "kvpool_tools.cli.kvpoolctl")


def ctl(daemon: Daemon | None, *arguments: object, answer: str = "") -> Result:
    """The result of a command in this process, about a daemon or about none."""
    about = [] if daemon is None else ["--socket", daemon.socket]
    command = [*about, *map(str, arguments)]
    return CliRunner().invoke(cli, command, input=answer, prog_name="kvpoolctl", catch_exceptions=False)


def ctl_json(daemon: Daemon | None, *arguments: object, answer: str = "") -> Any:
    """What a command that succeeds prints as JSON."""
    done = ctl(daemon, "--json", *arguments, answer=answer)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def execute(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The result of the program, with these variables in its environment."""
    known = {name: value for name, value in os.environ.items() if name != "KVPOOL_TRACES"}
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={**known, **environment}
    )
