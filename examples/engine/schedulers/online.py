"""Online scheduler: continuous batching. Between two steps answered requests leave, and waiting ones take their places."""

from collections import deque

from examples.engine.engine import Engine, Running
from examples.engine.schedulers.admission import end_done, fill
from examples.engine.workload import Request


def run_online(engine: Engine, waiting: deque[Request]) -> None:
    """Answer all requests."""
    running: list[Running] = []
    while waiting or running:
        end_done(engine, running)
        fill(engine, waiting, running)
        if unfinished := [one for one in running if not one.is_done]:
            engine.decode(unfinished)
