"""Children of a node in order of their tokens: finds the child that shares the longest head with given tokens.

In a sorted sequence the longest common head is with one of the two neighbours of the place where the tokens would stand, so
a search costs a logarithm and an insertion at most one run, whatever the number of children: all prompts are children of
one root. Not a map of keys: full blocks are found by their key. One thread.
"""

from bisect import bisect_left, bisect_right, insort
from typing import Generic, TypeVar

from kvpool.ids import TOKEN_BYTES

RUN_MAX = 512

T = TypeVar("T")


class ChildOrder(Generic[T]):
    """Children by their tokens, packed int32.

    Invariant: the runs joined are the sorted names in `_children`; no run is empty or longer than RUN_MAX; `_firsts` has the
    first name of each run.
    """

    __slots__ = ("_children", "_firsts", "_runs")

    def __init__(self) -> None:
        self._children: dict[bytes, T] = {}
        self._runs: list[list[bytes]] = []
        self._firsts: list[bytes] = []

    def __len__(self) -> int:
        return len(self._children)

    def add_child(self, tokens: bytes, child: T) -> None:
        """Add a child. Requires that none has these tokens."""
        assert tokens not in self._children
        self._children[tokens] = child
        if not self._runs:
            self._runs.append([tokens])
            self._firsts.append(tokens)
            return
        number = self._run_of(tokens)
        run = self._runs[number]
        insort(run, tokens)
        if len(run) > RUN_MAX:
            half = len(run) // 2
            self._runs.insert(number + 1, run[half:])
            self._firsts.insert(number + 1, run[half])
            del run[half:]
        self._firsts[number] = run[0]

    def remove(self, tokens: bytes) -> None:
        """Remove a child. Requires that it is there."""
        del self._children[tokens]
        number = self._run_of(tokens)
        run = self._runs[number]
        del run[bisect_left(run, tokens)]
        if run:
            self._firsts[number] = run[0]
        else:
            del self._runs[number], self._firsts[number]

    def longest(self, wanted: bytes) -> tuple[T | None, int]:
        """The child with the longest common head, and how many tokens that is; None and 0 where no first token is equal."""
        if not self._runs:
            return None, 0
        number = self._run_of(wanted)
        run = self._runs[number]
        at = bisect_left(run, wanted)
        neighbours = run[max(0, at - 1) : at + 1]
        if at == len(run) and number + 1 < len(self._firsts):
            neighbours.append(self._firsts[number + 1])
        best, count = None, 0
        for name in neighbours:
            common = _common_tokens(name, wanted)
            if common > count:
                best, count = self._children[name], common
        return best, count

    def verify(self) -> list[str]:
        """Problems found by sorting anew."""
        joined = [name for run in self._runs for name in run]
        problems = [] if joined == sorted(self._children) else ["children are not in order"]
        if [run[0] for run in self._runs] != self._firsts or any(len(run) > RUN_MAX for run in self._runs):
            problems.append("the runs of children are not cut as noted")
        return problems

    def _run_of(self, tokens: bytes) -> int:
        return max(0, bisect_right(self._firsts, tokens) - 1)


def _common_tokens(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    differing = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    equal_bytes = (8 * size - differing.bit_length()) // 8
    return equal_bytes // TOKEN_BYTES
