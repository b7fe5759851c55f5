"""`python -m examples.engine.benchmark`: three schedulers, each without a cache, with the block pool's, and with kvpoold.

Starts daemons of its own in a temporary directory. A scheduler's last cell comes after kill -9 of its daemon, which starts
again on what its SSD has. Exit code 1 where tokens differ between two cells, or a block leaked.
"""

import sys
import tempfile
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress

from demo.node import Daemon
from examples.engine import report
from examples.engine.cells import Cache, Cell, Plan
from examples.engine.model import SMALL, Shape
from examples.engine.schedulers import SCHEDULERS
from examples.engine.workload import GROUP, SHORT, Lengths, make_requests
from kvpool_tools.bench.machine import describe_machine
from kvpool_tools.cli.output import print_json, print_line, print_table


@click.command()
@click.option("--requests", type=click.IntRange(min=1), default=GROUP, show_default=True, help="Requests of a cell.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of weights and workload.")
@click.option("--blocks", type=click.IntRange(min=1), default=2048, show_default=True, help="Blocks of an engine.")
@click.option("--quick", is_flag=True, help="A tiny model and short prompts: seconds, and rates without a meaning.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(requests: int, seed: int, blocks: int, quick: bool, as_json: bool) -> None:
    """Measure a small engine with and without caches."""
    shape, lengths = (SMALL, SHORT) if quick else (Shape(), Lengths())
    workload = make_requests(requests, seed=seed, vocabulary=shape.vocabulary, lengths=lengths)
    machine = {**describe_machine(), "torch": torch.__version__, "threads": torch.get_num_threads(), "seed": seed}
    cells = _measure(Plan(shape, workload, blocks, seed))
    rows, failures = report.rows_of(cells), report.failures(cells)
    missed = [] if quick else report.missed_bars(rows)
    if as_json:
        print_json({"machine": machine, "cells": rows, "failures": failures, "slower_than_expected": missed})
    else:
        counts = cells[0].counts
        print_line(", ".join(f"{name} {value}" for name, value in machine.items()))
        title = (
            f"{requests} requests, {counts.prompt_tokens} prompt tokens, {counts.completion_tokens} completion tokens"
        )
        print_table(title, rows, columns_max=len(rows[0]))
        verdict = [f"FAILED: {line}" for line in failures] or ["tokens are identical in all cells, and no block leaked"]
        for line in [*verdict, *(f"slower than expected: {line}" for line in missed)]:
            print_line(line)
    sys.exit(1 if failures else 0)


def _measure(plan: Plan) -> list[Cell]:
    cells = []
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kvpool-engine-") as name, Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=len(SCHEDULERS) * len(Cache))
        for scheduler in SCHEDULERS:
            with Daemon(Path(name) / scheduler, dram_capacity="256MiB", ssd_capacity="256MiB") as daemon:
                for cache in Cache:
                    bar.update(task, description=f"{scheduler}, {cache.label}")
                    if cache is Cache.KILLED:
                        daemon.demote_all()
                        daemon.kill()
                        daemon.start()
                    cells.append(plan.run(scheduler, cache, str(daemon.socket)))
                    bar.advance(task)
    return cells


if __name__ == "__main__":
    main()
