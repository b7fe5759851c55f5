"""Holds and reservations of the native directory in parts, through its Python binding."""

from tests.unit.native.test_directory import CHUNK, NO_PARENT, RESERVED, Store, keys


def test_a_hold_gets_longer_and_shorter() -> None:
    store = Store(20 * CHUNK)
    store.store([1, 2, 3, 4])
    chunks, hold = store.directory.acquire(store.namespace, keys([1, 2]))
    assert chunks == 2
    assert store.directory.extend(hold, keys([3, 9])) == 1
    assert store.directory.extend(hold, keys([9])) == 0
    assert len(store.directory.columns(hold)[2]) == 3
    assert store.directory.shorten(hold, 1, store.tick())
    assert len(store.directory.columns(hold)[2]) == 1
    assert not store.directory.shorten(hold, 0, store.tick())
    behind, other = store.directory.acquire(store.namespace, keys([2, 3, 9]), 0, keys([1]))
    assert behind == 2
    assert store.directory.key_of(other, 0) == keys([2])
    assert store.directory.acquire(store.namespace, keys([2]), 0, keys([9])) == (0, 0)
    store.verify()


def test_a_reservation_is_made_and_ended_in_parts() -> None:
    store = Store(20 * CHUNK)
    wanted = keys(range(1, 13))
    made, states, _, _ = store.directory.reserve(
        store.namespace, store.size_class, b"", wanted, store.tick(), None, 0, 4
    )
    assert states == bytes([RESERVED] * 4)
    same, more, offsets, generations = store.directory.reserve_more(made, wanted, store.tick(), 4, 5)
    assert (same, more) == (made, bytes([RESERVED] * 5))
    assert (len(offsets), len(generations)) == (40, 40)
    assert not store.directory.end_part(made, 3, store.tick())
    store.verify()
    assert store.directory.stats()["writing"] == 6
    assert store.directory.end_part(made, 6, store.tick())
    assert store.directory.stats()["used_bytes"] == 0
    assert store.directory.reserve_more(made, wanted, store.tick(), 0, 2)[1] == bytes([NO_PARENT] * 12)
    store.verify()
