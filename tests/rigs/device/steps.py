"""Steps of a thread that copies: something happens at some of them, before or after a call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# Classes, each with the names of methods that are steps.
Methods = Sequence[tuple[type, Sequence[str]]]


@contextmanager
def at_steps(methods: Methods, acts: Mapping[int, Callable[[], object]]) -> Iterator[list[str]]:
    """Has something happen at the steps with these numbers, on the thread that takes them. The list has the names of all that
    were taken."""
    names: list[str] = []

    def take(name: str) -> None:
        names.append(name)
        act = acts.get(len(names) - 1)
        if act is not None:
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
