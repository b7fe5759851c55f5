"""Usage reports byte for byte: the column that a peer of each version gets, one line a version in usage_columns.txt.

A changed line is a change of the protocol (docs/protocol.md). `python -m tests.golden.test_usage_column` writes the newest one.
"""

from pathlib import Path

import pytest

from kvpool.protocol import usage, versions
from kvpool.types import SPARSE_COUNTS, Level, SparseUsage

COLUMNS = Path(__file__).parent / "usage_columns.txt"
COUNTS = range(0x0101, 0x0101 * (usage.COUNTS + 1), 0x0101)


def _known() -> dict[int, bytes]:
    lines = (line.split() for line in COLUMNS.read_text().splitlines())
    return {int(version): bytes.fromhex(column) for version, column in lines}


@pytest.mark.parametrize("version", range(versions.OLDEST, versions.NEWEST + 1))
def test_a_column_is_written_as_its_version_has_it(version: int) -> None:
    assert usage.pack(COUNTS, version) == _known()[version]


@pytest.mark.parametrize("version", range(versions.OLDEST, versions.NEWEST + 1))
def test_a_column_of_every_version_is_read(version: int) -> None:
    report = usage.unpack(_known()[version])
    assert (report.lookups, report.lookup_chunks, report.loads) == tuple(COUNTS[:3])
    assert report.declined_chunks == tuple(COUNTS[usage.DECLINED_CHUNKS : usage.SPARSE])
    end = usage.SPARSE if version < 7 else usage.DEVICES if version < 8 else usage.COUNTS
    assert report.sparse == SparseUsage(*COUNTS[usage.SPARSE : end])
    peer, store = COUNTS[usage.HIT_CHUNKS + Level.PEER], COUNTS[usage.HIT_CHUNKS + Level.STORE]
    assert report.hit_chunks[Level.PEER :] == ((peer, store) if version >= 4 else (peer + store, 0))


def test_compute_by_lookup_comes_last() -> None:
    assert usage.SPARSE + len(SPARSE_COUNTS) == usage.COUNTS
    lengths = [len(_known()[version]) // 8 for version in (3, 4, 6, 7, 8)]
    assert lengths == [usage.SPARSE - 2, usage.SPARSE, usage.SPARSE, usage.DEVICES, usage.COUNTS]


if __name__ == "__main__":
    kept = _known() if COLUMNS.exists() else {}
    kept[versions.NEWEST] = usage.pack(COUNTS, versions.NEWEST)
    COLUMNS.write_text("".join(f"{version} {column.hex()}\n" for version, column in sorted(kept.items())))
