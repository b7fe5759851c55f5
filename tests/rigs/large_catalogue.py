"""Catalogues of many chunks, written without their bytes: what a daemon finds when it restarts over a large tier."""

from pathlib import Path

import numpy as np

import kvpool_client as kv
from kvpool.packed_rows import CATALOGUE_ROW
from kvpool.tiers.ssd.catalogue import opening as catalogue_open
from kvpool.tiers.ssd.catalogue.catalogue import Catalogue
from kvpool.tiers.ssd.catalogue.identity import Identity
from kvpool.tiers.ssd.catalogue.rows import Row

# A page a chunk: a million slots need 8 GiB of files, of which nothing is ever written.
TINY = kv.Layout(layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", chunk_tokens=16)
SLOT_BYTES = 4096 + TINY.chunk_bytes
SEGMENT_BYTES = 64 << 20
CHAIN = 64
MAP_BYTES = 1 << 34


def tier_for(count: int) -> dict[str, str]:
    """Options of a tier that has room for so many records and some more."""
    capacity = (count + 40_000) * SLOT_BYTES + 4 * 640 * count + 8 * SEGMENT_BYTES
    return {
        "ssd__capacity": f"{capacity}B",
        "ssd__segment": f"{SEGMENT_BYTES}B",
        "ssd__max_chunks": str(count + 10_000),
    }


def packed_rows(count: int, first_slot: int, *, is_old: bool = False) -> bytes:
    """Records of whole chains of CHAIN chunks under random keys, each in a slot of its own, used in any order.

    `is_old`: before everything else that the catalogue knows.
    """
    random = np.random.default_rng(7)
    keys = random.bytes(32 * count)
    recency = random.permutation(count) + 1
    slots = SEGMENT_BYTES // SLOT_BYTES
    rows = []
    for number in range(count):
        slot = first_slot + number
        parent = keys[32 * number - 32 : 32 * number] if number % CHAIN else b""
        offset = slot // slots * SEGMENT_BYTES + slot % slots * SLOT_BYTES
        key = keys[32 * number : 32 * number + 32]
        used = 0 if is_old else int(recency[number])
        row = Row(key, parent, offset, slot + 1000, used, TINY.chunk_bytes, 1, 1)
        rows.append(row.encode())
    return b"".join(rows)


def add_records(ssd: Path, count: int, *, is_old: bool = False) -> None:
    """Add `count` chunks to the catalogue of a stopped daemon."""
    found = catalogue_open.examine(ssd / "catalogue", MAP_BYTES).found
    assert found is not None
    identity = Identity(found.epoch, found.namespaces)
    map_bytes = (ssd / "catalogue" / "data.mdb").stat().st_size + 640 * count + (1 << 20)
    catalogue = Catalogue(ssd / "catalogue", map_bytes, identity, sync_data=lambda: None)
    rows = packed_rows(count, SEGMENT_BYTES // SLOT_BYTES, is_old=is_old)
    catalogue.fill(np.frombuffer(rows, CATALOGUE_ROW))
    catalogue.start(checkpoint_s=1.0)
    assert catalogue.close(60.0)
