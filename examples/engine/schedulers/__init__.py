"""Schedulers: who runs when. Each one takes an engine and waiting requests, and returns when all are answered."""

from examples.engine.schedulers.naive import run_naive
from examples.engine.schedulers.offline import run_offline
from examples.engine.schedulers.online import run_online

SCHEDULERS = {"naive": run_naive, "offline": run_offline, "online": run_online}
