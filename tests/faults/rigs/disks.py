"""Disks that a test may break: loop-mounted file systems whose power can be cut, and small ones that get full.

Needs root, loop devices and the programs that make file systems; without them a test skips and names what is missing. A
mount ends with the test, whatever happened to the daemon on it.
"""

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.daemon import wait_until

# _IOR('X', 125, __u32), the same for ext4 and XFS. The flag drops the log that is not on disk yet: what a power cut does.
SHUTDOWN = 0x8004587D
WITHOUT_LOG_FLUSH = struct.pack("I", 2)
MAKE = {
    "ext4": ("mkfs.ext4", ["-q", "-F", "-E", "lazy_itable_init=0"]),
    "xfs": ("mkfs.xfs", ["-q", "-f"]),
}
# XFS is not made smaller than 300 MiB; the image is sparse.
IMAGE_BYTES = {"ext4": 128 << 20, "xfs": 320 << 20}
COMMAND_TIMEOUT_S = 30.0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)


def is_mounted(path: Path) -> bool:
    """True if the kernel's table has a mount there: a mount without power does not report it."""
    return any(line.split()[1] == str(path) for line in Path("/proc/self/mounts").read_text().splitlines())


class Disk:
    """One mounted file system."""

    def __init__(self, mount: Path, *, source: str, kind: str, options: str = "") -> None:
        self.path = mount
        self._command = ["mount", "-t", kind, *(["-o", options] if options else []), source, str(mount)]
        _run(*self._command)

    def cut_power(self) -> None:
        """Nothing reaches the disk from now on; incomplete writes are lost."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, WITHOUT_LOG_FLUSH)
        finally:
            os.close(fd)

    def restore_power(self) -> None:
        """Unmount, and mount again with the disk's content."""
        self.unmount()
        _run(*self._command)

    def unmount(self) -> None:
        """Unmount, once ended processes have closed their files."""
        wait_until(lambda: self._is_unmounted(), f"{self.path} is unmounted")

    def _is_unmounted(self) -> bool:
        return not is_mounted(self.path) or not subprocess.run(["umount", self.path], capture_output=True).returncode


PACKAGES = {"mkfs.xfs": "xfsprogs", "mkfs.ext4": "e2fsprogs", "mount": "mount"}


def _reason_to_skip(*programs: str) -> str:
    if os.geteuid() != 0:
        return "mounting needs root"
    lacking = [program for program in programs if shutil.which(program) is None]
    return f"{lacking[0]} is not installed: apt-get install {PACKAGES[lacking[0]]}" if lacking else ""


@contextlib.contextmanager
def mounted(*, source: str, kind: str, options: str = "") -> Iterator[Disk]:
    """A mount of its own. Skips where mounting is not possible."""
    with tempfile.TemporaryDirectory(prefix="kvpool-disk-") as name:
        try:
            disk = Disk(Path(name), source=source, kind=kind, options=options)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{kind} cannot be mounted here: {error.stderr.decode().strip()}")
        try:
            yield disk
        finally:
            disk.unmount()


@contextlib.contextmanager
def loop_disk(kind: str, image: Path) -> Iterator[Disk]:
    """An ext4 or XFS of its own on a loop device. Skips where there can be none."""
    program, options = MAKE[kind]
    reason = _reason_to_skip(program, "mount")
    if reason:
        pytest.skip(reason)
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES[kind])
    _run(program, *options, str(image))
    with mounted(source=str(image), kind=kind, options="loop") as disk:
        yield disk


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Disk]:
    """A tmpfs of `size` bytes. Skips where there can be none."""
    reason = _reason_to_skip("mount")
    if reason:
        pytest.skip(reason)
    with mounted(source="none", kind="tmpfs", options=f"size={size},mode=0700") as disk:
        yield disk
