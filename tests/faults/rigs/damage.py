"""Damage to files: flipped bits, truncated files, and other kinds of files in their place. All randomness is the caller's."""

import os
import random
import shutil
from pathlib import Path

import numpy as np

PAGE_BYTES = 4096
SLOT_MAGIC = b"KVPSLOT1"


def flip_bits(path: Path, places: list[int], dice: random.Random) -> None:
    """Flip one bit of each byte named."""
    fd = os.open(path, os.O_RDWR)
    try:
        for place in places:
            byte = os.pread(fd, 1, place)
            if byte:
                os.pwrite(fd, bytes([byte[0] ^ 1 << dice.randrange(8)]), place)
        os.fsync(fd)
    finally:
        os.close(fd)


def slots_in(segment: Path) -> list[int]:
    """Where slots begin that hold a chunk."""
    data = np.fromfile(segment, np.uint8)
    pages = data[: len(data) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
    is_header = (pages[:, : len(SLOT_MAGIC)] == np.frombuffer(SLOT_MAGIC, np.uint8)).all(axis=1)
    return [int(page) * PAGE_BYTES for page in np.flatnonzero(is_header)]


def flip_in_slots(segments: list[Path], flips: int, slot_bytes: int, dice: random.Random) -> int:
    """Flip bits in slots that hold chunks, headers more often than their size asks for; how many were flipped."""
    slots = [(segment, start) for segment in segments for start in slots_in(segment)]
    chosen: dict[Path, list[int]] = {}
    for segment, start in (dice.choice(slots) for _ in range(flips if slots else 0)):
        reach = dice.choice((200, PAGE_BYTES, slot_bytes, slot_bytes))
        chosen.setdefault(segment, []).append(start + dice.randrange(reach))
    for segment, places in chosen.items():
        flip_bits(segment, places, dice)
    return sum(len(places) for places in chosen.values())


def flip_anywhere(path: Path, flips: int, dice: random.Random) -> int:
    """Flip bits all over a file; how many were flipped."""
    size = path.stat().st_size
    flip_bits(path, [dice.randrange(size) for _ in range(flips)], dice)
    return flips


def replace_with(path: Path, kind: str) -> None:
    """Put something else in the place of a file or a directory: nothing, a directory, a symlink, a fifo, a text."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
        (path / "inside").write_text("not yours")
    elif kind == "symlink":
        outside = path.parent.parent / f"outside-{path.name}"
        outside.write_bytes(b"not yours" * 1000)
        path.symlink_to(outside)
    elif kind == "dangling":
        path.symlink_to(path.parent.parent / "nowhere" / "at-all")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("this is no such file\n" * 500)
    elif kind == "empty":
        path.touch()
    else:
        assert kind == "nothing", kind
