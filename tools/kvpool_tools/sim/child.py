"""One process of `kvpoolctl simulate`: `python -m kvpool_tools.sim.child SETTINGS`.

Reads one piece of work a line on stdin, a cell or a number of blocks, and prints one JSON object a line on stdout. It ends with
its stdin, with its stdout, or with its parent. One thread.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict

from kvpool_tools.sim.runner import Simulation, SimulationSettings, read_work


def main() -> None:
    """Do the work that comes over stdin, until it ends."""
    fields = json.loads(sys.argv[1])
    settings = SimulationSettings(**{**fields, "overrides": tuple(fields["overrides"])})
    simulation = Simulation(settings, settings.workload())
    with contextlib.suppress(BrokenPipeError):  # the parent has ended, and nobody reads the output
        for line in sys.stdin.buffer:
            result = simulation.run(read_work(line))
            sys.stdout.write(json.dumps(asdict(result)) + "\n")
            sys.stdout.flush()
        return
    # Nobody reads: prevent another write when the interpreter closes its files.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
