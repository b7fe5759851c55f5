"""A shared store in files, behind the daemon's real store process and memory, with a library that follows a script.

`planner` plans a store tier over it. Several pools may share one directory.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.peers.back_off import BackOffSettings
from kvpool.peers.circuit_breaker import CircuitBreaker
from kvpool.pool.lower_tiers import Planner, Site, TierPlan
from kvpool.tiering.remote_link import RemoteLink
from kvpool.tiers.store.tier import StoreTier
from tests.rigs.store.scripted_library import Script


@dataclass
class SharedDirectory:
    """The directory of a store."""

    path: Path

    def __post_init__(self) -> None:
        (self.path / "objects").mkdir(exist_ok=True)
        self.play()

    def play(self, **script: Any) -> None:
        """Do so from now on."""
        written = self.path / "script.new"
        written.write_text(json.dumps(asdict(Script(**script))))
        written.rename(self.path / "script.json")

    def objects(self) -> dict[str, Path]:
        """The files of all objects, by the last part of the name: the key's hexadecimal digits."""
        return {one.name.rpartition("+")[2]: one for one in (self.path / "objects").iterdir() if one.suffix != ".new"}


def planner(shared: SharedDirectory, made: list[StoreTier], *, failures: int = 3) -> Planner:
    """A line of the pool's composition: makes the tier over this directory and adds it to the list."""

    def link(site: Site) -> RemoteLink:
        command = (sys.executable, "-m", "tests.rigs.store.scripted_library", str(shared.path))
        back_off = BackOffSettings(first_s=0.05, most_s=0.05)
        made.append(
            StoreTier(
                site.memory,
                site.config.store,
                clock=site.clock,
                random=random.Random(1),
                command=command,
                breaker=CircuitBreaker(site.clock, random.Random(1), failures=failures, back_off=back_off),
            )
        )
        return site.remote(made[-1])

    return lambda _config: TierPlan(link)
