"""Workload: a trace as arrays. The prefix blocks of each request, in the order of the requests.

It is independent of caches and files. Invariant: each block has one parent, so a block stands for its whole prefix and a set of
cached blocks without holes is a set of whole prefixes. Pure; any thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.errors import InvalidArgument
from kvpool.ids import KEY_BYTES

Ints = npt.NDArray[np.int64]
NO_PARENT = -1
NO_SESSION = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: its time, and the ids of its blocks, the root first. `has_tail`: the last one is partial and never
    stored. `session`: the conversation it belongs to, NO_SESSION where the trace does not name it."""

    at_s: float
    ids: Sequence[int]
    has_tail: bool = False
    session: int = NO_SESSION


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of a trace. Request r asks at `at_ns[r]` for `blocks[first[r] : first[r + 1]]`, numbers from 0, root first.

    A pool would store the first `storable[r]` of these: all, or all but a partial block at the end.
    """

    at_ns: Ints
    first: Ints
    blocks: Ints
    storable: Ints
    unique: int
    session: Ints

    @property
    def requests(self) -> int:
        """How many requests."""
        return len(self.at_ns)

    @property
    def references(self) -> int:
        """How many blocks all requests use."""
        return len(self.blocks)

    def chains(self) -> Iterable[list[int]]:
        """The blocks of each request in turn."""
        first = self.first.tolist()
        for start, end in pairwise(first):
            yield self.blocks[start:end].tolist()

    def keys(self) -> npt.NDArray[np.uint8]:
        """A chunk key for each block, one a row."""
        hashes = b"".join(kvpool_native.blake3(block.to_bytes(8, "little")) for block in range(self.unique))
        return np.frombuffer(hashes, np.uint8).reshape(self.unique, KEY_BYTES)


def make_workload(prompts: Iterable[Prompt]) -> Workload:
    """The workload of prompts in their order. A request with an earlier time than the one before gets that one's time.

    Raises InvalidArgument where an id stands behind two different prefixes, or where no request has a block.
    """
    numbers: dict[int, int] = {}
    parents: list[int] = []
    at_s: list[float] = []
    first = [0]
    blocks: list[int] = []
    storable: list[int] = []
    sessions: list[int] = []
    for request, prompt in enumerate(prompts):
        parent = NO_PARENT
        for value in prompt.ids:
            block = numbers.setdefault(value, len(parents))
            if block == len(parents):
                parents.append(parent)
            elif parents[block] != parent:
                raise InvalidArgument(
                    f"request {request}: block {value} follows another block than it did before, "
                    "expected ids that each stand for one whole prefix"
                )
            blocks.append(block)
            parent = block
        at_s.append(prompt.at_s)
        storable.append(len(prompt.ids) - prompt.has_tail)
        sessions.append(prompt.session)
        first.append(len(blocks))
    if not blocks:
        raise InvalidArgument(f"no block in {len(at_s)} requests, expected prompts of at least one block")
    at_ns = (np.maximum.accumulate(np.array(at_s)) * NS_PER_S).astype(np.int64)
    return Workload(at_ns, _ints(first), _ints(blocks), _ints(storable), len(parents), _ints(sessions))


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)
