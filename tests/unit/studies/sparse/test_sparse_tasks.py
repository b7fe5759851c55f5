"""Token streams with questions: each key is asked once, answers stand at their places, positions have gaps."""

import numpy as np
import pytest

from studies.sparse.tasks import ASK, FIRST_VALUE, TASKS, gapped_positions, make_stream


@pytest.mark.parametrize("task", TASKS)
def test_answers_stand_where_they_are_found(task: str) -> None:
    stream = make_stream(np.random.default_rng(1), task, 2048)
    assert len(stream.tokens) == 2048
    assert np.array_equal(stream.tokens[stream.asked + 1], stream.tokens[stream.found_at])
    assert np.array_equal(stream.tokens[stream.asked], stream.tokens[stream.found_at - 1])
    assert stream.found_at.max() < stream.questions_start <= stream.asked.min()


def test_each_key_is_asked_once() -> None:
    stream = make_stream(np.random.default_rng(2), "keys", 4096)
    asked = stream.tokens[stream.asked]
    assert len(asked) == 64
    assert len(set(asked.tolist())) == 64
    assert (stream.tokens[stream.asked - 1] == ASK).all()
    assert (stream.tokens[stream.asked + 1] >= FIRST_VALUE).all()


def test_positions_increase_and_stay_in_their_span() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        positions = gapped_positions(rng, 256, 34_000)
        assert (np.diff(positions) >= 1).all()
        assert positions[-1] <= 34_000
    assert np.array_equal(gapped_positions(rng, 256, 256), np.arange(256))
