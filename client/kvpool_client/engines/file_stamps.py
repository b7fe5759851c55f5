"""File stamps: which files are the weights in a place, and what changes when one of them does.

Without a stamp's change a file's bytes are the same, but for those that are written through a shared mapping: a write changes
the times, another file in its place has another inode. Through a mapping only the first write to a page that is clean does, and
on tmpfs and ramfs none. So digests are not remembered there, nor of files that have just changed (`keeps_times`).
Not here: the bytes themselves (`weights_reading`). Reads directories, no files. Any thread.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
# Beside the weights: which files of them are loaded, the model's own code, how its weights are quantized.
FURTHER_SUFFIXES = (".index.json", ".py")
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
# As many as the kernel follows.
LINKS_MAX = 40
_PART_OF_GGUF = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class FileStamp:
    """One file at one moment. `size` in bytes; times in nanoseconds since 1970."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    filesystem: int = 0

    @classmethod
    def of(cls, path: str, status: os.stat_result, filesystem: int = 0) -> "FileStamp":
        """The stamp of the file that has this status, on the filesystem with this id."""
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(path, status.st_dev, status.st_ino, status.st_size, *times, filesystem)

    @classmethod
    def at(cls, path: str, file: int | None = None) -> "FileStamp":
        """The stamp of the file that is there, or is open as `file`. Raises OSError."""
        place = path if file is None else file
        return cls.of(path, os.stat(place), os.statvfs(place).f_fsid)

    @property
    def facts(self) -> tuple[int, ...]:
        """What identifies the bytes on this machine, wherever the file is found: a device's number alone may be another
        filesystem's after it."""
        return self.filesystem, self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns


def stamps_of(place: Path, further: Sequence[str] = ()) -> dict[str, FileStamp]:
    """The files of weights in a directory, or of the weights' one file, by name; none where it has no weights.

    `further`: names of files that count as well. Links are followed. Raises OSError.
    """
    found = {path.name: path for path in _weights_in(place)}
    if found and place.is_dir():
        found |= {path.name: path for path in place.iterdir() if _is_beside_weights(path, further)}
    return {name: FileStamp.at(str(path)) for name, path in sorted(found.items())}


def first_difference(before: Mapping[str, FileStamp], now: Mapping[str, FileStamp]) -> str:
    """The path of a file that has changed, has come or has gone; empty where all are as they were."""
    for name in sorted(before.keys() | now.keys()):
        one, other = before.get(name), now.get(name)
        if one != other:
            return (one or other or FileStamp(name, 0, 0, 0, 0, 0)).path
    return ""


def keeps_times(file: int) -> bool:
    """Whether the open file has other times once its bytes are others, on a filesystem that no other one is taken for.

    Not in memory alone, where writes through a mapping change none. Not on a read-only filesystem: images with fixed times
    that follow each other may have the same numbers in everything. Nor where the filesystem is unknown.
    """
    with (
        contextlib.suppress(OSError),
        open(f"/proc/self/fdinfo/{file}") as facts,
        open("/proc/self/mountinfo") as mounts,
    ):
        mount = next((line.split()[1] for line in facts if line.startswith("mnt_id:")), "")
        known = next((line.partition(" - ")[2].split() for line in mounts if line.split(" ", 1)[0] == mount), [])
        return bool(known) and known[0] not in MEMORY_FILESYSTEMS and "ro" not in known[-1].split(",")
    return False


def first_younger(place: Path, stamps: Mapping[str, FileStamp], since_ns: int) -> str:
    """The path of something that has come to its place, or has changed, after `since_ns` (nanoseconds since 1970): a file, a
    link on the way to it, or the directory itself, which another one may have replaced. Empty where nothing has.

    A directory further up is not looked at: others have changed it when a neighbour came. Raises OSError.
    """
    entries = [stamp.path for stamp in stamps.values()]
    links = [link for path in (str(place), *entries) for link in _links_on(path)]
    found = [FileStamp.of(link, os.lstat(link)) for link in links]
    if place.is_dir():
        found.append(FileStamp.of(str(place), place.stat()))
    return next((each.path for each in (*stamps.values(), *found) if each.ctime_ns > since_ns), "")


def _links_on(path: str) -> Iterator[str]:
    """The symbolic links that are followed on the way to a file, whose own links of directories are followed too."""
    left, real, followed = list(reversed(os.path.join(os.getcwd(), path).split("/"))), "/", 0
    while left and followed < LINKS_MAX:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            real = os.path.dirname(real)
            continue
        here = os.path.join(real, name)
        if not os.path.islink(here):
            real = here
            continue
        yield here
        followed += 1
        target = os.readlink(here)
        left += reversed(target.split("/"))
        real = "/" if target.startswith("/") else real


def _weights_in(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from (path for path in place.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    elif (part := _PART_OF_GGUF.fullmatch(place.name)) is not None:
        yield from place.parent.glob(f"{_literally(part[1])}-?????-of-{part[2]}.gguf")
    elif place.is_file() and place.suffix in WEIGHT_SUFFIXES:
        yield place


def _is_beside_weights(path: Path, further: Sequence[str]) -> bool:
    is_named = path.name in (*QUANTIZATION_FILES, *further) or path.name.endswith(FURTHER_SUFFIXES)
    return is_named and path.is_file()


def _literally(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)
