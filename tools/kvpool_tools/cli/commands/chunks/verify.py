"""Commands that find broken invariants and wrong bytes: check, verify.

The daemon reads slice by slice, after all other work, and only while the command requests the next slice: interrupting the
command ends the reading. Main thread only.
"""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvpool.key_column import SHOWN_DIGITS
from kvpool.protocol import verify_walk
from kvpool.units import format_size
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool_tools.cli.output import EXIT_FAILURE, EXIT_USAGE, fail, print_json, print_line

SEED_BITS = 32


@cli.command(epilog=epilog("kvpoolctl check", "kvpoolctl check --strict", "kvpoolctl check --deep --json"))
@click.option(
    "--deep", is_flag=True, help="Read every chunk of every tier and compare its bytes with its checksums too."
)
@click.option(
    "--strict", is_flag=True, help='Fail, too, unless the health is "ready" and every tier can be read and written.'
)
@common_options
@click.pass_obj
def check(options: Options, deep: bool, strict: bool) -> None:
    """Recount every invariant inside the running daemon. The exit code is 1 when one is broken or a chunk is bad.

    With --strict the exit code is 0 only if all is well: the health is "ready", every tier is "ok", and there is no problem.

    With --deep a bad chunk is dropped from its tier, with its descendants, and named by the beginning of its key. The daemon
    serves on meanwhile; chunks stored during the check may be left out.
    """
    with options.connect() as connection:
        report = ask(lambda: connection.check())
        problems: list[str] = report["problems"]
        if strict:
            problems = list(dict.fromkeys([*problems, *_shortcomings(ask(connection.info))]))
        found: dict[str, Any] = {}
        if deep:
            tiers = report["tiers"]
            with _progress(options, "check", sum(counts["chunks"] for counts in tiers.values())) as advance:
                every = verify_walk.every(tiers)
                found = ask(lambda: verify_walk.read_all(connection.verify_bytes, every, sys.maxsize, advance))
    bad = verify_walk.problems_of(found) if deep else []
    if options.is_json:
        print_json({**report, "verified": 0, **found, "problems": [*problems, *bad]})
    else:
        for problem in [*problems, *(verify_walk.problems_of(found, SHOWN_DIGITS) if deep else [])]:
            print_line(problem)
        verified = f", {found['verified']} verified by their bytes" if deep else ""
        tiers = ", ".join(f"{name}: {counts['chunks']}" for name, counts in report["tiers"].items())
        print_line(f"{len(problems) + len(bad)} problems, {report['chunks']} chunks ({tiers}){verified}")
    sys.exit(EXIT_FAILURE if problems or bad else 0)


@cli.command(epilog=epilog("kvpoolctl verify --sample 1000", "kvpoolctl verify --sample 100 --tier ssd --seed 7"))
@click.option("--sample", type=click.IntRange(min=1), required=True, metavar="N", help="Read so many chunks.")
@click.option("--tier", metavar="NAME", help="Read chunks of this tier alone: hbm, dram, ssd (default: every tier).")
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="S", help="Draw the same chunks again (default: a new seed, printed)."
)
@common_options
@click.pass_obj
def verify(options: Options, sample: int, tier: str | None, seed: int | None) -> None:
    """Read N chunks drawn at random and compare their bytes with their checksums. The exit code is 1 when one is bad.

    Every chunk of every tier is as likely as any other to be drawn, and none is drawn twice; where there are fewer than N,
    all are read. A bad chunk is dropped from its tier, with its descendants.
    """
    chosen = secrets.randbits(SEED_BITS) if seed is None else seed
    with options.connect() as connection:
        tiers = ask(lambda: connection.check())["tiers"]
        if tier is not None and tier not in tiers:
            fail(f"there is no tier {tier}, only {', '.join(tiers)}", EXIT_USAGE)
        wanted = tiers if tier is None else {tier: tiers[tier]}
        chunks = sum(counts["chunks"] for counts in wanted.values())
        with _progress(options, "verify", min(sample, chunks)) as advance:
            drawn = verify_walk.drawn(wanted, np.random.default_rng(chosen).integers)
            found = ask(lambda: verify_walk.read_all(connection.verify_bytes, drawn, sample, advance))
    problems = verify_walk.problems_of(found)
    if options.is_json:
        print_json({"seed": chosen, "tiers": list(wanted), "chunks": chunks, **found, "problems": problems})
    else:
        for problem in verify_walk.problems_of(found, SHOWN_DIGITS):
            print_line(problem)
        read = f"{found['verified']} of {chunks} chunks verified by their bytes, {format_size(found['bytes'])}"
        print_line(f"{len(problems)} problems, {read}; seed {chosen}")
    sys.exit(EXIT_FAILURE if problems else 0)


def _shortcomings(info: dict[str, Any]) -> list[str]:
    """What is not well in the daemon's info, one line each: its problems, its health, and the state of each tier."""
    lines: list[str] = list(info["problems"])
    if info["health"] != "ready":
        lines.append(f"health: {info['health']}, expected ready")
    for tier in info["tiers"]:
        state, reason = info.get(f"{tier}_state", "ok"), info.get(f"{tier}_reason", "")
        if state != "ok":
            lines.append(f"{tier}: {state}, expected ok{f': {reason}' if reason else ''}")
    return lines


@contextmanager
def _progress(options: Options, name: str, chunks: int) -> Iterator[verify_walk.Advance]:
    """A bar on standard error, where that is a terminal and people read the answer."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("chunks"))
    is_silent = options.is_json or not console.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True, disable=is_silent
    ) as progress:
        task = progress.add_task(name, total=chunks)
        yield lambda done: progress.update(task, completed=min(done, chunks))
