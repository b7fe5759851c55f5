"""The audit lines of the log: which operator's order was carried out, and who the kernel says gave it.

They are logged whatever `log.level` says. Values come from outside and are shown as Python literals, so that none of them can
look like a line of its own. Any thread.
"""

import logging
from typing import Any

from kvpool.server.connections.connection import Handler
from kvpool.server.connections.local_socket import Peer

log = logging.getLogger("kvpool.audit")
log.setLevel(logging.INFO)


def audit(peer: Peer, order: str, **details: object) -> None:
    """Log that this peer has given an order, with what it was about."""
    about = "".join(f" {name}={value!r}" for name, value in details.items())
    log.info("%s by pid %d uid %d%s", order, peer.pid, peer.uid, f":{about}" if about else "")


def audited(peer: Peer, order: str, handler: Handler, *fields: str) -> Handler:
    """A handler that logs each order with these fields of its record before it is carried out."""

    def handle(request: Any) -> Any:
        audit(peer, order, **{name: getattr(request, name) for name in fields})
        return handler(request)

    return handle
