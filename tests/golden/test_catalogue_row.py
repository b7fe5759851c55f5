"""The bytes of a catalogue row and of an identity, compared with files that an earlier version wrote."""

from pathlib import Path

import kvpool_native
from kvpool.tiers.ssd.catalogue import identity as ssd_identity
from kvpool.tiers.ssd.catalogue import rows as catalogue_rows
from kvpool.tiers.ssd.catalogue.identity import Identity
from kvpool.tiers.ssd.catalogue.rows import Row

HERE = Path(__file__).parent
ROW = Row(
    key=bytes(range(32)),
    parent=bytes(range(32, 64)),
    offset=0x0102030405060000,
    generation=0x1112131415161718,
    recency=0x2122232425262728,
    extent_bytes=1 << 20,
    extents=32,
    namespace=7,
    priority=80,
    duration_s=3600,
)
IDENTITY = Identity(bytes(range(16)), {1: ("llama-3-8b", [1, 32, 8, "bfloat16"]), 2: ("other", [])})


def test_a_row_is_written_in_its_format() -> None:
    assert ROW.encode() == (HERE / "catalogue_row.bin").read_bytes()


def test_a_row_of_an_earlier_version_is_read() -> None:
    rows, bad = catalogue_rows.restorable((HERE / "catalogue_row.bin").read_bytes())
    assert (len(rows), bad) == (1, 0)
    found = rows[0]
    assert (bytes(found["key"]), bytes(found["parent"])) == (ROW.key, ROW.parent)
    for name in ("offset", "generation", "recency", "extent_bytes", "extents", "namespace", "priority", "duration_s"):
        assert int(found[name]) == getattr(ROW, name)


def test_an_identity_is_written_and_read_in_its_format(tmp_path: Path) -> None:
    ssd_identity.write_identity(tmp_path, IDENTITY)
    assert (tmp_path / "identity").read_bytes() == (HERE / "identity.bin").read_bytes()
    (tmp_path / "identity").write_bytes((HERE / "identity.bin").read_bytes())
    assert ssd_identity.read_identity(tmp_path) == IDENTITY


def test_rows_have_the_size_that_native_code_expects() -> None:
    assert kvpool_native.CATALOGUE_ROW.bytes == len((HERE / "catalogue_row.bin").read_bytes()) == 120
