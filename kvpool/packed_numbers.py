"""Packed numbers: columns of u64 or u32 in bytes, as native calls and frames have them, read in place and made.

What has a few hundred of them needs no arrays: numpy costs a process 16 MiB and 55 ms of its start, measured. Little endian, as
everything of the core. Pure; any thread.
"""

from array import array
from collections.abc import Iterable

U64_BYTES = 8
U32_BYTES = 4
assert array("Q").itemsize == U64_BYTES
assert array("I").itemsize == U32_BYTES


def u64_of(column: bytes | bytearray) -> "memoryview[int]":
    """The numbers of a column of u64, not copied; parts of them are views too. REQUIRES: whole numbers."""
    return memoryview(column).cast("Q")


def u32_of(column: bytes | bytearray) -> "memoryview[int]":
    """The numbers of a column of u32, not copied. REQUIRES: whole numbers."""
    return memoryview(column).cast("I")


def pack_u64(numbers: Iterable[int]) -> bytes:
    """The column of u64."""
    return array("Q", numbers).tobytes()


def pack_u32(numbers: Iterable[int]) -> bytes:
    """The column of u32."""
    return array("I", numbers).tobytes()
