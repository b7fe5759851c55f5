"""`kvpoolctl`: the operator's command. Common options, and the connection to the daemon.

The commands themselves are in modules of their own. Exit codes: 0 ok, 1 failure, 2 usage, 3 daemon unreachable.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from kvpool.errors import DaemonUnreachable, DaemonUnresponsive, InvalidArgument, KVPoolError, Refused, did_you_mean
from kvpool.ids import PROBE_MODEL, SERVICE_SOCKET
from kvpool.protocol.blocking import BlockingConnection
from kvpool.socket_path import SOCKET_VARIABLE, fault_of_path, find_socket, own_socket
from kvpool.standard_streams import end_with
from kvpool.units import parse_duration
from kvpool.version_option import version_option
from kvpool_tools.cli.output import EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE, fail

# Shorter than a container's probe waits for a command, the start of Python included.
TIMEOUT = "2s"
TIMEOUT_MIN_S, TIMEOUT_MAX_S = 0.01, 3600.0
MODELS_SHOWN = 20
NAME = "kvpoolctl"
# The modules of commands, which import this one and are imported when a command is asked for: all of them take a quarter of a
# second more.
MODULES = {
    "bench": "bench",
    "check": "chunks.verify",
    "config": "steer",
    "connections": "connections",
    "disconnect": "connections",
    "drain": "drain",
    "events": "events",
    "flush": "operate",
    "info": "operate",
    "keygen": "keygen",
    "log-level": "steer",
    "models": "models",
    "mrc": "mrc",
    "peers": "peers",
    "reload": "steer",
    "retain": "chunks.retain",
    "simulate": "simulate",
    "stats": "operate",
    "verify": "chunks.verify",
    "why": "chunks.why",
}

EXIT_CODES = """\b
Exit codes:
  0  ok      1  failure      2  wrong usage      3  daemon unreachable"""


@dataclass
class Options:
    """Options given before or after the command."""

    socket: str | None = None
    is_json: bool = False
    timeout_s: float = parse_duration(TIMEOUT)

    @property
    def socket_path(self) -> str:
        """The socket that was named, or the one that is found. Ends the command when the environment names none."""
        path = self.socket or find_socket()
        if fault := fault_of_path(path):
            fail(f"{SOCKET_VARIABLE} is {path!r}, expected {fault}", EXIT_USAGE)
        return path

    def connect(self) -> BlockingConnection:
        """A connection to the daemon; ends the command with exit code 3 when there is none."""
        path = self.socket_path
        try:
            return BlockingConnection.admin(path, self.timeout_s, name=NAME)
        except DaemonUnresponsive as error:
            fail(str(error), EXIT_UNREACHABLE)
        except DaemonUnreachable as error:
            fail(f"{error}{_hint(error, path)}", EXIT_UNREACHABLE)
        except KVPoolError as error:
            fail(str(error), EXIT_FAILURE)


def _hint(error: DaemonUnreachable, path: str) -> str:
    """Advice where nothing listens; empty where the error itself has it."""
    if not isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
        return ""
    others = [other for other in (SERVICE_SOCKET, own_socket()) if other != path and os.path.exists(other)]
    place = f", such as {others[0]}" if others else ""
    return f"; is kvpoold running? name another socket with --socket PATH or {SOCKET_VARIABLE}{place}"


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


def _note_timeout(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    try:
        timeout_s = None if value is None else parse_duration(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from error
    if timeout_s is not None and not TIMEOUT_MIN_S <= timeout_s <= TIMEOUT_MAX_S:
        raise click.BadParameter(f"{value}, expected 10ms to 1h")
    _note(context, parameter, timeout_s)


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --socket, --timeout and --json, which may be given before or after the command."""
    socket = click.option(
        "--socket",
        metavar="PATH",
        expose_value=False,
        callback=_note_socket,
        help=f"The daemon's socket (default: {SOCKET_VARIABLE}, else {SERVICE_SOCKET} if this user may use it, "
        "else this user's own).",
    )
    timeout = click.option(
        "--timeout",
        "timeout_s",
        metavar="DURATION",
        expose_value=False,
        callback=_note_timeout,
        help="The longest wait for an answer of the daemon; checks and orders about all chunks wait longer "
        f"(default: {TIMEOUT}).",
    )
    as_json = click.option(
        "--json", "is_json", is_flag=True, expose_value=False, callback=_note, help="Print one JSON document."
    )
    return socket(timeout(as_json(command)))


def ask(call: Callable[[], Any]) -> Any:
    """The answer to a request; ends the command when the daemon refuses or goes away meanwhile."""
    try:
        return call()
    except DaemonUnreachable as error:
        fail(str(error), EXIT_UNREACHABLE)
    except Refused as error:
        fail(str(error), EXIT_USAGE if error.code == "argument" else EXIT_FAILURE)
    except KVPoolError as error:
        fail(str(error), EXIT_FAILURE)


def require_durable(connection: BlockingConnection, report: dict[str, Any]) -> None:
    """Ends the command with the reason where `report` of writing chunks down says that a power cut could take some."""
    if report["durable"]:
        return
    info = ask(connection.info)
    reasons = [problem for problem in info["problems"] if problem.startswith("ssd: ")]
    if "ssd_path" not in info:
        reasons = ["there is no SSD tier: set ssd.path and ssd.capacity"]
    elif not reasons:
        reasons = [
            "ssd.write_budget is used up (--force of flush), the tier has no room, or time ran out: kvpoolctl stats ssd"
            if report["left"]
            else "a sync failed or came late, or chunks were saved meanwhile: try again"
        ]
    fail("; ".join(reasons), EXIT_FAILURE)


def require_model(connection: BlockingConnection, model: str) -> None:
    """Ends the command unless the daemon knows a model of that name; the message lists those that there are."""
    names = sorted({name for name, _ in ask(connection.namespaces).values()} - {PROBE_MODEL})
    if model in names:
        return
    shown = ", ".join(names[:MODELS_SHOWN]) or "none"
    more = f" and {len(names) - MODELS_SHOWN} more" if len(names) > MODELS_SHOWN else ""
    fail(
        f"there is no model {model}; models are {shown}{more} (a model with a revision is model@revision)", EXIT_FAILURE
    )


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
            importlib.import_module(f"kvpool_tools.cli.commands.{module}")
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is asked for; an unknown one is refused with what is nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = did_you_mean(args[0], MODULES)
            raise click.UsageError(f"{error.message.removesuffix('.')}{hint or '.'}", ctx) from error


@click.group(
    cls=_Commands,
    epilog=f"""\b
Examples:
  kvpoolctl info
  kvpoolctl --socket /tmp/try/kvpool.sock stats dram --json

{EXIT_CODES}""",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@version_option("kvpoolctl")
@common_options
@click.pass_context
def cli(context: click.Context) -> None:
    """Inspect and steer a running kvpoold."""
    context.ensure_object(Options)


def main() -> None:
    """The console script."""
    if sys.stdout is None:  # before an order is carried out whose report nobody would see
        fail("standard output is closed", EXIT_FAILURE)
    end_with(NAME, lambda: cli(prog_name=NAME))


if __name__ == "__main__":
    # Run as a module this file is a second copy of itself; the first one is what the commands register with.
    importlib.import_module("kvpool_tools.cli.kvpoolctl").main()
