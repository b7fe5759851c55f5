"""Path of the daemon's socket: where a daemon without a configuration makes it, and where a client without one finds it.

A daemon asks where it may write; a client asks which socket is there, and whether it may use it. Neither is believed for its
place: a client asks the kernel who serves a socket before it sends anything (`ownership`). Any thread.
"""

import os
from pathlib import Path

from kvpool.ids import SERVICE_SOCKET
from kvpool.ownership import missing_right

# Names the socket for clients: commands, engines and adapters that are given none.
SOCKET_VARIABLE = "KVPOOL_SOCKET"
# Set by systemd where a unit has RuntimeDirectory=.
RUNTIME_DIRECTORY_VARIABLE = "RUNTIME_DIRECTORY"
PATH_BYTES_MAX = 107  # of a unix socket, by the kernel
SERVED_PATH_BYTES_MAX = PATH_BYTES_MAX - len(".lock")  # of a daemon's, which has files with longer names beside it


def default_socket() -> str:
    """The socket of a daemon without a configuration: in the directory that its service manager has made for it, or in the
    service's if this user may write there."""
    made = os.environ.get(RUNTIME_DIRECTORY_VARIABLE, "")
    in_made = str(Path(made) / Path(SERVICE_SOCKET).name)
    if ":" not in made and can_be_served(in_made):
        return in_made
    service = Path(SERVICE_SOCKET).parent
    return SERVICE_SOCKET if service.is_dir() and os.access(service, os.W_OK, effective_ids=True) else own_socket()


def own_socket() -> str:
    """The socket of this user's own daemon."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    in_runtime = str(runtime / "kvpool" / "kvpool.sock")
    if runtime.is_dir() and can_be_served(in_runtime):
        return in_runtime
    return f"/tmp/kvpool-{os.getuid()}/kvpool.sock"  # noqa: S108 - the directory is this user's own


def can_be_served(path: str) -> bool:
    """Whether a daemon can have its socket at this path."""
    is_named = path.startswith("/") and not path.endswith("/") and "\0" not in path
    return is_named and len(os.fsencode(path)) <= SERVED_PATH_BYTES_MAX


def find_socket() -> str:
    """The socket of a client that is given none: the one of SOCKET_VARIABLE, the service's if this user may use it, the user's
    own; the service's again where neither is there, or only that one and without the right to it."""
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return named
    own = own_socket()
    has_own = os.path.exists(own)
    return own if has_own and (missing_right(SERVICE_SOCKET) or not os.path.exists(SERVICE_SOCKET)) else SERVICE_SOCKET


def fault_of_path(path: object) -> str:
    """What is expected of a socket's path (str or PathLike), where this cannot be one; empty where it can."""
    try:
        encoded = os.fsencode(path) if isinstance(path, (str, os.PathLike)) else b""
    except UnicodeEncodeError:
        encoded = b""
    if b"://" in encoded:
        return f"a path without a scheme, such as {SERVICE_SOCKET}"
    return (
        "" if 0 < len(encoded) <= PATH_BYTES_MAX and b"\0" not in encoded else f"a path of 1 to {PATH_BYTES_MAX} bytes"
    )
