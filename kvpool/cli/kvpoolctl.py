"""`kvpoolctl`: the operator's command. Common options, and the connection to the daemon.

The commands themselves are in modules of their own. Exit codes: 0 ok, 1 failure, 2 usage, 3 daemon unreachable.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvpool import __version__
from kvpool.cli.output import EXIT_FAILURE, EXIT_UNREACHABLE, fail
from kvpool.cli.standard_output import end_with
from kvpool.config.path_options import default_socket
from kvpool.errors import DaemonUnreachable, DaemonUnresponsive, KVPoolError
from kvpool.ownership import missing_right
from kvpool.protocol.blocking import BlockingConnection, fault_of_path
from kvpool.types import SERVICE_SOCKET

TIMEOUT_S = 10.0
# The modules of commands, which import this one and are imported when a command is asked for: all of them take a quarter of a
# second more.
MODULES = {
    "bench": "bench",
    "check": "verify",
    "connections": "connections",
    "disconnect": "connections",
    "events": "events",
    "flush": "operate",
    "info": "operate",
    "keygen": "keygen",
    "log-level": "steer",
    "mrc": "mrc",
    "peers": "peers",
    "reload": "steer",
    "retain": "retain",
    "simulate": "simulate",
    "stats": "operate",
    "verify": "verify",
    "why": "why",
}

EXIT_CODES = """\b
Exit codes:
  0  ok      1  failure      2  wrong usage      3  daemon unreachable"""


@dataclass
class Options:
    """Options given before or after the command."""

    socket: str | None = None
    is_json: bool = False

    @property
    def socket_path(self) -> str:
        """The socket that was named, or the default one."""
        return self.socket or default_socket()

    def connect(self) -> BlockingConnection:
        """A connection to the daemon; ends the command with exit code 3 when there is none."""
        try:
            return BlockingConnection.admin(self.socket_path, TIMEOUT_S)
        except DaemonUnresponsive as error:
            fail(str(error), EXIT_UNREACHABLE)
        except DaemonUnreachable as error:
            fail(f"{error}{self._hint(error)}", EXIT_UNREACHABLE)
        except KVPoolError as error:
            fail(str(error), EXIT_FAILURE)

    def _hint(self, error: DaemonUnreachable) -> str:
        """What to do where nothing listens; empty where the error itself says it."""
        if not isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
            return ""
        if self.socket is None and self.socket_path != SERVICE_SOCKET and Path(SERVICE_SOCKET).parent.is_dir():
            right = missing_right(SERVICE_SOCKET)
            service = f"it cannot be used: {right}" if right else f"name it with --socket {SERVICE_SOCKET}"
            return f"; the service's socket is {SERVICE_SOCKET}: {service}"
        return "; is kvpoold running? name another socket with --socket PATH"


def epilog(*examples: str) -> str:
    """The text below the options in a command's help."""
    lines = "\n".join(f"  {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\n{EXIT_CODES}"


def _note(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value:
        setattr(context.ensure_object(Options), str(parameter.name), value)


def _note_socket(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and (fault := fault_of_path(value)):
        raise click.BadParameter(f"{value!r}, expected {fault}")
    _note(context, parameter, value)


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --socket and --json, which may be given before or after the command."""
    socket = click.option(
        "--socket",
        metavar="PATH",
        expose_value=False,
        callback=_note_socket,
        help=f"The daemon's socket (default: {SERVICE_SOCKET}, or this user's own).",
    )
    as_json = click.option(
        "--json", "is_json", is_flag=True, expose_value=False, callback=_note, help="Print one JSON document."
    )
    return socket(as_json(command))


def ask(call: Callable[[], Any]) -> Any:
    """The answer to a request; ends the command when the daemon refuses or goes away meanwhile."""
    try:
        return call()
    except DaemonUnreachable as error:
        fail(str(error), EXIT_UNREACHABLE)
    except KVPoolError as error:
        fail(str(error), EXIT_FAILURE)


class _Commands(click.Group):
    """The group of all commands. A command registers itself when its module is imported, which is when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        del ctx
        return sorted(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        module = MODULES.get(cmd_name)
        if module is not None and cmd_name not in self.commands:
            importlib.import_module(f"kvpool.cli.commands.{module}")
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=_Commands,
    epilog=f"""\b
Examples:
  kvpoolctl info
  kvpoolctl --socket /run/kvpool/kvpool.sock stats dram --json

{EXIT_CODES}""",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="kvpoolctl")
@common_options
@click.pass_context
def cli(context: click.Context) -> None:
    """Inspect and steer a running kvpoold."""
    context.ensure_object(Options)


def main() -> None:
    """The console script."""
    end_with(lambda: cli(prog_name="kvpoolctl"))


if __name__ == "__main__":
    # Run as a module this file is a second copy of itself; the first one is what the commands register with.
    importlib.import_module("kvpool.cli.kvpoolctl").main()
