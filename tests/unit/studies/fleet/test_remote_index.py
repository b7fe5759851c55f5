"""The table of remote blocks and the store: what is late, what is forgotten, what is found."""

from hypothesis import given, settings
from hypothesis import strategies as st

from studies.fleet.remote_index import BlockChange, RemoteIndex
from studies.fleet.shared_store import SharedStore


def _come(*blocks: int) -> list[BlockChange]:
    return [BlockChange(block, True) for block in blocks]


def _gone(*blocks: int) -> list[BlockChange]:
    return [BlockChange(block, False) for block in blocks]


def test_a_change_is_known_after_the_delay() -> None:
    index = RemoteIndex(None, 10)
    index.publish(0, _come(1, 2), 100)
    index.advance(109)
    assert index.find([1, 2]).blocks == 0
    index.advance(110)
    assert index.find([1, 2]) == index.find([1, 2], asker=1)
    assert (index.find([1, 2]).blocks, set(index.find([1, 2]).nodes)) == (2, {0})
    index.publish(0, _gone(2), 111)
    index.advance(120)
    assert index.find([1, 2]).blocks == 2
    index.advance(121)
    assert index.find([1, 2]).blocks == 1


def test_a_full_table_forgets_what_came_first() -> None:
    index = RemoteIndex(3, 0)
    index.publish(0, _come(1, 2), 0)
    index.publish(1, _come(1, 2), 1)
    index.advance(1)
    assert (index.entries_peak, index.forgotten) == (3, 1)
    assert index.find([1], asker=1).blocks == 0
    assert index.find([2], asker=1).nodes == {0}
    index.publish(0, _gone(1, 2), 2)
    index.advance(2)
    assert index.verify() == []
    assert index.find([1, 2]).nodes == {1}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=60), st.integers(1, 12))
def test_the_table_is_the_sum_of_the_changes(changes: list[tuple[int, int, bool]], room: int) -> None:
    bounded, whole, model = RemoteIndex(room, 0), RemoteIndex(None, 0), set[tuple[int, int]]()
    for now_ns, (node, block, has_come) in enumerate(changes):
        for index in (bounded, whole):
            index.publish(node, [BlockChange(block, has_come)], now_ns)
            index.advance(now_ns)
            assert index.verify() == []
        (model.add if has_come else model.discard)((node, block))
    for block in range(10):
        assert whole.find([block]).nodes == {node for node, other in model if other == block}
        assert bounded.find([block]).nodes <= whole.find([block]).nodes


def test_the_store_evicts_the_least_recently_used_leaves_first() -> None:
    store = SharedStore(4)
    assert store.publish([1, 2]) == 2
    assert store.publish([3, 4]) == 2
    assert store.publish([1, 2]) == 0
    assert store.publish([5]) == 1
    assert (store.count_leading([3, 4]), store.count_leading([1, 2])) == (1, 2), "4 went, the oldest leaf"
    assert store.publish([3]) == 0
    assert store.publish([6]) == 1
    assert (store.count_leading([1, 2]), store.count_leading([3])) == (1, 1), "2 went, whose root is newer"
    assert store.publish(list(range(10, 20))) == 4
    assert store.count_leading(list(range(10, 20))) == 4
