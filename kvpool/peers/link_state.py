"""State of a link to another node, apart from the link itself: who shows it needs no sockets. Any thread."""

from enum import Enum

# A fault begins so where the peer or this node has refused the connection by the other's Hello; a code follows.
REFUSED = "refused: "


class LinkState(Enum):
    """State of a link."""

    IDLE = "idle"
    CONNECTING = "connecting"
    GREETING = "greeting"
    READY = "ready"
    CLOSED = "closed"
