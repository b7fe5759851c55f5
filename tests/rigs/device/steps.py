"""Steps of a thread that copies: something happens at one of them, before or after a call."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Classes, each with the names of methods that are steps.
Methods = Sequence[tuple[type, Sequence[str]]]


@contextmanager
def at_step(methods: Methods, number: int, act: Callable[[], object]) -> Iterator[list[str]]:
    """Has something happen at the step with this number, on the thread that takes it. The list has the names of all that were
    taken."""
    names: list[str] = []

    def take(name: str) -> None:
        names.append(name)
        if len(names) == number + 1:
            act()

    def watched(name: str, real: Any) -> Any:
        def step(*arguments: Any, **named: Any) -> Any:
            take(f"before {name}")
            answer = real(*arguments, **named)
            take(f"after {name}")
            return answer

        return step

    reals = [(owner, name, getattr(owner, name)) for owner, chosen in methods for name in chosen]
    for owner, name, real in reals:
        setattr(owner, name, watched(name, real))
    try:
        yield names
    finally:
        for owner, name, real in reals:
            setattr(owner, name, real)
