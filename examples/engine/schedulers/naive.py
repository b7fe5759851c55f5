"""Naive scheduler: one request at a time, from its prompt to its last token."""

from collections import deque

from examples.engine.engine import Engine, Running
from examples.engine.schedulers.admission import end_done, fill
from examples.engine.workload import Request


def run_naive(engine: Engine, waiting: deque[Request]) -> None:
    """Answer all requests."""
    running: list[Running] = []
    while waiting:
        fill(engine, waiting, running, 1)
        while not running[0].is_done:
            engine.decode(running)
        end_done(engine, running)
