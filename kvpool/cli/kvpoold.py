"""`kvpoold`: reads the configuration, starts the daemon, maps what goes wrong to exit codes.

0 stopped by a signal, 1 could not serve, 2 wrong usage or configuration.
"""

import argparse
import logging
import os
import resource
import sys

import uvloop

from kvpool import __version__, failpoint
from kvpool.config import Config, load_config
from kvpool.errors import ConfigError, SocketInUse
from kvpool.escaping import EscapedMessages
from kvpool.server.app import App

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
    try:
        overrides = [*options.set, "ssd.rebuild=true"] if options.rebuild else options.set
        config = load_config(options.config, overrides)
        if failpoint.faults:
            raise ConfigError(failpoint.faults)
    except ConfigError as error:
        for fault in error.faults:
            print(f"kvpoold: {fault}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log.level.upper(), format="%(levelname)s %(name)s %(message)s", stream=sys.stderr, force=True
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(EscapedMessages())
    _raise_descriptor_limit()
    try:
        uvloop.run(_serve(config))
    except ConfigError as error:
        for fault in error.faults:
            print(f"kvpoold: {fault}", file=sys.stderr)
        return 2
    except (SocketInUse, OSError, MemoryError) as error:
        log.error("cannot serve: %s", error)
        return 1
    return 0


async def _serve(config: Config) -> None:
    app = App(config)
    await app.run()
    if not app.has_ended:
        logging.shutdown()
        os._exit(0)  # an ordinary end would wait for the threads that wait for the disk


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
