"""Output of the demonstration: progress while it runs, then the table and the verdict.

With a terminal a bar moves; without one the same lines are printed plainly, and some of progress between them. One thread.
"""

import time
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.node import Worker

PLAIN_WIDTH = 118
# Without a terminal: seconds from one line of progress to the next.
PLAIN_PROGRESS_S = 3.0
SPEED_UP_WANTED = 4.0
TIERS = {"dram": "DRAM", "ssd": "SSD", "peer": "another node"}
Event = dict[str, Any]


class Act(Enum):
    """The acts: heading in the table, the tier that a prefix has to come from, and the failure if it does not."""

    MEMORY = ("warm from DRAM", "dram", "a prefix did not come from DRAM")
    KEPT = ("warm from DRAM after kill -9", "dram", "after the kill a prefix did not come from DRAM")
    DISK = (
        "warm from SSD, memory lost",
        "ssd",
        "without its memory a prefix did not come from SSD",
    )
    NODES = ("warm from another node over TCP", "peer", "on the second node a prefix did not come from the first")

    @classmethod
    def later(cls) -> "tuple[Act, ...]":
        """Those after the first."""
        return cls.KEPT, cls.DISK, cls.NODES

    def __init__(self, heading: str, tier: str, failure: str) -> None:
        self.heading = heading
        self.tier = tier
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Row:
    """One turn, answered cold and warm by two processes. `tiers`: where the warm one found its prefix."""

    title: str
    turn: int
    prompt_tokens: int
    reused_tokens: int
    cold_s: float
    warm_s: float
    has_same_tokens: bool
    has_same_logits: bool
    tiers: tuple[str, ...] = ("dram",)
    act: Act = Act.MEMORY

    @property
    def speed_up(self) -> float:
        """How many times sooner the first token was there."""
        return self.cold_s / self.warm_s


def make_console() -> Console:
    """A console that is wide enough for the table where there is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


class Screen:
    """Progress of the workers. A context: within it a bar moves where there is a terminal."""

    def __init__(self, console: Console, titles: list[str]) -> None:
        self.console = console
        self._titles = titles
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} tokens"))
        self._is_plain = not console.is_terminal
        self._printed_s = time.monotonic()
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=self._is_plain)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, worker: Worker) -> None:
        """Wait until a worker is ready."""
        what = f"{worker.name} builds its model"
        self._bar.reset(self._task, total=None, description=what)
        self._print_plainly(what)
        for event in worker.get_ready():
            self.console.print(f"{worker.name} is ready: a Llama of {event['parameters'] / 1e6:.0f}M random weights")

    def ask(self, worker: Worker, conversation: int, turn: int) -> Event:
        """Put a question to a worker and show how it comes along; its answer."""
        what = f"{worker.name}: {self._titles[conversation]}, turn {turn + 1}"
        self._bar.reset(self._task, total=None, description=what)
        answer: Event = {}
        for event in worker.ask(conversation, turn):
            if event["event"] == "step":
                self._bar.update(self._task, completed=event["done"], total=event["total"])
                if time.monotonic() - self._printed_s >= PLAIN_PROGRESS_S:
                    self._print_plainly(f"{what}: {event['done']} of {event['total']} tokens")
            else:
                answer = event
        self.console.print(
            f"{what}: {answer['prompt_tokens']} tokens, {_reused(answer)}, "
            f"{answer['stored_chunks']} chunks stored, first token after {answer['ttft_s'] * 1e3:.0f} ms"
        )
        self._printed_s = time.monotonic()
        return answer

    def _print_plainly(self, line: str) -> None:
        """A line of progress, where no bar shows it."""
        if self._is_plain:
            self.console.print(line)
            self._printed_s = time.monotonic()


def compare(title: str, turn: int, cold: Event, warm: Event, act: Act) -> Row:
    """One turn of two workers side by side."""
    return Row(
        title=title,
        turn=turn + 1,
        prompt_tokens=warm["prompt_tokens"],
        reused_tokens=warm["reused_tokens"],
        cold_s=cold["ttft_s"],
        warm_s=warm["ttft_s"],
        has_same_tokens=cold["tokens"] == warm["tokens"] and cold["prompt_tokens"] == warm["prompt_tokens"],
        has_same_logits=cold["logits_digest"] == warm["logits_digest"],
        tiers=tuple(warm["tiers"]),
        act=act,
    )


def show(console: Console, rows: list[Row], answer_tokens: int) -> None:
    """Print the table."""
    table = Table(caption=f"TTFT: time from the prompt to the first of {answer_tokens} greedy tokens")
    table.add_column("conversation")
    for name in ("turn", "prompt tokens", "reused", "TTFT cold", "TTFT warm", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("same tokens")
    before = _of(Act.MEMORY, rows)
    for row in before:
        table.add_row(*_cells(row), end_section=row.turn == max(other.turn for other in before))
    for act in Act.later():
        later = _of(act, rows)
        if later:
            table.add_row(f"[bold]{act.heading}[/bold]")
        for row in later:
            table.add_row(*_cells(row), end_section=row is later[-1])
    console.print(table)


def judge(console: Console, rows: list[Row]) -> bool:
    """Print the verdict; whether the demonstration has shown what it claims."""
    before = _of(Act.MEMORY, rows)
    same = sum(row.has_same_tokens for row in rows)
    same_logits = sum(row.has_same_logits for row in rows)
    console.print(
        f"greedy tokens identical in {same} of {len(rows)} turns, first-token logits bit for bit in {same_logits}; "
        f"speed-up {_range(before)}"
    )
    failures = []
    for act in Act.later():
        later = _of(act, rows)
        if later:
            console.print(
                f"{act.heading}: first token after {median(row.warm_s for row in later) * 1e3:.0f} ms instead of "
                f"{median(row.cold_s for row in later) * 1e3:.0f} ms, speed-up {_range(later)}"
            )
        if any(row.tiers != (act.tier,) for row in later):
            failures.append(act.failure)
    if same < len(rows):
        failures.append("warm answers differ from cold ones")
    if median(row.speed_up for row in before) < SPEED_UP_WANTED:
        failures.append(f"the median speed-up is below {SPEED_UP_WANTED:.0f}")
    if any(row.reused_tokens == 0 for row in rows):
        failures.append("a turn reused nothing")
    for failure in failures:
        console.print(f"FAILED: {failure}")
    return not failures


def _of(act: Act, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.act is act]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.title,
        str(row.turn),
        str(row.prompt_tokens),
        str(row.reused_tokens),
        f"{row.cold_s * 1e3:.0f} ms",
        f"{row.warm_s * 1e3:.0f} ms",
        f"{row.speed_up:.1f} x",
        "yes" if row.has_same_tokens else "NO",
    )


def _range(rows: list[Row]) -> str:
    speed_ups = [row.speed_up for row in rows]
    return f"{min(speed_ups):.1f} to {max(speed_ups):.1f}, median {median(speed_ups):.1f}"


def _reused(answer: Event) -> str:
    tiers = " and ".join(TIERS[tier] for tier in answer["tiers"])
    return f"{answer['reused_tokens']} " + (f"from {tiers}" if tiers else "reused")
