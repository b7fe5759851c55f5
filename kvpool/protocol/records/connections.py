"""Requests of an operator about connections. See `messages` for the rules of records. Any thread."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class AskConnections:
    """List all connections and what each holds. Answered by Report."""

    KIND: ClassVar[int] = 72


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End a connection. Answered by Report: whether there was one (`disconnected`)."""

    KIND: ClassVar[int] = 73
    connection: int
