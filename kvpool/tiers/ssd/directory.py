"""Directory of the SSD tier: its existence, owner, rights and disk are checked before anything is opened.

Each refusal names the command that helps. Blocks: for an executor.
"""

import os
import stat
from pathlib import Path
from shlex import quote

from kvpool.errors import KVPoolError
from kvpool.ownership import ROOT_UID, user_name

RIGHTS = 0o700

# Directories whose rights no message may advise to change.
_TOP = "bin boot dev etc home lib opt proc root run sbin srv sys tmp usr var"
OF_THE_SYSTEM = frozenset(("/", *(f"/{name}" for name in _TOP.split())))


class SsdUnavailable(KVPoolError):
    """The tier cannot be opened; the text has the reason."""


def check_directory(path: Path, *, is_made: bool) -> str:
    """What `_examine_directory` returns or raises. `is_made`: make the directory if it does not exist."""
    if is_made and not path.is_symlink():
        path.mkdir(mode=RIGHTS, parents=True, exist_ok=True)
    return _examine_directory(path)


def _examine_directory(path: Path, *, is_made: bool = False) -> str:
    """Check that the tier may use a directory. `is_made`: it would be made. Raises SsdUnavailable or OSError.

    A symbolic link stands for its target, unless another user has made it. Returns a warning where the directory is on the
    root file system, else an empty text.
    """
    user = os.geteuid()
    if path.is_symlink():
        return _check_link(path, user)
    if is_made and not path.exists():
        return ""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise SsdUnavailable(
            f"there is no such directory: mount its disk, make it ({_making(path, user)}), or set ssd.create"
        ) from error
    _check_found(path, found, user)
    if found.st_dev != os.stat("/").st_dev:
        return ""
    return (
        f"ssd.path {path} is on the root file system, which the tier fills up to ssd.capacity: is its disk not mounted?"
    )


def examine_place(path: Path, *, is_made: bool) -> str:
    """A line where a tier at `path` could not be opened now, or would have a warning; empty for neither."""
    try:
        return _examine_directory(path, is_made=is_made)
    except (SsdUnavailable, OSError) as error:
        return f"ssd.path {path} cannot be opened: {error}"


def _check_link(path: Path, user: int) -> str:
    """Check a symbolic link. Its target is never made: if it does not exist, the disk is not mounted."""
    owner = path.lstat().st_uid
    if owner not in (ROOT_UID, user):
        raise SsdUnavailable(
            f"it is a symbolic link that uid {owner} has made, expected root or uid {user}: set ssd.path to the directory "
            "itself"
        )
    leads_to = Path(os.path.realpath(path))
    if leads_to.is_symlink():
        raise SsdUnavailable("it is a symbolic link that leads back to itself: set ssd.path to the directory itself")
    if not leads_to.exists():
        raise SsdUnavailable(
            f"it is a symbolic link to {leads_to}, which is not there: mount its disk, or make it ({_making(leads_to, user)})"
        )
    try:
        return _examine_directory(leads_to)
    except SsdUnavailable as error:
        raise SsdUnavailable(f"it is a symbolic link to {leads_to}: {error}") from error


def _making(path: Path, user: int) -> str:
    return f"install -d -m 700 -o {user} {quote(str(path))}"


def _check_found(path: Path, found: os.stat_result, user: int) -> None:
    if str(path.resolve()) in OF_THE_SYSTEM:
        raise SsdUnavailable("this directory is the system's: set ssd.path to a directory of the tier's own")
    if not stat.S_ISDIR(found.st_mode):
        raise SsdUnavailable("this is no directory: set ssd.path to a directory of the tier's own")
    if found.st_uid != user:
        owner = user_name(found.st_uid)
        remedy = (
            f"run it as that user: runuser -u {owner} -- kvpoold …"
            if user == ROOT_UID
            else f"chown {user} {quote(str(path))}"
        )
        raise SsdUnavailable(f"it belongs to uid {found.st_uid}, and the daemon is uid {user}: {remedy}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        rights = stat.S_IMODE(found.st_mode)
        raise SsdUnavailable(
            f"it has rights {rights:04o}, and chunks are prompts that nobody else may read: chmod 700 {quote(str(path))}"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise SsdUnavailable(
            "the daemon may not write there: chmod 700 it, mount it for writing, or, under the systemd unit, which lets it "
            f"write to its own directories alone, add a drop-in with ReadWritePaths={path} (docs/operations.md, Configure)"
        )
