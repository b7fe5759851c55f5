"""Online scheduler: continuous batching. Between two steps answered requests leave, and waiting ones take their places."""

from examples.engine.engine import Engine, Running
from examples.engine.schedulers.queue import Queue

BATCH = 16


def run_online(engine: Engine, queue: Queue) -> None:
    """Answer all requests."""
    running: list[Running] = []
    while queue or running:
        queue.fill(engine, running, BATCH)
        queue.end_done(engine, running)
        if running:
            engine.decode(running)
            queue.end_done(engine, running)
