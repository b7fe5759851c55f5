"""Offline scheduler: static batches. A batch decodes together, and the next one begins when its last answer is complete."""

from collections import deque

from examples.engine.engine import Engine, Running
from examples.engine.schedulers.admission import end_done, fill
from examples.engine.workload import Request


def run_offline(engine: Engine, waiting: deque[Request]) -> None:
    """Answer all requests."""
    batch: list[Running] = []
    while waiting:
        fill(engine, waiting, batch)
        while unfinished := [one for one in batch if not one.is_done]:
            engine.decode(unfinished)
        end_done(engine, batch)
