"""Holds and reservations of the native directory in parts, through its Python binding."""

from tests.unit.native.test_directory import CHUNK, NO_PARENT, RESERVED, Store, keys


def test_a_hold_gets_longer_and_shorter() -> None:
    store = Store(20 * CHUNK)
    store.store([1, 2, 3, 4])
    held = store.directory.acquire(store.namespace, keys([1, 2]))
    assert held.chunks == 2
    assert store.directory.extend(held.id, keys([3, 9])) == 1
    assert store.directory.extend(held.id, keys([9])) == 0
    assert len(store.directory.columns([held.id]).levels) == 3
    assert store.directory.shorten(held.id, 1, store.tick())
    assert len(store.directory.columns([held.id]).levels) == 1
    assert not store.directory.shorten(held.id, 0, store.tick())
    found = store.directory.acquire(store.namespace, keys([2, 3, 9]), 0, keys([1]))
    assert found.chunks == 2
    assert store.directory.key_of(found.id, 0) == keys([2])
    none = store.directory.acquire(store.namespace, keys([2]), 0, keys([9]))
    assert (none.chunks, none.id) == (0, 0)
    store.verify()


def test_a_reservation_is_made_and_ended_in_parts() -> None:
    store = Store(20 * CHUNK)
    wanted = keys(range(1, 13))
    reserved = store.directory.reserve(store.namespace, store.size_class, b"", wanted, store.tick(), None, 0, 4)
    assert reserved.states == bytes([RESERVED] * 4)
    further = store.directory.reserve_more(reserved.id, wanted, store.tick(), 4, 5)
    assert (further.id, further.states) == (reserved.id, bytes([RESERVED] * 5))
    assert (len(further.offsets), len(further.generations)) == (40, 40)
    assert not store.directory.end_part(reserved.id, 3, store.tick())
    store.verify()
    assert store.directory.stats()["writing"] == 6
    assert store.directory.end_part(reserved.id, 6, store.tick())
    assert store.directory.stats()["used_bytes"] == 0
    assert store.directory.reserve_more(reserved.id, wanted, store.tick(), 0, 2).states == bytes([NO_PARENT] * 12)
    store.verify()
