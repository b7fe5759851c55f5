"""Traces for tests of the simulator: prompts as lists of block names, random ones that share prefixes, published ones."""

import random
from pathlib import Path

from kvpool_tools.sim.runner import SimulationSettings
from kvpool_tools.sim.workload import Prompt, Workload, make_workload


def workload_of(prompts: list[list[str]]) -> Workload:
    """One request a second; a name stands for one block, always after the same blocks."""
    names: dict[str, int] = {}
    return make_workload(
        Prompt(second, [names.setdefault(name, len(names)) for name in prompt]) for second, prompt in enumerate(prompts)
    )


def random_prompts(seed: int, count: int, *, window: int = 12) -> list[list[str]]:
    """Prompts of up to thirteen blocks that go on from one of the `window` before them, from some depth."""
    chance = random.Random(seed)
    prompts: list[list[str]] = [[]]
    for number in range(count):
        base = chance.choice(prompts[-window:])
        shared = base[: chance.randint(0, len(base))]
        fresh = [f"{number}.{depth}" for depth in range(chance.randint(0, 12 - len(shared)))]
        prompts.append(shared + fresh)
    return [["root", *prompt] for prompt in prompts]


def load(path: Path, *, tails: str = "stored") -> Workload:
    """A trace file as the command reads it."""
    return SimulationSettings(str(path), None, tails, 1 << 26, ()).workload()
