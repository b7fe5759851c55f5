"""Runner of `kvpoolctl simulate`: shares the cells among processes.

Each process reads the trace itself and gets one cell at a time, so that they end together however unequal the cells are.
With one process, this one runs them. Every wait has a deadline: a cell that takes longer than CELL_TIMEOUT_S fails the
simulation. Main thread of a command only.
"""

import contextlib
import json
import selectors
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from kvpool.config.config import Config, load_config
from kvpool.errors import InvalidArgument, KVPoolError
from kvpool_tools.sim.cells import Bounds, Cell, Outcome, run_bounds, run_cell, simulated_config
from kvpool_tools.sim.children import start_bound, stop
from kvpool_tools.sim.grouped_cell import GroupedCell, run_grouped
from kvpool_tools.sim.replay_times import read_times
from kvpool_tools.sim.traces import Trace, TraceError, TraceRequest
from kvpool_tools.sim.workload import NO_SESSION, Prompt, Workload, make_workload

CELL_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 5.0

# Partial blocks at the ends of prompts: asked for and never stored, as a pool does; stored like others; not there.
TAILS = ("counted", "stored", "left-out")
# A cell, one with groups, or a number of blocks whose bounds are wanted.
Work = Cell | GroupedCell | int
Result = Outcome | Bounds


def read_work(line: bytes) -> Work:
    """The piece of work of a line that `_write_work` made."""
    asked = json.loads(line)
    if isinstance(asked, int):
        return asked
    return GroupedCell.parse(asked) if "window_blocks" in asked else Cell(**asked)


def _write_work(work: Work) -> bytes:
    """A line of JSON for another process."""
    return json.dumps(work if isinstance(work, int) else asdict(work)).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Settings of every process of a simulation. `tails`: one of TAILS; `times`: a replay's file, its requests alone then."""

    path: str
    requests: int | None
    tails: str
    block_bytes: int
    overrides: tuple[str, ...]
    times: str | None = None

    def config(self) -> Config:
        """The daemon's configuration, for simulated blocks. Raises ConfigError."""
        return simulated_config(load_config(None, self.overrides), self.block_bytes)

    def workload(self) -> Workload:
        """The trace's requests. Raises TraceError or InvalidArgument."""
        asked: Iterator[TraceRequest] = islice(Trace(Path(self.path)).requests(), self.requests)
        if self.times is not None:
            asked = self._timed(asked, read_times(Path(self.times)))
        try:
            return make_workload(self._prompt(request) for request in asked)
        except InvalidArgument as error:
            raise TraceError(f"{self.path}: {error}") from error

    def _timed(self, asked: Iterator[TraceRequest], times: list[float]) -> Iterator[TraceRequest]:
        requests = list(islice(asked, len(times)))
        if len(requests) < len(times):
            raise InvalidArgument(f"--times {self.times}: {len(times)} times, {self.path} has {len(requests)} requests")
        return (replace(request, at_s=at_s) for request, at_s in zip(requests, times, strict=True))

    def _prompt(self, request: TraceRequest) -> Prompt:
        session = NO_SESSION if request.session is None else request.session
        if request.tail_id is None or self.tails == "left-out":
            return Prompt(request.at_s, request.hash_ids, session=session)
        ids = (*request.hash_ids, request.tail_id)
        return Prompt(request.at_s, ids, has_tail=self.tails == "counted", session=session)


class Simulation:
    """Simulation of one trace with its settings."""

    def __init__(self, settings: SimulationSettings, workload: Workload) -> None:
        self._settings = settings
        self._config = settings.config()
        self._workload = workload

    def run(self, work: Work) -> Result:
        """Do one piece of work here."""
        if isinstance(work, int):
            return run_bounds(self._workload, work)
        if isinstance(work, GroupedCell):
            return run_grouped(self._workload, work, self._config)
        return run_cell(self._workload, work, self._config)

    def run_all(self, works: Sequence[Work], processes: int) -> Iterator[tuple[Work, Result]]:
        """Do all work in so many processes. Yields results as they come. Raises KVPoolError when a process fails."""
        if min(processes, len(works)) == 1:
            yield from ((work, self.run(work)) for work in works)
            return
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            waiting = list(reversed(works))
            for _ in range(min(processes, len(works))):
                child = _Child(self._settings)
                stack.callback(child.stop)
                selector.register(child.output, selectors.EVENT_READ, child)
                child.give_work(waiting.pop())
            for _ in works:
                ready = selector.select(CELL_TIMEOUT_S)
                if not ready:
                    raise KVPoolError(f"no cell was simulated in {CELL_TIMEOUT_S:.0f} s")
                child = ready[0][0].data
                yield child.asked, child.answer()
                if waiting:
                    child.give_work(waiting.pop())


class _Child:
    """One process. Invariant: `asked` is the work whose answer is not read yet, or that of the answer read last."""

    def __init__(self, settings: SimulationSettings) -> None:
        pipe = subprocess.PIPE
        arguments = [json.dumps(asdict(settings))]
        self._process = start_bound("kvpool_tools.sim.child", arguments, stdin=pipe, stdout=pipe)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self.asked: Work = 0

    def give_work(self, work: Work) -> None:
        """Have it do a piece of work. Raises KVPoolError when it has ended."""
        self.asked = work
        try:
            self._input.write(_write_work(work))
            self._input.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def answer(self) -> Result:
        """The result of its work. Raises KVPoolError when it has ended."""
        line = self.output.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        fields = json.loads(line)
        return Bounds(**fields) if isinstance(self.asked, int) else Outcome(**fields)

    def stop(self) -> None:
        """End it. Idempotent."""
        stop(self._process, STOP_TIMEOUT_S)
        for pipe in (self._input, self.output):
            with contextlib.suppress(BrokenPipeError):  # the last request was never read
                pipe.close()

    def _ended(self) -> KVPoolError:
        self.stop()
        return KVPoolError(f"a simulating process ended with exit code {self._process.returncode}")
