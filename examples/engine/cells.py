"""Cells of the benchmark: one scheduler with one kind of cache answers the whole workload on a fresh engine."""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from time import perf_counter, sleep

import kvpool_client as kv
from demo.node import ProcessFailed
from examples.engine.attention import TILE
from examples.engine.engine import Counts, Engine
from examples.engine.model import Model, Shape
from examples.engine.schedulers import SCHEDULERS
from examples.engine.workload import Request
from kvpool.clock import Deadline

CHUNK_TOKENS = 2 * TILE
CONNECT_TIMEOUT_S = 20.0


class Cache(Enum):
    """Kinds of cache, and how many times as fast as without any prefill and the whole are to be at least."""

    NONE = ("none", 0.0, 0.0)
    PREFIX = ("prefix cache", 8.0, 1.5)
    POOL = ("pool", 0.0, 0.0)
    RESTARTED = ("pool, engine restarted", 6.0, 0.0)
    KILLED = ("pool, daemon killed", 5.0, 0.0)

    def __init__(self, label: str, *bars: float) -> None:
        self.label = label
        self.bars = bars


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell measured. `problems`: of its blocks at the end."""

    scheduler: str
    cache: Cache
    elapsed_s: float
    counts: Counts
    answers: dict[int, list[int]]
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """What all cells share."""

    shape: Shape
    requests: list[Request]
    num_blocks: int
    seed: int

    def run(self, scheduler: str, cache: Cache, socket: str) -> Cell:
        """Measure one cell. An engine is new from its weights on; what it has not saved at the end is saved unmeasured."""
        pool = self._connect(socket) if cache not in (Cache.NONE, Cache.PREFIX) else None
        engine = Engine(Model(self.shape, self.seed), self.num_blocks, reuse=cache is not Cache.NONE, pool=pool)
        began = perf_counter()
        SCHEDULERS[scheduler](engine, deque(self.requests))
        elapsed_s = perf_counter() - began
        problems = engine.close()
        if pool is not None:
            pool.close()
        return Cell(scheduler, cache, elapsed_s, engine.counts, engine.answers, problems)

    def _connect(self, socket: str) -> kv.Pool:
        layers, heads, dim = self.shape.layers, self.shape.kv_heads, self.shape.head_dim
        layout = kv.Layout(layers=layers, kv_heads=heads, head_dim=dim, dtype="float32", chunk_tokens=CHUNK_TOKENS)
        pool = kv.connect(socket, model="example-engine", revision=str(self.seed), layout=layout)
        deadline = Deadline(CONNECT_TIMEOUT_S)
        while not pool.connected:
            if deadline.has_passed():
                raise ProcessFailed(f"kvpoold at {socket} does not serve within {CONNECT_TIMEOUT_S:g} s")
            sleep(0.01)
        return pool
