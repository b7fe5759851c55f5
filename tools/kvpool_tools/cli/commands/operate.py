"""Commands that read a running daemon's state and flush chunks: info, stats, flush."""

import json
import shutil
import sys
import time
from contextlib import suppress
from typing import Any

import click

from kvpool.clock import MonotonicClock
from kvpool.errors import InvalidArgument
from kvpool.ownership import is_served
from kvpool.protocol.blocking import BlockingConnection
from kvpool.server.keeping.own_keeper import drop_everything
from kvpool.tiers.dram.kept.keeper import KeeperFault
from kvpool.units import format_size, parse_duration
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog, require_durable, require_model
from kvpool_tools.cli.output import EXIT_FAILURE, EXIT_USAGE, fail, print_json, print_line, print_section
from kvpool_tools.cli.watch import Watch

DEMOTE_ALL_TIMEOUT_S = 600.0
INTERVAL_MIN_S, INTERVAL_MAX_S = 0.01, 86400.0
Sections = dict[str, dict[str, Any]]

pass_options = click.pass_obj


@cli.command(epilog=epilog("kvpoolctl info", "kvpoolctl info --json"))
@common_options
@pass_options
def info(options: Options) -> None:
    """Print what the daemon is and what it uses on this machine."""
    with options.connect() as connection:
        values = ask(connection.info)
    if options.is_json:
        print_json(values)
    else:
        print_section("info", values)


@cli.command(epilog=epilog("kvpoolctl stats", "kvpoolctl stats dram --watch --interval 5s"))
@click.argument("section", required=False)
@click.option("--watch", is_flag=True, help="Print one line for each interval, until interrupted.")
@click.option("--interval", metavar="DURATION", help="Time between lines of --watch, 10ms to 1d (default: 1s).")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End --watch after N lines (default: never).")
@common_options
@pass_options
def stats(options: Options, section: str | None, watch: bool, interval: str | None, count: int | None) -> None:
    """Print counters, all or those of one SECTION: server, index, dram, chunks, held, usage, events; and hbm, ssd, peer, store
    and sparse, where there are such.

    Lines are `name:value`; a name never changes its meaning. After each `…_bytes` a line `…_human` repeats the size with a
    unit; --json has the raw values alone. Slots are counted by size class, CHUNK BYTESxEXTENTS.

    --watch prints one line for each interval: chunks and bytes in DRAM, chunks stored and evicted and bytes loaded in a second,
    the hits' share of the tokens looked up since the line before, leases, saves under way and connections. With SECTION it
    prints that section for each interval, with the change in a second behind each value that has changed. With --json each
    interval is one object on a line of its own.

    usage.hit_rate counts tokens as often as engines look them up: a prompt once for each rank that looks up by itself (vLLM's
    scheduler does it for all ranks), and again where a waiting request is looked up again.
    """
    if not watch and (interval is not None or count is not None):
        fail(f"{'--count goes' if interval is None else '--interval goes'} with --watch", EXIT_USAGE)
    interval_s = _seconds(interval or "1s", "--interval")
    if not INTERVAL_MIN_S <= interval_s <= INTERVAL_MAX_S:
        fail(f"--interval is {interval}, expected 10ms to 1d", EXIT_USAGE)
    with options.connect() as connection:
        if watch:
            with suppress(KeyboardInterrupt):  # which is how people end it
                _watch(connection, section, interval_s, count, is_json=options.is_json)
            return
        chosen = _chosen(ask(connection.stats), section)
    if options.is_json:
        print_json(chosen)
        return
    for name, values in chosen.items():
        print_section(name, values, is_readable=True)


@cli.command(epilog=epilog("kvpoolctl flush --model llama-3-8b --yes", "kvpoolctl flush --older-than 1h"))
@click.option("--all", "is_all", is_flag=True, help="Drop every chunk.")
@click.option("--model", metavar="M", help="Drop chunks of one model.")
@click.option("--older-than", metavar="DURATION", help="Drop chunks that were not used for this long, such as 30m.")
@click.option("--tier", metavar="NAME", help="Drop chunks from this tier alone: hbm, dram, ssd (default: every tier).")
@click.option(
    "--demote", is_flag=True, help="Write chunks that only DRAM has to the SSD tier and checkpoint; drop nothing."
)
@click.option("--force", is_flag=True, help="Write beyond ssd.write_budget, with --demote.")
@click.option("--yes", is_flag=True, help="Do it without a question.")
@common_options
@pass_options
def flush(
    options: Options,
    is_all: bool,
    model: str | None,
    older_than: str | None,
    tier: str | None,
    demote: bool,
    force: bool,
    yes: bool,
) -> None:
    """Drop chunks from every tier, or one. Chunks that are held stay. Prints what was dropped. Fails where there is no such
    model, and where a restart may bring some back (`durable` with --json), because the SSD tier is not open or could not write
    it down. With --all and without a daemon, a keeper process drops the memory that it has for the next one (`kept_bytes` with
    --json), and it fails all the same: what is on disk stays until a daemon runs and is asked again.

    With --demote nothing is dropped: chunks that only DRAM has are written to the SSD tier and synced. Fails where a power cut
    could still lose chunks (`durable` with --json): some are left in DRAM alone, because ssd.write_budget is used up (--force
    writes them nevertheless) or the tier has no room for them, or a sync failed or came late.
    """
    if demote:
        _demote_all(options, is_alone=model is None and older_than is None and tier is None, is_forced=force)
        return
    if force:
        fail("--force goes with --demote", EXIT_USAGE)
    if model == "":
        fail("--model is empty: name a model, or use --all for every chunk", EXIT_USAGE)
    if not is_all and model is None and older_than is None and tier is None:
        fail("name what to drop: --all, --model M, --tier T or --older-than DURATION", EXIT_USAGE)
    if is_all and (model is not None or older_than is not None):
        fail("--all goes with neither --model nor --older-than", EXIT_USAGE)
    age_s = None if older_than is None else _seconds(older_than, "--older-than")
    what = "every chunk" if is_all else "chunks" + (f" of model {model}" if model else "")
    what += f" not used for {older_than}" if older_than else ""
    what += f" in tier {tier}" if tier else ""
    if not yes and not _is_confirmed(f"Drop {what} at {options.socket_path}?"):
        fail("nothing was dropped", EXIT_FAILURE)
    if is_all and not tier:
        _drop_kept(options)
    with options.connect() as connection:
        if model is not None:
            require_model(connection, model)
        report = ask(lambda: connection.flush(model, age_s, tier or ""))
    if options.is_json:
        print_json(report)
    else:
        size = format_size(report["bytes"])
        print_line(f"dropped {report['chunks']} chunks, {size}; {report['skipped']} are held and stay")
    if not report["durable"]:
        fail("a restart may bring back some of what the SSD tier had: kvpoolctl info has its state", EXIT_FAILURE)


def _drop_kept(options: Options) -> None:
    """Where there is no daemon, have a keeper process drop what it has, and fail: a disk was not looked at."""
    try:
        kept_bytes = None if is_served(options.socket_path) else drop_everything(options.socket_path)
    except OSError:  # it is no socket, or nobody says who is there: what connects finds out
        return
    except KeeperFault as error:
        fail(f"no daemon runs, and the memory that is kept for the next one cannot be dropped: {error}", EXIT_FAILURE)
    if kept_bytes is None:
        return
    if options.is_json:
        print_json({"kept_bytes": kept_bytes, "durable": False})
    else:
        print_line(f"no daemon runs; dropped {format_size(kept_bytes)} of memory that was kept for the next one")
    fail("what an SSD tier or a store has is there still: flush again when a daemon runs", EXIT_FAILURE)


def _is_confirmed(question: str) -> bool:
    try:
        return click.confirm(question, err=True)
    except click.Abort:  # nobody is there to answer
        fail("nothing was dropped: --yes does it without a question", EXIT_FAILURE)


def _demote_all(options: Options, *, is_alone: bool, is_forced: bool) -> None:
    if not is_alone:
        fail("--demote writes all chunks: it goes with no other choice than --all", EXIT_USAGE)
    with options.connect() as connection:
        report = ask(lambda: connection.demote_all(DEMOTE_ALL_TIMEOUT_S, is_forced=is_forced))
        if options.is_json:
            print_json(report)
        else:
            lost = "none of the chunks here" if report["durable"] else "some"
            written = f"{report['chunks']} chunks are written to the SSD tier, {report['left']} are in DRAM alone"
            print_line(f"{written}: a power cut now could take {lost}")
        require_durable(connection, report)


def _watch(
    connection: BlockingConnection, section: str | None, interval_s: float, count: int | None, *, is_json: bool
) -> None:
    clock = MonotonicClock()
    watch = Watch(section, shutil.get_terminal_size().columns)
    line = 0
    while count is None or line < count:
        if line:
            time.sleep(interval_s)
        sections = ask(connection.stats)
        chosen = _chosen(sections, section)
        if is_json:
            click.echo(json.dumps(chosen))
        else:
            for text in watch.lines(sections, clock.now_ns()):
                print_line(text)
        sys.stdout.flush()
        line += 1


def _chosen(sections: Sections, section: str | None) -> Sections:
    """The section of a name, or all; ends the command where there is none."""
    if section is not None and section not in sections:
        fail(f"{section!r} is no section, expected one of {', '.join(sections)}", EXIT_USAGE)
    return sections if section is None else {section: sections[section]}


def _seconds(text: str, option: str) -> float:
    try:
        return parse_duration(text)
    except InvalidArgument as error:
        fail(f"{option}: {error}", EXIT_USAGE)
