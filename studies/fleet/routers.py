"""Models of routers: which node gets a request. Each is deterministic by its seed, and knows nothing that a router cannot know.

A model sees a request's session and full blocks, what nodes published, and what it sent where. Not modelled are nodes that
fail, and load that a router asks nodes for. One thread.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

import kvpool_native
from studies.fleet.remote_index import RemoteIndex

# A known prefix decides from this part of the prompt on: less is a common prompt, which every node has soon.
KNOWN_SHARE = 0.5


class Router(Protocol):
    """Choice of a node for each request."""

    def choose(self, session: int, chain: Sequence[int], now_s: float) -> int:
        """The node that gets the request."""
        ...

    def note_served(self, node: int, missed: int, now_s: float) -> None:
        """Note that a node has to compute so many blocks of a request."""
        ...


class RoundRobin:
    """Request after request to node after node."""

    def __init__(self, nodes: int, seed: int) -> None:
        self._nodes = nodes
        self._next = seed % nodes

    def choose(self, session: int, chain: Sequence[int], now_s: float) -> int:  # noqa: ARG002 - the same whatever comes
        """See `Router`."""
        node, self._next = self._next, (self._next + 1) % self._nodes
        return node

    def note_served(self, node: int, missed: int, now_s: float) -> None:
        """It counts no load."""


class SessionAffine:
    """All requests of a session to one node, by a hash of the session's number: load is not looked at."""

    def __init__(self, nodes: int, seed: int) -> None:
        self._nodes = nodes
        self._salt = seed.to_bytes(8, "little")

    def choose(self, session: int, chain: Sequence[int], now_s: float) -> int:  # noqa: ARG002 - the session decides
        """See `Router`."""
        digest = kvpool_native.blake3(self._salt + session.to_bytes(8, "little"))
        return int.from_bytes(digest[:8], "little") % self._nodes

    def note_served(self, node: int, missed: int, now_s: float) -> None:
        """It counts no load."""


class KvAware:
    """The node with the longest known prefix, or the one with the least work.

    The first, if the prefix is half of the prompt and to wait there takes no longer than to compute it elsewhere. Of nodes with
    equal work it takes the one that has computed the fewest blocks. Which node has what it knows from their events, as late as
    these come; a node's work are the blocks that it has to compute, one after the other.
    """

    def __init__(self, nodes: int, seed: int, known: RemoteIndex, block_compute_s: float) -> None:
        """`known`: everything published so far, without a bound."""
        self._known = known
        self._block_s = block_compute_s
        self._busy_until_s = np.zeros(nodes)
        self._computed = np.zeros(nodes, np.int64)
        self._order = np.random.default_rng(seed).permutation(nodes)  # decides among equals

    def choose(self, session: int, chain: Sequence[int], now_s: float) -> int:  # noqa: ARG002 - the blocks decide
        """See `Router`."""
        waiting_s = np.maximum(self._busy_until_s - now_s, 0.0)
        least_s = float(waiting_s.min())
        owners = self._known.find(chain)
        if chain and owners.blocks >= KNOWN_SHARE * len(chain):
            best = self._lightest(np.array(list(owners.nodes)), waiting_s)
            if waiting_s[best] - least_s <= owners.blocks * self._block_s:
                return best
        return self._lightest(np.flatnonzero(waiting_s == least_s), waiting_s)

    def note_served(self, node: int, missed: int, now_s: float) -> None:
        """See `Router`."""
        self._busy_until_s[node] = max(self._busy_until_s[node], now_s) + missed * self._block_s
        self._computed[node] += missed

    def _lightest(self, nodes: npt.NDArray[np.int64], waiting_s: npt.NDArray[np.float64]) -> int:
        if len(nodes) == 1:
            return int(nodes[0])
        best = np.lexsort((self._order[nodes], self._computed[nodes], waiting_s[nodes]))[0]
        return int(nodes[best])


FOLLOWS_EVENTS = "kv-aware"
ROUTERS = ("session-affine", FOLLOWS_EVENTS, "round-robin")


def make_router(name: str, nodes: int, seed: int, *, known: RemoteIndex, block_compute_s: float) -> Router:
    """A router by its name, one of ROUTERS. `known`: what has been published."""
    assert name in ROUTERS
    if name == FOLLOWS_EVENTS:
        return KvAware(nodes, seed, known, block_compute_s)
    return RoundRobin(nodes, seed) if name == "round-robin" else SessionAffine(nodes, seed)
