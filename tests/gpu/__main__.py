"""`python -m tests.gpu`: runs the parts, writes what they find as they go, and prints the table. `make test-gpu` builds first.

Exit codes: 0 all is well, 1 a part has failed, was cut or not begun, or a figure is below its bar, 2 the machine lacks
something, 130 it was interrupted.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpool.clock import Deadline
from tests.gpu.needs import LACKS, machine, missing
from tests.gpu.parts import CUT, OK, PARTS, RUN_S, Part, run_part
from tests.gpu.results import Results

ON_THE_DEVICE = {"KVPOOL_TEST_CUDA_DRIVER": "libcuda.so.1", "KVPOOL_TEST_TORCH_DEVICE": "cuda"}
# A part is not begun with less of its time than this.
LEAST_SHARE = 0.2
INTERRUPTED = 130
HOLDER = """
import ctypes, time
driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
time.sleep(3600)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    asked = _parse(arguments)
    if lacks := missing(is_rehearsal=asked.rehearse):
        print(LACKS, *(f"  {line}" for line in lacks), sep="\n", file=sys.stderr)
        return 2
    results = Results(asked.out, machine() | ({"rehearsal": True} if asked.rehearse else {}))
    environment = {} if asked.rehearse else ON_THE_DEVICE
    with _held_context() if environment else contextlib.nullcontext():
        if not _run_all(_chosen(asked.part, results), environment, asked, results):
            return INTERRUPTED
    print(f"\n{results.table()}")
    below = [] if asked.rehearse else results.below()
    for line in below:
        print(f"below its bar: {line}")
    verdicts = {part.name: results.parts.get(part.name, {}).get("verdict") for part in PARTS}
    wanted = asked.part or list(verdicts)
    return 0 if all(verdicts[name] == OK for name in wanted) and not below else 1


def _run_all(parts: list[Part], environment: dict[str, str], asked: argparse.Namespace, results: Results) -> bool:
    """Run them as far as the time goes. False: interrupted."""
    deadline = Deadline(asked.limit)
    for part in parts:
        limit_s = min(part.limit_s, deadline.remaining_s())
        if limit_s < LEAST_SHARE * part.limit_s:
            print(f"{part.name}: not begun, {asked.limit:g} s are over: make test-gpu PART={part.name}")
            results.begin(part.name)
            continue
        try:
            _run(part, environment, limit_s, results, asked.out)
        except KeyboardInterrupt:
            print(f"{part.name}: interrupted; another run goes on with it")
            return False
    return True


@contextlib.contextmanager
def _held_context() -> Iterator[None]:
    """A process that has the device open meanwhile: without one the driver sets it up again for each daemon."""
    with subprocess.Popen([sys.executable, "-c", HOLDER]) as holder:
        try:
            yield
        finally:
            holder.kill()


def _run(part: Part, environment: dict[str, str], limit_s: float, results: Results, out: Path) -> None:
    print(f"{part.name}: {part.about}, {limit_s:.0f} s at most", flush=True)
    results.begin(part.name)
    began = time.perf_counter()
    log = out / f"{part.name}.log"
    verdict, why = CUT, "interrupted"
    try:
        verdict, why = run_part(part, environment, log, limit_s, lambda figure: results.add(part.name, figure))
    finally:
        results.end(part.name, verdict, why, time.perf_counter() - began)
    if verdict == OK:
        log.unlink(missing_ok=True)
    where = "" if verdict == OK else f" (see {log})"
    print(f"{part.name}: {verdict}{f': {why}' if why else ''}{where}", flush=True)


def _chosen(names: list[str], results: Results) -> list[Part]:
    """The parts that are asked for, or those that no earlier run has ended well."""
    if names:
        return [part for part in PARTS if part.name in names]
    return [part for part in PARTS if not results.is_done(part.name)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", default=[], choices=names, help="run this part, also again")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder of the results (bench-results)")
    parser.add_argument("--limit", type=float, default=RUN_S, metavar="SECONDS", help=f"of all parts ({RUN_S:g})")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the emulated driver, with small sizes and torch on the processor"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends its parts, too
    sys.exit(main())
