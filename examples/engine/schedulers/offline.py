"""Offline scheduler: static batches. A batch decodes together, and the next one begins when its last answer is complete."""

from examples.engine.engine import Engine, Running
from examples.engine.schedulers.queue import Queue

BATCH = 16


def run_offline(engine: Engine, queue: Queue) -> None:
    """Answer all requests."""
    batch: list[Running] = []
    while queue:
        queue.fill(engine, batch, BATCH)
        while unfinished := [one for one in batch if not one.is_done]:
            engine.decode(unfinished)
        queue.end_done(engine, batch)
