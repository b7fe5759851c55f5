"""Bounds for a policy: hits of the offline optimum and of leaf-first LRU, computed on their own.

They share nothing with the daemon's policies, so that those can be measured against them. The rules are the simulator's: a hit
is the longest prefix cached before the request; then all of the request's blocks are used. Pure; any thread.
"""

import heapq
from collections import OrderedDict

import numpy as np

from kvpool_tools.sim.workload import Workload


def belady_hits(workload: Workload, capacity: int) -> int:
    """Block hits of the offline optimum, which knows the future: it caches the `capacity` blocks whose next use is nearest.

    Among blocks used next by the same request the deepest is evicted first; a block that is never used again is not cached. A
    request that uses a block uses its ancestors too, so they are used no later, and the cached blocks are whole prefixes.

    That is why counts suffice. `waiting[r]` is how many cached blocks request r will be the next to use. When r comes, every
    cached block of its chain waits for r: those are its hits. To evict the farthest block is to lower the count of the latest
    request that any block waits for.
    """
    waiting: dict[int, int] = {}
    latest: list[int] = []  # requests in `waiting`, negated: a heap whose first is the latest; some are outdated
    cached = hits = 0
    for request, runs in enumerate(_next_uses(workload)):
        found = waiting.pop(request, 0)
        hits += found
        cached -= found
        for next_request, count in runs:
            if next_request not in waiting:
                heapq.heappush(latest, -next_request)
                waiting[next_request] = 0
            waiting[next_request] += count
            cached += count
        while cached > capacity:
            last = -latest[0]
            given_up = min(cached - capacity, waiting[last])
            cached -= given_up
            waiting[last] -= given_up
            if not waiting[last]:
                del waiting[last]
                heapq.heappop(latest)
    return hits


def _next_uses(workload: Workload) -> list[list[tuple[int, int]]]:
    """For each request: (a later request, how many blocks of this one it is the next to use)."""
    by_block = np.argsort(workload.blocks, kind="stable")
    request_of = np.repeat(np.arange(workload.requests), np.diff(workload.first))
    next_request = np.full(workload.references, -1, np.int64)
    is_again = workload.blocks[by_block[:-1]] == workload.blocks[by_block[1:]]
    next_request[by_block[:-1][is_again]] = request_of[by_block[1:][is_again]]
    is_used = next_request >= 0
    pairs, counts = np.unique(request_of[is_used] * workload.requests + next_request[is_used], return_counts=True)
    runs: list[list[tuple[int, int]]] = [[] for _ in range(workload.requests)]
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        request, later = divmod(pair, workload.requests)
        runs[request].append((later, count))
    return runs


def lru_hits(workload: Workload, capacity: int) -> int:
    """Block hits of leaf-first LRU: a request's blocks become the newest, its root the very newest; the oldest is evicted.

    A request's own blocks do not push each other out: of a chain longer than the capacity its beginning is kept.
    """
    cached: OrderedDict[int, None] = OrderedDict()  # the oldest first
    hits = 0
    for chain in workload.chains():
        is_hit = True
        for block in chain:
            is_hit = is_hit and block in cached
            hits += is_hit
            cached.pop(block, None)
        kept = chain[:capacity]
        while len(cached) + len(kept) > capacity:
            cached.popitem(last=False)
        for block in reversed(kept):
            cached[block] = None
    return hits
