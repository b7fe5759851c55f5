"""The demonstration, in four acts.

The first: a daemon, worker 1 that fills it, worker 2 that profits from its memory, a cold worker to compare with. The
second: the daemon is killed with -9 and started again, and worker 3 profits from its memory, which was kept. The third: it is
killed again and its memory is lost, as in a reboot, and worker 4 profits from its disk. The fourth: a second daemon joins as
another node, with memory and a disk of its own, and worker 5 there profits from the first one.

Exit code 0 when every greedy token of the warm answers equals the cold one, every turn reused something, after the first kill
from DRAM alone, after the second from SSD alone, on the second node from the first alone, and half of the turns of the first
act were sped up at least four times; 1 otherwise. Half of them, because a neighbour on the machine may spoil one.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from demo.node import Daemon, Member, ProcessFailed, Worker, make_fleet
from demo.plan import Plan, make_plan
from demo.report import Act, Event, Row, Screen, compare, judge, make_console, show

DOCUMENTS = 2
CHUNK_TOKENS = 128
PREFIX_TOKENS = 16 * CHUNK_TOKENS
ANSWER_TOKENS = 24
SEED = 20240611
DRAM_CAPACITY = "1GiB"
SSD_CAPACITY = "512MiB"


@click.command()
@click.option(
    "--prefix-tokens",
    type=click.IntRange(min=1),
    default=PREFIX_TOKENS,
    show_default=True,
    help="Tokens of system prompt and document; reuse ends at the last full chunk.",
)
@click.option(
    "--documents", type=click.IntRange(min=1), default=DOCUMENTS, show_default=True, help="How many conversations."
)
def main(prefix_tokens: int, documents: int) -> None:
    """Show what kvpool saves a torch engine."""
    console = make_console()
    plan = make_plan(
        documents=documents,
        prefix_tokens=prefix_tokens,
        chunk_tokens=CHUNK_TOKENS,
        answer_tokens=ANSWER_TOKENS,
        seed=SEED,
    )
    console.print(
        f"{documents} conversations of {len(plan.conversations[0].questions)} turns about documents of this machine: "
        f"a shared prefix of {prefix_tokens} tokens each, chunks of {CHUNK_TOKENS}"
    )
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as name:
        try:
            rows = _perform(console, plan, Path(name))
        except ProcessFailed as error:
            console.print(f"FAILED: {error}", markup=False)
            sys.exit(1)
    show(console, rows, ANSWER_TOKENS)
    sys.exit(0 if judge(console, rows) else 1)


def _perform(console: Console, plan: Plan, directory: Path) -> list[Row]:
    plan_path = directory / "plan.json"
    plan.write(plan_path)
    titles = [conversation.title for conversation in plan.conversations]
    first, second = make_fleet("first", "second")
    node = _node(directory, first)
    node.keeps_memory = True
    with node as daemon, Screen(console, titles) as screen:
        console.print(f"kvpoold serves at {daemon.socket}, with {DRAM_CAPACITY} of DRAM over {SSD_CAPACITY} of SSD")
        stage = _Stage(console, screen, plan, plan_path, directory, daemon)
        rows, cold = stage.fill_and_profit()
        rows += stage.kill_and_profit(cold)
        rows += stage.lose_memory_and_profit(cold)
        with _node(directory, second) as other:
            rows += stage.join_and_profit(other, cold)
    console.print("both kvpoold stopped by SIGTERM")
    return rows


def _node(directory: Path, member: Member) -> Daemon:
    return Daemon(directory / member.name, dram_capacity=DRAM_CAPACITY, ssd_capacity=SSD_CAPACITY, member=member)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What all acts need. `daemon`: of the first node."""

    console: Console
    screen: Screen
    plan: Plan
    plan_path: Path
    directory: Path
    daemon: Daemon

    def fill_and_profit(self) -> tuple[list[Row], list[Event]]:
        """The first act: its rows, and the cold answers to the first questions.

        Worker 1 fills the daemon; then worker 2 and a cold worker answer turn by turn, so that the machine is as busy for
        the one as for the other.
        """
        rows, first_answers = [], []
        conversations = self.plan.conversations
        with self._worker("worker 1") as first:
            self.screen.start(first)
            for number in range(len(conversations)):
                self.screen.ask(first, number, 0)
        nowhere = self.directory / "no-daemon.sock"
        with self._worker("worker 2") as second, self._worker("cold worker", nowhere) as cold:
            self.screen.start(second)
            self.screen.start(cold)
            for number, conversation in enumerate(conversations):
                for turn in range(len(conversation.questions)):
                    warm_answer = self.screen.ask(second, number, turn)
                    cold_answer = self.screen.ask(cold, number, turn)
                    rows.append(compare(conversation.title, turn, cold_answer, warm_answer, Act.MEMORY))
                    first_answers += [cold_answer] if turn == 0 else []
        return rows, first_answers

    def kill_and_profit(self, cold: list[Event]) -> list[Row]:
        """The second act: its rows. `cold`: the cold answers to the first questions."""
        self.console.print("kvpoold is killed with -9 and started again; its memory was kept by a process beside it")
        self._kill_and_start()
        return self._ask_first_questions("worker 3", self.daemon, cold, Act.KEPT)

    def lose_memory_and_profit(self, cold: list[Event]) -> list[Row]:
        """The third act: its rows."""
        self.console.print(
            f"{self.daemon.demote_all()} chunks are on disk; kvpoold is killed again, and its memory given up as in a reboot"
        )
        self.daemon.keeps_memory = False
        self._kill_and_start()
        return self._ask_first_questions("worker 4", self.daemon, cold, Act.DISK)

    def _kill_and_start(self) -> None:
        self.daemon.kill()
        self.daemon.start()
        stats = self.daemon.stats()
        self.console.print(
            f"kvpoold serves again: {stats['dram.chunks']} chunks in DRAM, {stats['ssd.chunks']} on disk"
        )

    def join_and_profit(self, other: Daemon, cold: list[Event]) -> list[Row]:
        """The fourth act: its rows. `other`: the daemon of a node that has just joined."""
        chunks = int(self.daemon.stats()["ssd.chunks"])
        other.wait_known(chunks)
        self.console.print(f"a second node has joined: it has no chunk, and knows {chunks} of the first node's")
        rows = self._ask_first_questions("worker 5", other, cold, Act.NODES)
        stats = other.stats()
        self.console.print(
            f"the second node pulled {stats['peer.pulled_chunks']} chunks over TCP, {int(stats['peer.read_bytes']) >> 20} MiB; "
            f"each layer was compared with its checksum as it came, and all {other.verify()} chunks there once more"
        )
        return rows

    def _ask_first_questions(self, name: str, daemon: Daemon, cold: list[Event], act: Act) -> list[Row]:
        """The first question of each conversation to a fresh worker."""
        with self._worker(name, daemon.socket) as worker:
            self.screen.start(worker)
            return [
                compare(conversation.title, 0, cold[number], self.screen.ask(worker, number, 0), act)
                for number, conversation in enumerate(self.plan.conversations)
            ]

    def _worker(self, name: str, socket: Path | None = None) -> Worker:
        return Worker(name, self.directory, socket or self.daemon.socket, self.plan_path)


if __name__ == "__main__":
    main(prog_name="python -m demo")
