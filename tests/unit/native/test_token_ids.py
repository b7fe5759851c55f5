"""Token ids beside the records of the native directory."""

import numpy as np
import pytest

import kvpool_native
from kvpool.types import SaveState
from tests.unit.native.test_directory import CHUNK, RESERVED, Store, key, sums


def test_token_ids_live_and_end_with_their_chunk() -> None:
    store = Store(4 * CHUNK, max_chunks=4)
    directory = store.directory
    made = store.reserve([1, 2, 3])
    assert made.states.count(RESERVED) == 3
    ids = np.arange(3 * 7, dtype="<i4")
    with pytest.raises(ValueError, match="as many for each chunk"):
        directory.commit(made.id, 0, sums(3), 0, ids.tobytes()[:-4])
    with pytest.raises(ValueError, match="4096 at most"):
        directory.commit(made.id, 0, sums(1), 0, bytes(4 * (kvpool_native.TOKEN_IDS_MAX + 1)))
    directory.commit(made.id, 0, sums(1), 0, ids[:7].tobytes())
    directory.commit(made.id, 1, sums(2), 0, ids[7:].tobytes())
    assert directory.end_reservation(made.id, store.tick())
    assert [directory.tokens_of(key(name)) for name in (1, 2, 3, 4)] == [
        ids[:7].tobytes(),
        ids[7:14].tobytes(),
        ids[14:].tobytes(),
        b"",
    ]
    assert directory.stats()["token_id_bytes"] == ids.nbytes
    directory.discard(key(2))
    assert directory.tokens_of(key(2)) == b""
    assert directory.stats()["token_id_bytes"] == 28
    store.store([9, 10, 11, 12])
    assert directory.stats()["token_id_bytes"] == 0
    store.verify()


def test_token_ids_beyond_the_budget_are_left_out_and_their_chunks_stored() -> None:
    store = Store(16 * CHUNK)
    directory = store.directory
    directory.limit_token_ids(2 * 28)
    reserved = store.reserve([1, 2, 3])
    ids = np.arange(3 * 7, dtype="<i4")
    assert set(directory.commit(reserved.id, 0, sums(3), 0, ids.tobytes())) == {SaveState.STORED}
    assert directory.end_reservation(reserved.id, store.tick())
    assert [directory.tokens_of(key(name)) for name in (1, 2, 3)] == [ids[:7].tobytes(), ids[7:14].tobytes(), b""]
    stats = directory.stats()
    assert (stats["chunks"], stats["token_id_bytes"], stats["token_ids_left_out"]) == (3, 56, 1)
    directory.discard(key(2))
    store.store([9])
    further = store.reserve([10])
    directory.commit(further.id, 0, sums(1), 0, ids[:7].tobytes())
    directory.end_reservation(further.id, store.tick())
    assert directory.tokens_of(key(10)) == ids[:7].tobytes()
    assert directory.stats()["token_ids_left_out"] == 1
    store.verify()
