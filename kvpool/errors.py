"""Exceptions of kvpool, as a tree.

    KVPoolError
    ├── InvalidArgument      a caller's mistake, raised at the call (also a ValueError)
    ├── LayoutMismatch       an engine cache does not fit the declared layout (also a ValueError)
    ├── ConfigError          a configuration that cannot be served; lists every fault
    ├── ProtocolError        bytes that are not a frame of this protocol; the connection ends
    ├── Refused              the daemon answered with an error frame; `code` names it
    ├── DaemonUnreachable    no daemon, no answer in time, or the connection ended
    │   └── DaemonUnresponsive  a process listens at the socket, and does not answer in time
    ├── PeerUnreachable      another node is not connected, or did not answer in time
    │   └── PeerNotAsked        the request has not left this node
    └── SocketInUse          another daemon serves the socket

A miss, a pending chunk and a declined save are results, not exceptions: see `types`.
"""

import difflib
from collections.abc import Iterable


class KVPoolError(Exception):
    """Base of every exception that kvpool raises on purpose."""


class InvalidArgument(KVPoolError, ValueError):
    """An argument is wrong: names the argument, its value and what was expected."""


class LayoutMismatch(KVPoolError, ValueError):
    """An engine cache or a peer's layout does not fit the declared layout."""


class ConfigError(KVPoolError):
    """A configuration was refused; `faults` holds one line for each fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class ProtocolError(KVPoolError):
    """Bytes on a connection that are not a valid frame at this point."""


class Refused(KVPoolError):
    """The daemon refused a request, with a reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class DaemonUnreachable(KVPoolError):
    """No daemon answers at the socket, or it did not answer in time."""


class DaemonUnresponsive(DaemonUnreachable):
    """A daemon listens at the socket, and did not greet in time: stopped, overloaded, or it hangs."""


class PeerUnreachable(KVPoolError):
    """Another node is not connected, did not answer in time, or its connection ended."""


class PeerNotAsked(PeerUnreachable):
    """Another node knows nothing of a request: it has not left this one."""


class SocketInUse(KVPoolError):
    """A live daemon already serves the socket."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause that names what is nearest to an unknown name; empty where nothing is near."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {nearest[0]}?" if nearest else ""
