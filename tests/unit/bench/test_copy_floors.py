"""The floors of the copy benchmark: plain gathers and scatters that move the same bytes as saves and loads."""

import numpy as np
import pytest

import kvpool_native
from tests.rigs.native_copies import BLOCKS, CHUNK_BYTES, Engine, column, some_ids


@pytest.mark.parametrize("form", ["kv_first", "block_first", "packed"])
def test_the_floors_of_the_benchmark_move_the_bytes_of_a_save_and_back(form: str) -> None:
    engine, target, ids = Engine(form, 16), Engine(form, 16, fill=0), some_ids(20)
    per_chunk, chunks = len(ids) // 5, np.zeros(5 * CHUNK_BYTES, np.uint8)
    kvpool_native.gather_plain(engine.view, column(ids), per_chunk, chunks)
    assert chunks.tobytes() == b"".join(engine.chunks(ids))
    kvpool_native.scatter_plain(target.view, column(ids), per_chunk, chunks)
    assert target.chunks(ids) == engine.chunks(ids)


def test_the_floors_of_the_benchmark_refuse_addresses_outside() -> None:
    engine, chunks = Engine("kv_first", 16), np.zeros(CHUNK_BYTES, np.uint8)
    with pytest.raises(ValueError, match="another size"):
        kvpool_native.gather_plain(engine.view, column([0, 1, 2, 3]), 4, chunks[:-1])
    with pytest.raises(ValueError, match="a block id lies outside the view"):
        kvpool_native.scatter_plain(engine.view, column([0, 1, 2, BLOCKS]), 4, chunks)
    with pytest.raises(ValueError, match="no multiple of chunk_blocks"):
        kvpool_native.gather_plain(engine.view, column([0, 1, 2, 3]), 3, chunks)
