"""Memory records: what a client maps beside the arena. Fields as in `messages`. Any thread."""

from dataclasses import dataclass
from typing import ClassVar

UUID_BYTES = 16


@dataclass(slots=True, unsafe_hash=True)
class OpenMemory:
    """Ask for the device tier's memory, for an engine on the device of this UUID, or for the connection's own staging memory
    (empty). Answered by Memory, and its file descriptor with it; Failure with code `device` or `mode` where there is none."""

    KIND: ClassVar[int] = 27
    uuid: bytes


@dataclass(slots=True, unsafe_hash=True)
class Memory:
    """`memory_bytes` of it are to be mapped. Always the same: the device tier's for the life of the daemon, staging for that of
    the connection."""

    KIND: ClassVar[int] = 28
    uuid: bytes
    memory_bytes: int
