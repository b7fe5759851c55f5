"""Standard output and standard error of a command: output that cannot be written is its failure, reported in one line.

A full disk or a closed descriptor shows at a write, or only when a buffer is flushed at the very end, where Python would print
a traceback and choose the exit code. A character that the terminal's encoding lacks is no failure, and what cannot be written
to standard error changes nothing. Main thread of a command only.
"""

import errno
import io
import os
import sys
from collections.abc import Callable

EXIT_FAILURE = 1


class _Unwritten(Exception):
    """Standard output has refused what was written."""


class _Output(io.FileIO):
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
            reason = (
                "is closed" if error.errno == errno.EBADF else f"cannot be written: {os.strerror(error.errno or 0)}"
            )
            raise _Unwritten(f"standard output {reason}") from error


class _Errors(io.FileIO):
    """A descriptor that silently discards what it cannot take: nobody else reads it."""

    def write(self, data: object, /) -> int:
        """Write, or not."""
        try:
            return super().write(data) or 0  # type: ignore[arg-type]  # a writer hands buffers over
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]  # as above


def end_with(name: str, command: Callable[[], None]) -> None:
    """Run a command of that name, which ends by SystemExit, and end the process with its code once all it printed is written.

    Where standard output is closed, a command that prints nothing ends with its own code.
    """
    output, errors = (
        stream if isinstance(stream, io.TextIOWrapper) else open(os.devnull)  # noqa: SIM115 - which takes no write
        for stream in (sys.stdout, sys.stderr)
    )
    sys.stdout = _text(io.BufferedWriter(_Output(output.fileno(), "w", closefd=False)), output)
    sys.stderr = _text(io.BufferedWriter(_Errors(errors.fileno(), "w", closefd=False)), errors)
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except _Unwritten as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILURE)
    except BrokenPipeError:
        sys.exit(EXIT_FAILURE)  # a reader that has closed the pipe needs no message


def _text(file: io.BufferedWriter, model: io.TextIOWrapper) -> io.TextIOWrapper:
    """A text stream as another is; an unbuffered one's lines are written one by one, and what its encoding lacks is a `?`."""
    return io.TextIOWrapper(
        file,
        encoding=model.encoding,
        errors="replace" if model.errors == "strict" else model.errors,
        line_buffering=model.line_buffering or model.write_through,
    )
