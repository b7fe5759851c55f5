"""The table of other nodes' chunks, byte for byte, compared with a file that an earlier build wrote.

00001640  02000000 01000000 02000000 00000000      an offset and sixteen bytes; what is zero is left out
"""

from pathlib import Path

import pytest

import kvpool_native
from tests.golden.test_index_layout import dump

GOLDEN = Path(__file__).parent / "remote_index_1.txt"
BUCKETS = 16
EPOCH, SEED = bytes(range(16)), bytes(range(16, 32))
KEYS = [kvpool_native.blake3(bytes([number])) for number in range(40)]
TAG_BITS, OWNER_BITS, AGE_BITS = 36, 12, 16
CHANGED = """the layout of the table has changed: give REMOTE_VERSION the next number, say so in docs/protocol.md
and CHANGELOG.md, and write what this test writes (`dump`) to a file of that number"""


def write_table() -> kvpool_native.Mapping:
    """The chunks of three nodes, of which one has ended and one has dropped a chunk."""
    mapping = kvpool_native.Mapping.create("golden-remote", kvpool_native.RemoteIndex.bytes_of(BUCKETS))
    index = kvpool_native.RemoteIndex(mapping, BUCKETS, EPOCH, SEED)
    owners = [index.add_owner() for _ in range(3)]
    assert owners == [1, 2, 3]
    index.insert(1, b"".join(KEYS[:20]))
    index.insert(2, b"".join(KEYS[10:30]))
    index.insert(3, b"".join(KEYS[30:]))
    index.remove(1, KEYS[0])
    index.set_pace(2, 0x10203, 0x40506)
    index.retire(3)
    assert index.verify() == []
    return mapping


def recorded_table() -> kvpool_native.Mapping:
    """The table of the file."""
    mapping = kvpool_native.Mapping.create("recorded-remote", kvpool_native.RemoteIndex.bytes_of(BUCKETS))
    view = mapping.view()
    for line in GOLDEN.read_text().splitlines():
        at, *words = line.split()
        for place, byte in enumerate(bytes.fromhex("".join(words)), int(at, 16)):
            view[place] = byte
    return mapping


def test_a_table_is_written_as_its_version_has_it() -> None:
    assert dump(bytes(write_table().view())) == GOLDEN.read_text(), CHANGED


def test_a_table_of_its_version_is_read() -> None:
    view = kvpool_native.RemoteView(recorded_table())
    assert view.epoch == EPOCH
    assert [view.has(key) for key in KEYS] == [False] + 29 * [True] + 10 * [False]
    assert [view.pace_of(key) for key in KEYS] == 10 * [(0, 0)] + 20 * [(0x10203, 0x40506)] + 10 * [(0, 0)]


@pytest.mark.parametrize("number", [5, 15, 25])
def test_an_entry_is_where_the_page_says(number: int) -> None:
    """By the page's words alone, from a hash in plain arithmetic."""
    data = bytes(recorded_table().view())
    words = [int.from_bytes(KEYS[number][at : at + 8], "little") for at in range(0, 32, 8)]
    seed = [int.from_bytes(SEED[at : at + 8], "little") for at in (0, 8)]
    front = _folded(words[0] ^ seed[0], words[1] ^ seed[1])
    back = _folded(words[2] ^ seed[0] ^ _ALL, words[3] ^ seed[1] ^ _ALL)
    fingerprint = front + back & _ALL
    spread = fingerprint * 0x9E3779B97F4A7C15 & _ALL
    first, second = ((value >> 32) * BUCKETS >> 32 for value in (fingerprint, spread))
    buckets = {first, second if second != first else (first + 1) % BUCKETS}
    found = set()
    for bucket in buckets:
        for at in range(4096 + 64 * bucket, 4096 + 64 * bucket + 64, 8):
            entry = int.from_bytes(data[at : at + 8], "little")
            if entry >> OWNER_BITS + AGE_BITS == fingerprint % (1 << TAG_BITS):
                found.add(entry >> AGE_BITS & (1 << OWNER_BITS) - 1)
    assert found == {owner for owner, part in ((1, range(1, 20)), (2, range(10, 30))) if number in part}


_ALL = (1 << 64) - 1


def _folded(one: int, other: int) -> int:
    product = one * other
    return (product ^ product >> 64) & _ALL
