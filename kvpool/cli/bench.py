"""`kvpoolctl bench`: measures a daemon through the public client, against floors taken in the same run.

Without --socket it starts a daemon of its own and stops it afterwards. Prints medians with their spread; never a figure
without its floor. What is measured is in bench_copy, bench_lookup and bench_rpc.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from kvpool import __version__
from kvpool.cli.bench_copy import bench_copy
from kvpool.cli.bench_lookup import bench_lookup
from kvpool.cli.bench_rpc import bench_rpc
from kvpool.cli.kvpoolctl import EXIT_CODES, Options, cli, common_options
from kvpool.cli.output import EXIT_FAILURE, fail, print_json, print_table
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool.protocol.blocking import BlockingConnection

CAPACITY = "2GiB"
START_TIMEOUT_S = 30.0

Row = dict[str, Any]
Advance = Callable[[], None]
# Steps that a kind announces to its progress bar, and what runs it.
Bench = Callable[[str, bool, Advance], list[Row]]

KINDS: dict[str, tuple[Bench, str]] = {
    "copy": (bench_copy, "save and load, per copying thread, against memcpy of the same bytes"),
    "lookup": (bench_lookup, "keys and lookup of a 128k-token prompt"),
    "rpc": (bench_rpc, "acquire of 512 chunks against a raw socket's round trip"),
}


@cli.command(
    epilog=f"""\b
Examples:
  kvpoolctl bench copy
  kvpoolctl --json bench rpc --out rpc.json

{EXIT_CODES}"""
)
@click.argument("kind", type=click.Choice([*KINDS, "all"]))
@click.option("--quick", is_flag=True, help="Few rounds: shows that it works, proves nothing.")
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write the JSON document to FILE too.")
@common_options
@click.pass_obj
def bench(options: Options, kind: str, quick: bool, out: str | None) -> None:
    """Measure one KIND: copy, lookup, rpc, or all of them.

    Ratios are what counts: each figure stands beside its floor from the same run on the same cores. Without --socket a
    daemon of its own is started and stopped.
    """
    chosen = list(KINDS) if kind == "all" else [kind]
    rows: list[Row] = []
    console = Console(stderr=True)
    try:
        with _daemon(options) as socket, Progress(console=console, transient=True) as progress:
            for name in chosen:
                task = progress.add_task(f"bench {name}", total=None)
                measured = KINDS[name][0](socket, quick, lambda task=task: progress.advance(task))  # type: ignore[misc]  # bound at once
                rows += measured
                if not options.is_json:
                    progress.stop()
                    print_table(f"{name}: {KINDS[name][1]}", measured)
                    progress.start()
    except KVPoolError as error:
        fail(str(error), EXIT_FAILURE)
    document = {"command": f"bench {kind}", "version": __version__, "machine": _machine(), "rows": rows}
    if options.is_json:
        print_json(document)
    if out is not None:
        Path(out).write_text(json.dumps(document, indent=2) + "\n")


@contextmanager
def _daemon(options: Options) -> Iterator[str]:
    """The socket of the daemon to measure: the one that was named, or one started for this run."""
    if options.socket is not None:
        options.connect().close()
        yield options.socket
        return
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
        socket = f"{directory}/kvpool.sock"
        sets = [f"--set=server.socket={socket}", f"--set=dram.capacity={CAPACITY}", "--set=log.level=warning"]
        process = subprocess.Popen([sys.executable, "-m", "kvpool.cli.kvpoold", *sets])  # noqa: S603 - our own module
        try:
            _wait_until_settled(socket, process)
            yield socket
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_TIMEOUT_S)


def _wait_until_settled(socket: str, process: "subprocess.Popen[bytes]") -> None:
    """Until the daemon answers and its arena has its pages, huge ones included: that work is not what is measured."""
    deadline = Deadline(START_TIMEOUT_S)
    while not deadline.has_passed() and process.poll() is None:
        try:
            with BlockingConnection.admin(socket, 1.0) as connection:
                if not connection.info()["dram_is_settling"]:
                    return
        except KVPoolError:
            pass
        time.sleep(0.05)
    fail(f"the daemon at {socket} did not settle within {START_TIMEOUT_S:.0f} s", EXIT_FAILURE)


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
