"""Standard output of a command: output that cannot be written is a failure of the command, reported in one line.

A full disk or a closed descriptor shows at a write, or only when a buffer is flushed at the very end, where Python would print
a traceback and choose the exit code. Main thread of a command only.
"""

import io
import os
import sys
from collections.abc import Callable

import click

from kvpool_tools.cli.output import EXIT_FAILURE, fail


class _Unwritten(click.ClickException):
    """Standard output has refused what was written."""

    exit_code = EXIT_FAILURE

    def show(self, file: object = None) -> None:
        """Print the line that reports it."""
        del file
        sys.stderr.write(f"kvpoolctl: {self.message}\n")


class _Descriptor(io.FileIO):
    """A descriptor that fails once, and silently discards what is written after that."""

    has_failed = False

    def write(self, data: object, /) -> int:
        """Write; raises _Unwritten, or BrokenPipeError where the reader has gone."""
        size = memoryview(data).nbytes  # type: ignore[arg-type]  # a writer hands buffers over
        if self.has_failed:
            return size
        try:
            return super().write(data) or 0  # type: ignore[arg-type]  # as above
        except BrokenPipeError:
            self.has_failed = True
            raise
        except OSError as error:
            self.has_failed = True
            raise _Unwritten(f"standard output cannot be written: {os.strerror(error.errno or 0)}") from error


def end_with(command: Callable[[], None]) -> None:
    """Run a command, which ends by SystemExit, and end the process with its code once all it has printed is written."""
    before = sys.stdout
    if not isinstance(before, io.TextIOWrapper):
        fail("standard output is closed", EXIT_FAILURE)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(before.fileno(), "w", closefd=False)),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except _Unwritten as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(EXIT_FAILURE)  # a reader that has closed the pipe needs no message
