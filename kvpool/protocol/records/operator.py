"""Operator records: steering a running daemon, its connections, its log level and its configuration. See `messages`."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True, unsafe_hash=True)
class LogLevel:
    """Log from this level on; empty: as it is. Answered by Report, with the `level` and the one `before`."""

    KIND: ClassVar[int] = 70
    level: str


@dataclass(slots=True, unsafe_hash=True)
class Reload:
    """Read the configuration again and change what can be changed. Answered by Report, or by Failure with every fault."""

    KIND: ClassVar[int] = 71


@dataclass(slots=True, unsafe_hash=True)
class AskConnections:
    """List all connections and what each holds. Answered by Report."""

    KIND: ClassVar[int] = 72


@dataclass(slots=True, unsafe_hash=True)
class Disconnect:
    """End a connection. Answered by Report: whether there was one (`disconnected`)."""

    KIND: ClassVar[int] = 73
    connection: int


@dataclass(slots=True, unsafe_hash=True)
class Drain:
    """Decline new saves from now on, or (`is_on` False) take them again. Answered by Report: whether it was so (`before`)."""

    KIND: ClassVar[int] = 96
    is_on: bool


@dataclass(slots=True, unsafe_hash=True)
class AskModels:
    """List models and layouts with what is stored of each, and how it is used. Answered by Report."""

    KIND: ClassVar[int] = 97


@dataclass(slots=True, unsafe_hash=True)
class AskConfig:
    """The configuration in force. Answered by Report: for each option its value as written and its source (`options`)."""

    KIND: ClassVar[int] = 98
