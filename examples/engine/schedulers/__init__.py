"""Schedulers: who runs when. Each one takes an engine and requests, and returns when all are answered."""

from collections.abc import Callable

from examples.engine.engine import Engine
from examples.engine.schedulers.naive import run_naive
from examples.engine.schedulers.offline import run_offline
from examples.engine.schedulers.online import run_online
from examples.engine.schedulers.queue import Queue

SCHEDULERS: dict[str, Callable[[Engine, Queue], None]] = {
    "naive": run_naive,
    "offline": run_offline,
    "online": run_online,
}

__all__ = ["SCHEDULERS", "Queue"]
