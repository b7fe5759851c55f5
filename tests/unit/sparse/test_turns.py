"""Turns of a sequence: one call at a time, none behind one that ended in the middle."""

import threading
from collections.abc import Callable

import pytest

import kvpool_client as kv
from kvpool.errors import KVPoolError
from kvpool_sparse.turns import Turns, in_turn


class Counter:
    """Something with calls that may end in the middle."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.calls = 0

    @in_turn
    def call(self, error: BaseException | None = None) -> int:
        self.calls += 1
        if error is not None:
            raise error
        return self.calls

    @in_turn
    def call_inside(self) -> int:
        return self.call()


def test_calls_one_after_the_other_are_taken() -> None:
    counter = Counter()
    assert [counter.call(), counter.call()] == [1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ValueError("odd")])
def test_a_call_that_ended_in_the_middle_is_the_last_one(error: BaseException) -> None:
    counter = Counter()
    with pytest.raises(type(error)):
        counter.call(error)
    for _ in range(2):
        with pytest.raises(
            KVPoolError, match="an earlier call ended in the middle, expected the sequence to be closed"
        ):
            counter.call()
    assert counter.calls == 1
    counter.turns.check_end()


@pytest.mark.parametrize("error", [kv.InvalidArgument("odd"), KVPoolError("the sequence is closed")])
def test_an_error_of_the_pool_ends_nothing(error: KVPoolError) -> None:
    counter = Counter()
    with pytest.raises(type(error)):
        counter.call(error)
    assert counter.call() == 2


def test_a_call_inside_another_one_is_refused() -> None:
    counter = Counter()
    with pytest.raises(KVPoolError, match="in use by another call"):
        counter.call_inside()
    assert counter.call() == 1


def test_another_thread_is_refused_while_a_call_is_under_way() -> None:
    counter, refused = Counter(), list[str]()

    def refuse(attempt: Callable[[], object]) -> None:
        with pytest.raises(KVPoolError) as caught:
            attempt()
        refused.append(str(caught.value))

    def call_and_end() -> None:
        refuse(counter.call)
        refuse(counter.turns.check_end)

    with counter.turns:
        thread = threading.Thread(target=call_and_end)
        thread.start()
        thread.join()
    assert [text.split(", ")[0] for text in refused] == [
        "the sequence is in use by another call",
        "the sequence is in use by another thread",
    ]
    assert counter.call() == 1
