"""Outcomes of the SSD tier's I/O, by chunk: the native module's codes."""

from enum import IntEnum

from kvpool.tiers.base import Outcome


class SsdStatus(IntEnum):
    """Result of one chunk's I/O; the native module's codes."""

    OK = 0
    BAD_MAGIC = 1
    NEWER_VERSION = 2
    BAD_HEADER = 3
    OTHER_EPOCH = 4
    OTHER_KEY = 5
    OTHER_NAMESPACE = 6
    OTHER_GENERATION = 7
    OTHER_GEOMETRY = 8
    BAD_CHECKSUM = 9
    SHORT_READ = 10
    IO_ERROR = 11
    CANCELLED = 12
    BAD_SOURCE = 13
    BAD_WRITE = 14

    @property
    def is_corruption(self) -> bool:
        """Whether the bytes on disk are not the chunk's."""
        return SsdStatus.BAD_MAGIC <= self <= SsdStatus.SHORT_READ

    @property
    def outcome(self) -> Outcome:
        """The outcome that every tier reports."""
        return _OUTCOMES[self]


_OUTCOMES = [
    Outcome.DONE
    if status == SsdStatus.OK
    else Outcome.CANCELLED
    if status == SsdStatus.CANCELLED
    else Outcome.BAD_SOURCE
    if status.is_corruption or status == SsdStatus.BAD_SOURCE
    else Outcome.FAILED
    for status in SsdStatus
]
