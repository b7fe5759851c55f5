"""Usage reports byte for byte: the column in usage_column.txt, hexadecimal.

A changed column is a change of the protocol (docs/protocol.md). `python -m tests.golden.test_usage_column` writes it.
"""

from pathlib import Path

from kvpool.protocol import usage
from kvpool.states import Level
from kvpool.usage import SPARSE_COUNTS, SparseUsage

COLUMN = Path(__file__).parent / "usage_column.txt"
COUNTS = range(0x0101, 0x0101 * (usage.COUNTS + 1), 0x0101)


def test_the_column_has_its_golden_bytes() -> None:
    assert usage.pack(COUNTS) == bytes.fromhex(COLUMN.read_text())


def test_the_golden_column_is_read() -> None:
    report = usage.unpack(bytes.fromhex(COLUMN.read_text()))
    assert (report.lookups, report.lookup_chunks, report.loads) == tuple(COUNTS[:3])
    assert report.declined_chunks == tuple(COUNTS[usage.DECLINED_CHUNKS : usage.SPARSE])
    assert report.sparse == SparseUsage(*COUNTS[usage.SPARSE :])
    peer, store = COUNTS[usage.HIT_CHUNKS + Level.PEER], COUNTS[usage.HIT_CHUNKS + Level.STORE]
    assert report.hit_chunks[Level.PEER :] == (peer, store)


def test_compute_by_lookup_comes_last() -> None:
    assert usage.SPARSE + len(SPARSE_COUNTS) == usage.COUNTS


if __name__ == "__main__":
    COLUMN.write_text(f"{usage.pack(COUNTS).hex()}\n")
