"""Holds in DRAM by model and by user: the largest ones by name, and all others together."""

from types import SimpleNamespace
from typing import Any

from kvpool.ids import ConnectionId
from kvpool.pool.readers.hold_bounds import OTHERS, ROWS_MAX, held_by_model, held_by_user


def _directory(*holders: tuple[int, int]) -> Any:
    """A directory with these holders, and the bytes that each has leased."""
    rows = [
        SimpleNamespace(holder=holder, reserved_bytes=1, zombie_bytes=2, leased_bytes=size) for holder, size in holders
    ]
    return SimpleNamespace(holders=lambda: rows)


def test_the_holds_of_a_users_connections_add_up_and_those_of_no_user_have_a_name() -> None:
    directory = _directory((0, 10), (1, 20), (2, 30), (3, 40), (1 << 40, 50))
    users = {ConnectionId(1): 1000, ConnectionId(2): 1000, ConnectionId(3): None}
    assert held_by_user(directory, users) == {"1000": 56, "tickets": 13, "operators": 43, "peers": 53}


def test_users_beyond_the_bound_are_counted_together() -> None:
    count = ROWS_MAX + 3
    directory = _directory(*((number, 100 * number) for number in range(1, count + 1)))
    found = held_by_user(directory, {ConnectionId(number): number for number in range(1, count + 1)})
    assert len(found) == ROWS_MAX + 1
    assert found[OTHERS] == sum(100 * number + 3 for number in (1, 2, 3))
    assert sum(found.values()) == sum(100 * number + 3 for number in range(1, count + 1))


def test_all_ranks_and_layouts_of_a_model_count_together() -> None:
    names: dict[int, Any] = {
        0: SimpleNamespace(model="a", layout=SimpleNamespace(stored_bytes=10)),
        1: SimpleNamespace(model="a", layout=SimpleNamespace(stored_bytes=100)),
        2: SimpleNamespace(model="b", layout=SimpleNamespace(stored_bytes=1000)),
    }
    rows = [SimpleNamespace(namespace=number, writing=1, zombies=2, held=number) for number in names]
    directory: Any = SimpleNamespace(held_namespaces=lambda: rows)
    namespaces: Any = SimpleNamespace(by_id=names.__getitem__)
    assert held_by_model(directory, namespaces) == {"a": 30 + 400, "b": 5000}
