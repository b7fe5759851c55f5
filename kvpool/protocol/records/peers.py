"""Requests about other nodes. See `messages` for the rules of records. Any thread."""

from dataclasses import dataclass
from typing import ClassVar

# Of a node's name, as in a node's Hello.
OWNER_BYTES_MAX = 256


@dataclass(slots=True, unsafe_hash=True)
class AskPeers:
    """List the known members from number `first` on, in the order of their addresses. Answered by Report: a page of `peers`,
    and how many there are in all (`members`)."""

    KIND: ClassVar[int] = 74
    first: int


def is_node_name(text: str) -> bool:
    """Whether a node may have this name; an empty one is none, and none is named by it."""
    return text.isprintable() and len(text.encode("utf-8", "surrogatepass")) <= OWNER_BYTES_MAX
