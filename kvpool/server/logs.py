"""Log lines: with a priority for systemd's journal, with a time for all other readers.

The journal adds times and shows colours by priority, which a line begins with (`<3>`); it names the stream in JOURNAL_STREAM,
and only where standard error is that stream are lines written so. Characters that move a terminal's cursor, or make one line
look like two, are shown as escapes: names of models come from clients. Any thread.
"""

import logging
import os
from collections.abc import Mapping
from typing import TextIO

from kvpool.escaping import escaped

# Syslog priorities, by which the journal filters.
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
ERROR_PRIORITY = f"<{PRIORITIES[logging.ERROR]}>"


class LineFormatter(logging.Formatter):
    """One line for each message, with what follows a message (a traceback) in lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines."""
        message = escaped(record.getMessage())
        lines = [f"{record.name} {message}"]
        if record.exc_info:
            # Indented, so that the lines of an exception do not look like messages.
            lines += [f"  {escaped(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(self._lead(record) + line for line in lines)

    def _lead(self, record: logging.LogRecord) -> str:
        second, zone = self.formatTime(record, "%Y-%m-%dT%H:%M:%S"), self.formatTime(record, "%z")
        return f"{second}.{int(record.msecs):03d}{zone} {record.levelname} "


class JournalFormatter(LineFormatter):
    """The same for the journal."""

    def _lead(self, record: logging.LogRecord) -> str:
        return f"<{PRIORITIES.get(record.levelno, 6)}>"


def begin_logging(level: str, stream: TextIO, environment: Mapping[str, str]) -> None:
    """Log from this level on (a word of `log.level`) to a stream, which may be the journal's."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JournalFormatter() if is_journal(stream, environment) else LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a stream goes to the journal: device and inode are those in JOURNAL_STREAM."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM", "") == f"{found.st_dev}:{found.st_ino}"
