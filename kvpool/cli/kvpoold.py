"""`kvpoold`: the command line of the daemon. It is parsed before anything of the daemon is imported.

A SIGHUP means "read the configuration again" and ends no kvpoold: it is ignored before the daemon's modules are imported, which
takes a third of a second, until `server.app` serves it, and again from there to the process's end. Main thread only.

Exit codes: 0 stopped by a signal, 1 could not serve or print, 2 wrong usage or configuration, 130 stopped for a restart by the
service manager, which has its memory.
"""

import gc
import signal
import sys
from pathlib import Path

import click

from kvpool.memory_limit import limit_note
from kvpool.standard_streams import end_with
from kvpool.version_option import version_option

REFERENCE = Path(__file__).parents[1] / "share" / "kvpool.toml"
EPILOG = """\b
Examples:
  kvpoold
        serve on the default socket with the built-in defaults
  kvpoold --config /etc/kvpool/kvpool.toml --set dram.capacity=64GiB --set log.level=debug
        a file's options, two of them overridden; the last --set of an option wins
  kvpoold --check --config /etc/kvpool/kvpool.toml
        every fault of the file, and what this machine lacks for it: exit code 0 or 2; touches no running daemon

\b
Exit codes:
  0  stopped by SIGTERM or SIGINT (which end it as signals do before it serves), or --check found no fault
  1  could not serve, or print
  2  wrong usage or configuration, or this machine lacks what it takes
  130  stopped by SIGINT for a restart by the service manager, which has the memory of DRAM meanwhile"""


def main() -> None:
    """The console script."""
    gc.disable()  # a tenth of a start: what the imports make stays; enabled when the socket is there
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a start reads the configuration in any case
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends the process as SIGTERM does, until the daemon catches both
    end_with("kvpoold", lambda: sys.exit(run(sys.argv[1:])))


def run(arguments: list[str]) -> int:
    """Serve until stopped; the exit code."""
    try:
        code: int = command.main(arguments, prog_name="kvpoold", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return code


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--config", metavar="FILE", help="TOML file with options (default: built-in defaults).")
@click.option(
    "--set",
    "overrides",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Override one option; may be given again; values as in the file, without quotes.",
)
@click.option(
    "--rebuild",
    is_flag=True,
    help="Search the segment files of the SSD tier for chunks instead of trusting its catalogue (ssd.rebuild=true).",
)
@click.option(
    "--check",
    "is_check",
    is_flag=True,
    help="Print every fault of the configuration and what this machine lacks for it, and start nothing.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print a configuration file that explains every option at its default, and start nothing.",
)
@version_option("kvpoold")
def command(config: str | None, overrides: tuple[str, ...], rebuild: bool, is_check: bool, print_config: bool) -> int:
    """The KV cache pool daemon of a node: stores KV chunks of LLM engines in shared memory and serves them over a unix socket.
    Without a configuration file the built-in defaults serve a plain user.
    """
    if print_config:
        click.echo(REFERENCE.read_text(encoding="utf-8"), nl=False)
        return 0
    try:
        from kvpool.cli.serving import check, serve  # takes a third of a second, which `kvpoold --help` has no use for
    except (ImportError, MemoryError) as error:
        note = limit_note()
        if not note:
            raise
        raise click.ClickException(f"cannot serve: {str(_innermost(error)) or 'out of memory'}{note}") from error

    return (check if is_check else serve)(config, [*overrides, *(["ssd.rebuild=true"] if rebuild else [])])


def _innermost(error: BaseException) -> BaseException:
    """The error behind an error: numpy wraps that of a library in a page of advice."""
    cause = error.__cause__ or error.__context__
    return error if cause is None else _innermost(cause)


if __name__ == "__main__":
    main()
