"""Digest memory: the digests of files that a user's processes have read on this machine, so that each is read once.

    $XDG_CACHE_HOME/kvpool/digests/   (~/.cache where that is not set), 0700
        <name>        digest of one file, JSON, replaced as a whole; the name is made of machine and stamp
        <name>.turn   whoever has this locked reads the file, the others wait for what it finds; its time is that of the
                      last bytes read, and nobody waits for a reader that has none for STALLED_S

An entry is believed only in a directory of this user that nobody else may write, and only where it is this user's file as
well. One that is torn or of another stamp is no entry, and a directory that cannot be used is an empty memory: nothing here
raises.

Any thread and process. At most ENTRIES_MAX files are in the directory, then the oldest quarter goes.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvpool.clock import Deadline
from kvpool_client.engines.file_stamps import FileStamp

# More than the largest checkpoints have files, several times; of each some 400 bytes are remembered.
ENTRIES_MAX = 32768
ENTRY_BYTES_MAX = 4096
POLL_S = 0.1
# Longer than a busy disk takes for one read, shorter than anybody waits for a process that hangs (guess).
STALLED_S = 30.0
MACHINE_IDS = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class DigestMemory:
    """See the module. `directory`: None remembers nothing."""

    def __init__(self, directory: Path | None, stalled_s: float = STALLED_S) -> None:
        self._directory = directory
        self._stalled_s = stalled_s

    def __repr__(self) -> str:
        return f"<DigestMemory {self._directory}>"

    @classmethod
    def of_user(cls, environment: Mapping[str, str]) -> "DigestMemory":
        """The memory that all processes of this user share."""
        home = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls(Path(home) / "kvpool" / "digests" if os.path.isabs(home) else None)

    def find(self, stamp: FileStamp) -> str:
        """The digest of the file with this stamp; empty where it is not known."""
        with self._opened() as directory:
            return _read(directory, stamp) if directory is not None else ""

    def note_digest(self, stamp: FileStamp, digest: str) -> None:
        """Remember the digest of the file with this stamp."""
        with self._opened() as directory:
            if directory is not None:
                with contextlib.suppress(OSError):  # a full disk: the next process reads the file again
                    _write(directory, stamp, digest)
                    _forget_oldest(directory)

    @contextlib.contextmanager
    def turn(
        self, stamp: FileStamp, stop: threading.Event, wait: Callable[[], None] = lambda: None
    ) -> Iterator[Callable[[], None]]:
        """Within the context no other process of this user reads the file, as far as files can be locked there, and as long as
        this one calls what it is given now and then.

        Waits while another one reads it, until `stop`, or until that has made no progress for STALLED_S. Calls
        `wait` meanwhile.
        """
        with self._opened() as directory:
            lock = self._lock(directory, stamp, stop, wait) if directory is not None else None
            try:
                yield lambda: _advance(lock)
            finally:
                if lock is not None:
                    with contextlib.suppress(OSError):  # another process has removed it
                        os.unlink(_turn_of(stamp), dir_fd=directory)
                    os.close(lock)

    def _lock(self, directory: int, stamp: FileStamp, stop: threading.Event, wait: Callable[[], None]) -> int | None:
        """A descriptor of the locked file; None where it cannot be locked, or who has it stalls, or `stop` came first."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(_turn_of(stamp), flags, 0o600, dir_fd=directory)
        except OSError:
            return None
        with contextlib.suppress(OSError):  # no locks on this filesystem
            seen_ns, deadline = os.fstat(lock).st_mtime_ns, Deadline(self._stalled_s)
            while not stop.is_set() and not deadline.has_passed():
                if _has_locked(lock):
                    _advance(lock)
                    return lock
                wait()
                stop.wait(POLL_S)
                if (now_ns := os.fstat(lock).st_mtime_ns) != seen_ns:
                    seen_ns, deadline = now_ns, Deadline(self._stalled_s)
        os.close(lock)
        return None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """A descriptor of the directory; None where it is not this user's alone."""
        directory = None
        if self._directory is not None:
            with contextlib.suppress(OSError):  # a home that cannot be written: nothing is remembered
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield directory if directory is not None and _is_own(os.fstat(directory)) else None
        finally:
            if directory is not None:
                os.close(directory)


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE


def _name_of(stamp: FileStamp) -> str:
    return hashlib.sha256(f"{_machine()} {stamp.facts}".encode()).hexdigest()[:40]


def _machine() -> str:
    """What distinguishes this machine from others with the same home: its id, or this boot's where it has none."""
    for place in MACHINE_IDS:
        with contextlib.suppress(OSError, ValueError):
            if name := Path(place).read_text().strip():
                return name
    return ""


def _turn_of(stamp: FileStamp) -> str:
    return _name_of(stamp) + ".turn"


def _sum_of(stamp: FileStamp, digest: str) -> str:
    return hashlib.sha256(f"{_machine()} {stamp.facts} {digest}".encode()).hexdigest()


def _read(directory: int, stamp: FileStamp) -> str:
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(
            _name_of(stamp), "rb", opener=lambda name, _: os.open(name, flags, dir_fd=directory)
        ) as file:  # closes a directory too
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_own(status):
                return ""
            entry = json.loads(file.read(ENTRY_BYTES_MAX))
        digest, checksum = str(entry["digest"]), entry["checksum"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return digest if _DIGEST.fullmatch(digest) and checksum == _sum_of(stamp, digest) else ""


def _write(directory: int, stamp: FileStamp, digest: str) -> None:
    entry = {"stamp": stamp.facts, "digest": digest, "checksum": _sum_of(stamp, digest)}
    fresh = f"{_name_of(stamp)}.{os.getpid()}.{threading.get_ident()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=directory), "w") as file:
        json.dump(entry, file)
    os.rename(fresh, _name_of(stamp), src_dir_fd=directory, dst_dir_fd=directory)


def _forget_oldest(directory: int) -> None:
    """Forget down to three quarters, so that it is seldom done."""
    names = os.listdir(directory)
    if len(names) <= ENTRIES_MAX:
        return
    names.sort(key=lambda name: _changed_ns(directory, name))
    for name in names[: len(names) - ENTRIES_MAX * 3 // 4]:
        with contextlib.suppress(OSError):  # another process has removed it, or it is a directory
            os.unlink(name, dir_fd=directory)


def _changed_ns(directory: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns
    except OSError:  # another process has removed it
        return 0


def _advance(lock: int | None) -> None:
    """Show the others that this process reads on."""
    if lock is not None:
        with contextlib.suppress(OSError):  # they read for themselves
            os.utime(lock)


def _has_locked(lock: int) -> bool:
    """Whether nobody else has it locked, and this process has now. Raises OSError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
