"""Naive scheduler: one request at a time, from its prompt to its last token."""

from examples.engine.engine import Engine, Running
from examples.engine.schedulers.queue import Queue


def run_naive(engine: Engine, queue: Queue) -> None:
    """Answer all requests."""
    running: list[Running] = []
    while queue:
        queue.fill(engine, running, 1)
        while not running[0].is_done:
            engine.decode(running)
        queue.end_done(engine, running)
