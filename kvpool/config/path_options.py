"""Values of options that name files, directories, rights, groups and topics. Pure but for reads of the named files and of
what this user can use."""

import grp
import os
import string
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgument
from kvpool.types import SERVICE_SOCKET

TOPIC_BYTES_MAX = 200


def default_socket() -> str:
    """The socket of daemon and commands without a configuration: in the service's directory if this user can use it."""
    service = Path(SERVICE_SOCKET).parent
    if service.is_dir() and os.access(service, os.W_OK):
        return SERVICE_SOCKET
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return str(Path(runtime) / "kvpool" / "kvpool.sock")
    return f"/tmp/kvpool-{os.getuid()}/kvpool.sock"  # noqa: S108 - the directory is this user's own


def directory(value: Any) -> str:
    """An absolute path of a directory, which need not be there; empty for none. Raises InvalidArgument."""
    if not isinstance(value, str) or (value and not value.startswith("/")) or "\0" in value:
        raise InvalidArgument(repr(value))
    return value


def mode(value: Any) -> int:
    """Rights in octal: those of the owner at least, and none for others. Raises InvalidArgument."""
    rights = int(value, 8) if isinstance(value, str) else -1
    if rights & ~0o770 or not rights & 0o600:
        raise InvalidArgument(str(value))
    return rights


def topic(value: Any) -> str:
    """A topic with {host} and {model} in braces alone. Raises InvalidArgument."""
    if not isinstance(value, str) or len(value.encode()) > TOPIC_BYTES_MAX or not value.isprintable():
        raise InvalidArgument(repr(value))
    parts = list(string.Formatter().parse(value))  # ValueError where braces do not fit
    if any(name is not None and (name not in ("host", "model") or form or kind) for _, name, form, kind in parts):
        raise InvalidArgument(repr(value))
    return value


def readable_file(value: Any) -> str:
    """A regular file that is there; empty for none. Raises InvalidArgument."""
    if not isinstance(value, str) or (value and not os.path.isfile(value)):
        raise InvalidArgument(repr(value))
    return value


def secret_file(value: Any) -> str:
    """A regular file that nobody but this user or root can read; empty for none. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(repr(value))
    if not value:
        return ""
    found = os.lstat(value) if os.path.lexists(value) else None
    if found is None or found.st_mode & 0o177077 != 0o100000 or found.st_uid not in (os.getuid(), 0):
        raise InvalidArgument(value)
    return value


def group(value: Any) -> int | None:
    """The number of a group, by its name or number; None for none. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(repr(value))
    if not value:
        return None
    if value.isdecimal():
        return int(value)
    try:
        return grp.getgrnam(value).gr_gid
    except KeyError as error:
        raise InvalidArgument(value) from error


def check_writable(option: str, path: Path) -> None:
    """Check that the file an option names can be written, before a measurement begins. Raises InvalidArgument."""
    folder = path.parent
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidArgument(f"{option} is {str(path)!r}, expected a file that can be written in a folder that exists")
