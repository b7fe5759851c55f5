"""Audit lines of the log: each order of an operator, and the pid and uid that the kernel reports for the sender. What an order
was carried out on is a second line, when it has ended.

They are logged at every `log.level`. Values come from outside and are shown as Python literals, so that none of them can look
like a line of its own. Any thread.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from kvpool.server.connections.local_socket import Peer

log = logging.getLogger("kvpool.audit")
log.setLevel(logging.INFO)
_Order = TypeVar("_Order", bound=Callable[..., Any])


def audit(peer: Peer, order: str, **details: object) -> None:
    """Log that this peer has given an order, with what it was about."""
    about = "".join(f" {name}={value!r}" for name, value in details.items())
    log.info("%s by %s%s", order, peer, f":{about}" if about else "")


def audited(order: str, *fields: str) -> Callable[[_Order], _Order]:
    """Have a method log each order of its owner's `peer`, with these fields of the request, before it carries it out."""

    def wrap(carry_out: _Order) -> _Order:
        @wraps(carry_out)
        def carry_out_audited(owner: Any, request: Any) -> Any:
            audit(owner.peer, order, **{name: getattr(request, name) for name in fields})
            return carry_out(owner, request)

        return cast(_Order, carry_out_audited)

    return wrap
