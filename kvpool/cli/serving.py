"""Daemon process: reads the configuration, serves, and maps failures to exit codes (see `kvpoold`).

Main thread only.
"""

import logging
import os
import sys
from collections.abc import Callable

import uvloop

import kvpool_native
from kvpool.config.config import Config
from kvpool.errors import ConfigError, SocketInUse
from kvpool.escaping import escaped
from kvpool.memory_limit import NO_THREAD, describe
from kvpool.protocol.frames import FRAME_BYTES_MAX
from kvpool.server.app import App
from kvpool.server.logs import ERROR_PRIORITY, begin_logging, is_journal
from kvpool.server.start_checks import checked_config, is_running, lacks_that_degrade, lacks_that_refuse

log = logging.getLogger("kvpoold")

# How long another thread may keep the interpreter from the control thread: Python's default of 5 ms is the time of many
# requests.
SWITCH_INTERVAL_S = 0.0002
# The largest request takes three blocks of FRAME_BYTES_MAX while it is read; without spare memory each waits for the kernel's
# pages (0.6 ms of a commit, measured).
FREED_BYTES_KEPT = 8 << 20
FREED_BLOCK_BYTES = 2 * FRAME_BYTES_MAX


def serve(file: str | None, overrides: list[str]) -> int:
    """Serve with a configuration file, or none, and options that override it; the exit code."""
    try:
        path = _absolute(file)
        checked = checked_config(path, overrides)
    except ConfigError as error:
        _print_faults(error)
        return 2
    config = checked.config
    begin_logging(config.log.level, sys.stderr, os.environ)
    for line in checked.idle:
        log.warning("%s", line)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    kvpool_native.keep_freed_memory(FREED_BYTES_KEPT, FREED_BLOCK_BYTES)
    try:
        return uvloop.run(_serve(config, lambda: checked_config(path, overrides).config))
    except ConfigError as error:
        _print_faults(error)
        return 2
    except SocketInUse as error:
        log.error("cannot serve: %s", error)
        return 1
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != NO_THREAD:
            raise
        log.error("cannot serve: %s", describe(error))
        return 1


def check(file: str | None, overrides: list[str]) -> int:
    """Print the faults that a start with this configuration would find, without one; the exit code."""
    try:
        checked = checked_config(_absolute(file), overrides)
    except ConfigError as error:
        _print_faults(error)
        return 2
    refusing = list(lacks_that_refuse(checked.config))
    for line in refusing:
        print(f"kvpoold: {escaped(line)}", file=sys.stderr)
    for line in (*checked.idle, *lacks_that_degrade(checked.config)):
        print(f"note: {escaped(line)}")
    if refusing:
        return 2
    running = "; a daemon serves there, and has its memory" if is_running(checked.config) else ""
    print(escaped(f"{file or 'the defaults'}: no fault for a daemon at {checked.config.server.socket}{running}"))
    return 0


def _absolute(file: str | None) -> str | None:
    try:
        return None if file is None else os.path.abspath(file)
    except OSError as error:
        raise ConfigError([f"config file {file} has no place: the working directory: {error.strerror}"]) from error


def _print_faults(error: ConfigError) -> None:
    lead = ERROR_PRIORITY if is_journal(sys.stderr, os.environ) else ""
    for fault in error.faults:
        print(f"{lead}kvpoold: {escaped(fault)}", file=sys.stderr)


async def _serve(config: Config, reread: Callable[[], Config]) -> int:
    app = App(config, reread)
    await app.run()
    if not app.has_ended:
        logging.shutdown()
        os._exit(app.exit_code)  # an ordinary exit would wait for threads that wait for the disk
    return app.exit_code
