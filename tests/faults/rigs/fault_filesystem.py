"""A file system that fails on command, built and mounted; the head of faultfs/fault_filesystem.cpp has its commands.

Needs g++, the headers of FUSE 3 and /dev/fuse; a test skips and names what is lacking.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.rigs.disks import is_mounted
from tests.rigs.daemon import wait_until

SOURCE = Path(__file__).parent / "faultfs" / "fault_filesystem.cpp"
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
BUILD_TIMEOUT_S = 120.0


def build(directory: Path) -> Path:
    """The program, compiled. Skips where that is not possible here."""
    headers = Path("/usr/include/fuse3")
    if shutil.which("g++") is None or not (headers / "fuse.h").exists():
        pytest.skip("libfuse is not installed: apt-get install g++ libfuse3-dev fuse3")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or (os.geteuid() != 0 and shutil.which("fusermount3") is None):
        pytest.skip("/dev/fuse cannot be used, or fusermount3 is not installed: apt-get install fuse3")
    program = directory / "fault_filesystem"
    defines = ["-D_FILE_OFFSET_BITS=64", "-DFUSE_USE_VERSION=31", f"-I{headers}"]
    command = ["g++", "-std=c++20", "-O1", *WARNINGS, *defines, str(SOURCE), "-o", str(program), "-lfuse3", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return program


class FaultFilesystem:
    """One mount over a directory of its own."""

    def __init__(self, program: Path, directory: Path) -> None:
        self._program = program
        self._backing = directory / "backing"
        self.path = directory / "mount"
        self._cuts = 0
        self.lost: dict[str, int] = {}  # writes that the last power cut has kept, torn and dropped
        for made in (self._backing, self.path):
            made.mkdir()
        self._process = self._mount()

    def set(self, **values: int | str) -> None:
        """Add these faults to the present ones."""
        self._write("".join(f"{name} {value}\n" for name, value in values.items()))

    def clear(self) -> None:
        """No faults from now on."""
        self._write("clear 1\n")

    def counts(self) -> dict[str, int]:
        """Counts of events, by name."""
        lines = (self.path / ".faults").read_text().splitlines()
        return {name: int(count) for name, count in (line.split() for line in lines)}

    def cut_power(self) -> None:
        """Keep of every write that is not synced all, a part or nothing; fail all that follows."""
        self._cuts += 1
        self._write(f"cut {self._cuts}\n")

    def restore_power(self) -> None:
        """Mount again, with the writes that were kept."""
        self.lost = self.counts()
        self.unmount()
        self._process = self._mount()

    def unmount(self) -> None:
        """End the file system."""
        self._process.terminate()
        self._process.wait(10.0)
        wait_until(lambda: not is_mounted(self.path), f"{self.path} is unmounted")

    def _mount(self) -> "subprocess.Popen[bytes]":
        command = [str(self._program), str(self._backing), str(self.path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: is_mounted(self.path) or process.poll() is not None, f"{self.path} is mounted")
        assert process.poll() is None
        return process

    def _write(self, text: str) -> None:
        fd = os.open(self.path / ".faults", os.O_WRONLY)
        try:
            assert os.write(fd, text.encode()) == len(text)
        finally:
            os.close(fd)
