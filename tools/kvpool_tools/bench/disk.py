"""Disk folder of a benchmark, and the disk's rates without kvpool: the raw floor of an SSD tier.

The floor is plain preadv and pwritev past the page cache, from and into the same kind of memory as an arena's, in as many
threads as the tier has at work. Threads take their chunks in turn; each call moves a whole chunk. What is measured is on
one preallocated file that has been written once: only then do two writes go side by side on every file system.

Main thread of a command; the threads of a pass end with it.
"""

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidArgument, KVPoolError
from kvpool.ids import PAGE_BYTES
from kvpool.units import format_size

FOLDER_PREFIX = "kvpool-bench-"
# File systems in memory: a measurement there is not one of a disk.
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
FIO_TIMEOUT_S = 60.0
FIO_BYTES_MIN = 256 << 20

Bytes = npt.NDArray[np.uint8]


@contextlib.contextmanager
def disk_folder(parent: str | None, needed_bytes: int) -> Iterator[Path]:
    """A fresh folder on a disk, removed at the end. Raises InvalidArgument where there is no disk or no room.

    Without `parent` it is in the user's cache folder or in the folder for temporary files, the first that is on a disk.
    """
    chosen = _checked(Path(parent)) if parent is not None else _default_parent()
    free = shutil.disk_usage(chosen).free
    if free < needed_bytes:
        raise InvalidArgument(
            f"{chosen} has {format_size(free)} free, expected {format_size(needed_bytes)}: name a disk with more room by --path"
        )
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=chosen) as folder:
        yield Path(folder)


def has_disk(parent: str | None) -> bool:
    """Whether `disk_folder` finds a disk."""
    try:
        _checked(Path(parent)) if parent is not None else _default_parent()
    except InvalidArgument:
        return False
    return True


def file_system(path: Path) -> str:
    """The kind of file system that a path is on, such as `ext4`; `unknown` where the kernel does not report it."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0]
    return "unknown"


class RawFile:
    """A file of `chunks` chunks past the page cache. `close` ends it; the file is removed with its folder.

    Invariant: every byte of it has been written once before anything is measured.
    """

    def __init__(self, path: Path, chunk_bytes: int, chunks: int, depth: int) -> None:
        """`depth`: calls under way at a time. Raises KVPoolError where the disk has no room."""
        assert chunk_bytes % PAGE_BYTES == 0
        self.path = path
        self.chunk_bytes = chunk_bytes
        self.chunks = chunks
        self._depth = depth
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._fd, 0, chunk_bytes * chunks)
        except OSError as error:
            raise KVPoolError(f"{path} cannot be made: {error.strerror}") from error

    def close(self) -> None:
        """Close and remove the file."""
        os.close(self._fd)
        self.path.unlink()

    def write(self, source: Bytes, *, is_synced: bool = False) -> float:
        """Seconds to write every chunk from `source` [chunks, chunk_bytes]; `is_synced`: until they are durable."""
        seconds = self._pass(lambda chunk: os.pwritev(self._fd, [source[chunk].data], chunk * self.chunk_bytes))
        if is_synced:
            start = time.perf_counter()
            os.fdatasync(self._fd)
            seconds += time.perf_counter() - start
        return seconds

    def read(self, target: Bytes) -> float:
        """Seconds to read every chunk into `target` [chunks, chunk_bytes]."""
        return self._pass(lambda chunk: os.preadv(self._fd, [target[chunk].data], chunk * self.chunk_bytes))

    def write_one(self, source: Bytes, chunk: int) -> None:
        """Write one chunk."""
        _expect(os.pwritev(self._fd, [source[chunk].data], chunk * self.chunk_bytes), self.chunk_bytes)

    def read_one(self, target: Bytes, chunk: int) -> None:
        """Read one chunk."""
        _expect(os.preadv(self._fd, [target[chunk].data], chunk * self.chunk_bytes), self.chunk_bytes)

    @contextlib.contextmanager
    def writing(self, source: Bytes, chunks: Sequence[int]) -> Iterator[None]:
        """Within the context `depth` threads write chunks over and over, as fast as the disk allows."""
        is_over = threading.Event()

        def write_on(first: int) -> None:
            number = first
            while not is_over.is_set():
                self.write_one(source, chunks[number % len(chunks)])
                number += self._depth

        threads = [threading.Thread(target=write_on, args=(number,), daemon=True) for number in range(self._depth)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def _pass(self, move: Callable[[int], int]) -> float:
        """All chunks once, `depth` at a time. Seconds from the start of the threads' work to the end of the last one's."""
        moved = [0] * self._depth
        failures: list[OSError] = []
        barrier = threading.Barrier(self._depth + 1)

        def work(number: int) -> None:
            barrier.wait()
            try:
                moved[number] = sum(move(chunk) for chunk in range(number, self.chunks, self._depth))
            except OSError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(self._depth)]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if failures:
            raise KVPoolError(f"{self.path}: {failures[0].strerror}")
        _expect(sum(moved), self.chunks * self.chunk_bytes)
        return seconds


def aligned_bytes(size: int) -> Bytes:
    """Zeroed memory at a page's start."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def fio_gb_per_s(path: Path, *, is_write: bool, chunk_bytes: int, chunks: int, depth: int) -> float | None:
    """The rate that fio measures on a file of chunks with `depth` threads; None where fio is not installed or fails."""
    program = shutil.which("fio")
    if program is None:
        return None
    share = chunk_bytes * max(1, chunks // depth)
    direction = "write" if is_write else "read"
    arguments: Sequence[str] = (
        f"--filename={path}",
        "--name=floor",
        f"--rw={direction}",
        f"--bs={chunk_bytes}",
        f"--size={share}",
        f"--offset_increment={share}",
        f"--numjobs={min(depth, chunks)}",
        f"--loops={max(1, FIO_BYTES_MIN // (chunk_bytes * chunks))}",
        "--direct=1",
        "--ioengine=psync",
        "--thread",
        "--group_reporting",
        "--output-format=json",
    )
    try:
        found = subprocess.run(  # noqa: S603 - the program that was looked up, with our own arguments
            [program, *arguments], capture_output=True, timeout=FIO_TIMEOUT_S, check=True
        )
        return round(float(json.loads(found.stdout)["jobs"][0][direction]["bw_bytes"]) / 1e9, 2)
    except (subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


def _default_parent() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    refused = []
    for candidate in (cache, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):  # a home that cannot be written: the next one may be
            candidate.mkdir(parents=True, exist_ok=True)
        try:
            return _checked(candidate)
        except InvalidArgument as error:
            refused.append(str(error))
    raise InvalidArgument(f"there is no disk to measure: {'; '.join(refused)}; name a folder by --path")


def _checked(path: Path) -> Path:
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise InvalidArgument(f"{path} is no folder that can be written")
    kind = file_system(path)
    if kind in MEMORY_FILE_SYSTEMS:
        raise InvalidArgument(f"{path} is on {kind}, which is memory and no disk")
    with tempfile.NamedTemporaryFile(prefix=FOLDER_PREFIX, dir=path) as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            raise InvalidArgument(f"{path} is on {kind}, which cannot pass the page cache: {error.strerror}") from error
    return path


def _expect(moved: int, expected: int) -> None:
    if moved != expected:
        raise KVPoolError(f"a raw pass moved {moved} of {expected} bytes")
