"""Values of options that name files, directories, rights, groups and topics. Pure but for reads of the named files and of
what this user can use."""

import grp
import os
import stat
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgument

TOPIC_BYTES_MAX = 200
GROUP_MAX = (1 << 32) - 2  # the number behind it means none
_OTHERS = 0o077


class FileFault(InvalidArgument):
    """A named file cannot be used: the reason, as a clause after its name."""


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
    """A topic with {host}, {model} and {name} in braces alone. Raises InvalidArgument."""
    if not isinstance(value, str) or len(value.encode()) > TOPIC_BYTES_MAX or not value.isprintable():
        raise InvalidArgument(repr(value))
    parts = list(string.Formatter().parse(value))  # ValueError where braces do not fit
    if any(
        name is not None and (name not in ("host", "model", "name") or form or kind) for _, name, form, kind in parts
    ):
        raise InvalidArgument(repr(value))
    return value


def readable_file(value: Any) -> str:
    """A regular file that is there; empty for none. Raises FileFault or InvalidArgument."""
    if value:
        _look_at(value, os.stat)
    return _text(value)


def secret_file(value: Any) -> str:
    """A regular file that nobody but this user or root can read; empty for none. Raises FileFault or InvalidArgument."""
    if not value:
        return _text(value)
    found = _look_at(value, os.lstat)
    if found.st_mode & _OTHERS:
        raise FileFault(f"which has rights {stat.S_IMODE(found.st_mode):04o}")
    if found.st_uid not in (os.getuid(), 0):
        raise FileFault(f"which belongs to uid {found.st_uid}")
    return _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(repr(value))
    return value


def _look_at(value: Any, look: Callable[[str], os.stat_result]) -> os.stat_result:
    try:
        found = look(_text(value))
    except OSError as error:
        raise FileFault(f"which cannot be used: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise FileFault("which is no regular file")
    return found


def group(value: Any) -> int | None:
    """The number of a group, by its name or number; None for none. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(repr(value))
    if not value:
        return None
    if value.isdecimal() and int(value) <= GROUP_MAX:
        return int(value)
    try:
        return grp.getgrnam(value).gr_gid
    except KeyError as error:
        raise InvalidArgument(value) from error


def check_writable(option: str, path: Path) -> None:
    """Check that the file an option names can be written, before a measurement begins. Raises InvalidArgument."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidArgument(f"{option} is {str(path)!r}, expected a file that can be written in a folder that exists")
