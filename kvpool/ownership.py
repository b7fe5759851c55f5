"""Ownership of directories and sockets: whether the directory of a socket can be trusted, and what a user lacks to connect.

A directory is made by its owner, and its files by users who may write there. Where anybody may write in a parent directory,
anybody can have made it: then its owner decides whether it is trusted. Any thread.
"""

import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote

ROOT_UID = 0
CONNECT_TIMEOUT_S = 1.0
# A further user whose daemon a client trusts, where engines and daemon share a directory that anybody may write.
DAEMON_UID_VARIABLE = "KVPOOL_DAEMON_UID"
_PEERCRED = struct.Struct("3i")


def make_socket_directory(socket_path: str, *, is_private: bool = False) -> str:
    """Make the directory of a socket where there is none: passable for all, writable for its owner alone. Raises OSError.

    Returns why it may be another user's, and what to do about it; empty where it is trusted. `is_private`: also requires that
    only its owner can write there.
    """
    directory = Path(socket_path).parent
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    return (_fault_of_directory if is_private else fault_of_owner)(str(directory))


def fault_of_socket_place(socket_path: str, *, is_private: bool = False) -> str:
    """What `make_socket_directory` would return or raise, without making anything; empty where the directory can be used."""
    path = Path(socket_path)
    directory, me = path.parent, f"user {user_name(os.geteuid())}"
    try:
        if path.is_dir() or (os.path.lexists(path) and not path.is_socket()):
            return f"{path} exists and is no socket: move it away, or choose another path"
        if os.path.lexists(directory) and not directory.is_dir():
            return f"{directory} is no directory"
        above = next(one for one in (directory, *directory.parents) if one.exists())
    except OSError as error:
        return f"{directory} cannot be looked at by {me}: {error.strerror}"
    if above == directory and (fault := (_fault_of_directory if is_private else fault_of_owner)(str(directory))):
        return fault
    if os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    what = "" if above == directory else f"{directory} is not there, and "
    return f"{what}{me} may not write in {above}"


def is_served(socket_path: str) -> bool:
    """Whether a process accepts connections there. Raises OSError where that is unknown, as without the right to connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.settimeout(CONNECT_TIMEOUT_S)
        try:
            other.connect(socket_path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def _trusted_owner_of(path: str) -> int | None:
    """The owner of a directory, if only that user or root can have made it; None where others could, or there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if found.st_uid in (ROOT_UID, os.geteuid()):
        return found.st_uid
    above = Path(os.path.realpath(path)).parents
    return None if any(os.stat(one).st_mode & stat.S_IWOTH for one in above) else found.st_uid


def fault_of_owner(path: str) -> str:
    """Why a directory may be another user's, and what to do about it; empty where it is trusted."""
    if _trusted_owner_of(path) is not None:
        return ""
    if not os.path.isdir(path):
        return f"{path} is no directory"
    found, me = os.stat(path), os.geteuid()
    expected = "root" if me == ROOT_UID else f"root or uid {me}"
    return (
        f"{path} belongs to uid {found.st_uid} and lies below a directory where everybody may write, expected {expected}: "
        "somebody else may have made it; use another directory"
    )


def _fault_of_directory(path: str) -> str:
    """Why users other than its owner could replace files in a directory; empty where they cannot."""
    fault = fault_of_owner(path)
    if fault:
        return fault
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        # A sticky one, such as /tmp, is meant for everybody.
        remedy = "use another directory" if mode & stat.S_ISVTX else f"chmod go-w {quote(path)}"
        return f"{path} has rights {mode:04o}, expected no more than 0755: {remedy}"
    return ""


def fault_of_root(socket_path: str) -> str:
    """Why root should not serve at a path, and what to do about it; empty where the directory, or the one that it would be made
    in, is root's own, or this is not root."""
    if os.geteuid() != ROOT_UID:
        return ""
    directory = next(one for one in Path(socket_path).parents if one.exists())
    owner = directory.stat().st_uid
    if owner == ROOT_UID:
        return ""
    user = user_name(owner)
    return (
        f"{directory} belongs to user {user}, who could not use what root leaves there: start it as that user "
        f"(systemctl start kvpoold, or runuser -u {user} -- kvpoold …), or set server.socket to another directory"
    )


def fault_of_other(path: str) -> str:
    """That a file is another user's, and what to do about it; empty where it is not."""
    try:
        owner = os.lstat(path).st_uid
    except OSError:
        return ""
    if owner == os.geteuid():
        return ""
    return (
        f"{path} belongs to user {user_name(owner)}, whose kvpoold serves there or was killed there: stop that "
        f"one, then remove the file ({_removal(path, owner)})"
    )


def fault_of_left(path: str) -> str:
    """That another user has left a socket where nobody else may remove it, and what to do about it; empty where that is not so.
    REQUIRES: nobody serves there."""
    try:
        owner, above = os.lstat(path).st_uid, os.stat(Path(path).parent)
    except OSError:
        return ""
    me = os.geteuid()
    if not above.st_mode & stat.S_ISVTX or me in (ROOT_UID, owner, above.st_uid):
        return ""
    return f"{path} was left there by user {user_name(owner)}: remove it ({_removal(path, owner)})"


def _removal(path: str, owner: int) -> str:
    """Who may remove a user's file, and how."""
    return f"as {'root' if owner == ROOT_UID else f'{user_name(owner)} or root'}: rm {quote(path)}"


def missing_right(path: str) -> str:
    """What keeps this user from connecting to a socket, and what to do about it; empty where its rights do not."""
    for place in (*reversed(Path(path).parents), Path(path)):
        try:
            found = os.stat(place)
        except OSError:
            return ""
        is_directory = stat.S_ISDIR(found.st_mode)
        if not os.access(place, os.X_OK if is_directory else os.W_OK, effective_ids=True):
            return _remedy(place, found, stat.S_IXGRP if is_directory else stat.S_IWGRP)
    return ""


def _remedy(place: Path, found: os.stat_result, group_right: int) -> str:
    user, group = user_name(found.st_uid), _name_of(grp.getgrgid, found.st_gid)
    owned = f"{place} belongs to user {user} and group {group} with rights {stat.S_IMODE(found.st_mode):04o}"
    if not found.st_mode & group_right:
        help_from_owner = (
            f"chmod g+x {quote(str(place))}" if stat.S_ISDIR(found.st_mode) else "set server.socket_mode to 0660"
        )
        return f"{owned}: be user {user}, or have that user {help_from_owner} and join group {group}"
    me = user_name(os.geteuid())
    return f"{owned}: be user {user}, or join the group (usermod --append --groups {group} {me}) and log in again"


def user_name(uid: int) -> str:
    """The name of a user; its number where it has none here."""
    return _name_of(pwd.getpwuid, uid)


def _name_of(find: Callable[[int], Sequence[object]], number: int) -> str:
    """The name of a user or a group; its number where it has none here."""
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


def peer_of(connected: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a unix socket, by the kernel."""
    pid, uid, gid = _PEERCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    return pid, uid, gid


def fault_of_daemon(path: str, uid: int) -> str:
    """Why the user behind a socket may not be a daemon's; empty where it is trusted.

    Trusted are root, this process's user, the user named in DAEMON_UID_VARIABLE, and the owner of the socket's directory, where
    nobody else can have made that.
    """
    named = os.environ.get(DAEMON_UID_VARIABLE, "")
    if uid in (ROOT_UID, os.geteuid(), _trusted_owner_of(str(Path(path).parent))) or named == str(uid):
        return ""
    return (
        f"{path} is served by uid {uid}, expected root, uid {os.geteuid()} or the owner of a directory that nobody else can "
        f"have made; if that is the daemon's user, set {DAEMON_UID_VARIABLE}={uid}"
    )
