"""Long repetitions in batches: each is a case of its own with a seed of its own.

So the workers of a run share them, and a sample draws some.
"""

import pytest


def batches(*values: object, of: int) -> list[object]:
    """Cases of the campaign that repeat `of` times together. The last value is how often each of them repeats."""
    size = values[-1]
    assert isinstance(size, int)
    assert of % size == 0, f"{of} is no multiple of {size}"
    name = "-".join(map(str, values))
    return [
        pytest.param(*values, id=f"{name}-of-{of}-{number}", marks=pytest.mark.campaign)
        for number in range(1, of // size + 1)
    ]
