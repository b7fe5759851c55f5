"""The demonstration, in four acts: a daemon, worker 1 that fills it, worker 2 that profits, a cold one to compare with.

Exit code 0 when every greedy token of the warm answers equals the cold one, every turn reused something and half of the
turns were sped up at least four times; 1 otherwise. Half of them, because a neighbour on the machine may spoil one.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from demo.node import ProcessFailed, Worker, running_daemon
from demo.plan import Plan, make_plan
from demo.report import Row, Screen, compare, judge, make_console, show

DOCUMENTS = 3
CHUNK_TOKENS = 128
PREFIX_TOKENS = 16 * CHUNK_TOKENS
ANSWER_TOKENS = 24
SEED = 20240611


def main() -> int:
    """Run the demonstration; the exit code."""
    options = _parser().parse_args()
    console = make_console()
    plan = make_plan(
        documents=options.documents,
        prefix_tokens=options.prefix_tokens,
        chunk_tokens=CHUNK_TOKENS,
        answer_tokens=ANSWER_TOKENS,
        seed=SEED,
    )
    console.print(
        f"{options.documents} conversations of {len(plan.conversations[0].questions)} turns about documents of this machine: "
        f"a shared prefix of {options.prefix_tokens} tokens each, chunks of {CHUNK_TOKENS}"
    )
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as name:
        try:
            rows = _perform(console, plan, Path(name))
        except ProcessFailed as error:
            console.print(f"FAILED: {error}", markup=False)
            return 1
    show(console, rows, ANSWER_TOKENS)
    return 0 if judge(console, rows) else 1


def _perform(console: Console, plan: Plan, directory: Path) -> list[Row]:
    """Worker 1 fills the daemon; then worker 2 and a cold worker answer turn by turn, so that the machine is as busy
    for the one as for the other."""
    plan_path, nowhere = directory / "plan.json", directory / "no-daemon.sock"
    plan.write(plan_path)
    titles = [conversation.title for conversation in plan.conversations]
    rows = []
    with running_daemon(directory, capacity="1GiB") as socket, Screen(console, titles) as screen:
        console.print(f"kvpoold serves at {socket}")
        with Worker("worker 1", directory, socket, plan_path) as first:
            screen.start(first)
            for number in range(len(titles)):
                screen.ask(first, number, 0)
        with (
            Worker("worker 2", directory, socket, plan_path) as second,
            Worker("cold worker", directory, nowhere, plan_path) as cold,
        ):
            screen.start(second)
            screen.start(cold)
            for number, conversation in enumerate(plan.conversations):
                for turn in range(len(conversation.questions)):
                    warm_answer = screen.ask(second, number, turn)
                    cold_answer = screen.ask(cold, number, turn)
                    rows.append(compare(conversation.title, turn, cold_answer, warm_answer))
    console.print("kvpoold stopped by SIGTERM")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Show what kvpool saves a torch engine.")
    parser.add_argument(
        "--prefix-tokens",
        type=int,
        default=PREFIX_TOKENS,
        metavar="N",
        help=f"tokens of system prompt and document (default {PREFIX_TOKENS}; reuse ends at the last full chunk)",
    )
    parser.add_argument(
        "--documents", type=int, default=DOCUMENTS, metavar="N", help=f"how many conversations (default {DOCUMENTS})"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
