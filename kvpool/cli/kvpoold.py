"""`kvpoold`: reads the configuration, starts the daemon, maps what goes wrong to exit codes.

0 stopped by a signal, 1 could not serve, 2 wrong usage or configuration.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import uvloop

from kvpool import __version__, failpoint
from kvpool.config import Config, load_config
from kvpool.errors import ConfigError, SocketInUse
from kvpool.server.app import App
from kvpool.server.logs import ERROR_PRIORITY, begin_logging, is_journal

log = logging.getLogger("kvpoold")

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
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Serve until stopped; the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it is served: a start reads the configuration anyway
    try:
        overrides = [*options.set, "ssd.rebuild=true"] if options.rebuild else options.set
        path = None if options.config is None else os.path.abspath(options.config)
        reread = partial(load_config, path, overrides)
        config = reread()
        if failpoint.faults:
            raise ConfigError(failpoint.faults)
    except ConfigError as error:
        _print_faults(error)
        return 2
    begin_logging(config.log.level, sys.stderr, os.environ)
    try:
        uvloop.run(_serve(config, reread))
    except ConfigError as error:
        _print_faults(error)
        return 2
    except (SocketInUse, OSError, MemoryError) as error:
        log.error("cannot serve: %s", error)
        return 1
    return 0


def _print_faults(error: ConfigError) -> None:
    lead = ERROR_PRIORITY if is_journal(sys.stderr, os.environ) else ""
    for fault in error.faults:
        print(f"{lead}kvpoold: {fault}", file=sys.stderr)


async def _serve(config: Config, reread: Callable[[], Config]) -> None:
    app = App(config, reread)
    await app.run()
    if not app.has_ended:
        logging.shutdown()
        os._exit(0)  # an ordinary end would wait for the threads that wait for the disk


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
