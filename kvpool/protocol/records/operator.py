"""Operator records: steering a running daemon, its log level and its configuration. See `messages`."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class LogLevel:
    """Log from this level on; empty: as it is. Answered by Report, with the `level` and the one `before`."""

    KIND: ClassVar[int] = 70
    level: str


@dataclass(frozen=True, slots=True)
class Reload:
    """Read the configuration again and change what can be changed. Answered by Report, or by Failure with every fault."""

    KIND: ClassVar[int] = 71
