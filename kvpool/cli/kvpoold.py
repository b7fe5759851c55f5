"""`kvpoold`: the command line of the daemon, with nothing else imported while it is read.

A SIGHUP means "read the configuration again" and ends no kvpoold: it is ignored before the daemon's modules are imported, which
takes a third of a second, until `server.app` serves it, and again from there to the process's end. Main thread only.

Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong usage or configuration.
"""

import argparse
import signal
import sys

from kvpool import __version__

DESCRIPTION = """\
The KV cache pool daemon of a node: keeps KV chunks of LLM engines in shared memory and serves them
over a unix socket. Without a configuration file the built-in defaults serve a plain user."""

EPILOG = """\
examples:
  kvpoold
        serve on the default socket with the built-in defaults
  kvpoold --config /etc/kvpool/kvpool.toml --set dram.capacity=64GiB --set log.level=debug
        a file's options, two of them overridden; the last --set of an option wins

exit codes:
  0  stopped by SIGTERM or SIGINT      1  could not serve      2  wrong usage or configuration"""


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a start reads the configuration anyway
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Serve until stopped; the exit code."""
    options = _parser().parse_args(arguments)
    from kvpool.cli.serving import serve  # takes a third of a second, which `kvpoold --help` has no use for

    return serve(options.config, [*options.set, "ssd.rebuild=true"] if options.rebuild else options.set)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvpoold", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options (default: built-in defaults)")
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one option; may be given again; values as in the file, without quotes",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="search the segment files of the SSD tier for chunks instead of trusting its catalogue (ssd.rebuild=true)",
    )
    parser.add_argument("--version", action="version", version=f"kvpoold {__version__}")
    return parser


if __name__ == "__main__":
    main()
