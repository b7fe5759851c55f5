"""`kvpoolctl bench`: measurements of a daemon through the public client, against floors taken in the same run.

Without --socket it starts a daemon of its own and stops it afterwards. Prints medians with their spread; never a figure without
its floor. The measurements are in `kvpool_tools.bench`; here are the commands and the document that they write. Main thread
only.
"""

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from kvpool.errors import DaemonUnreachable, InvalidArgument, KVPoolError
from kvpool.transfer.child.mooncake import INFINIBAND, has_rdma_devices
from kvpool.units import parse_size
from kvpool_tools.bench.compare import COUNTS, TIMES, Terms
from kvpool_tools.bench.control_turns import bench_turns
from kvpool_tools.bench.copy import bench_copy
from kvpool_tools.bench.counted import bench_counts
from kvpool_tools.bench.daemon import MeasuredDaemon, found_daemon, own_daemon
from kvpool_tools.bench.disk import has_disk
from kvpool_tools.bench.engines import bench_engines
from kvpool_tools.bench.footprint import bench_footprint, default_capacity
from kvpool_tools.bench.lookup import bench_lookup
from kvpool_tools.bench.lookup_attention.choice import short_choice
from kvpool_tools.bench.lookup_attention.steps import bench_sparse, check_memory
from kvpool_tools.bench.peer.engine_ways import EngineChoice
from kvpool_tools.bench.peer.peer import bench_peer
from kvpool_tools.bench.peer.round_trips import bench_round_trips
from kvpool_tools.bench.replay.client import replay_layout
from kvpool_tools.bench.replay.replay import (
    QUICK_REQUESTS,
    TRACES_VARIABLE,
    ReplayOptions,
    bench_replay,
    named_traces,
    parse_capacity,
)
from kvpool_tools.bench.rpc import bench_rpc
from kvpool_tools.bench.shares import bench_shares
from kvpool_tools.bench.ssd.footprint import bench_ssd_chunks, parse_chunks
from kvpool_tools.bench.ssd.parts import DEFAULT_SIZE, bench_ssd, parse_total
from kvpool_tools.cli.bench_report import Advance, Asked, Report, Row
from kvpool_tools.cli.kvpoolctl import Options, cli, common_options, epilog
from kvpool_tools.cli.number_range import NumberRange
from kvpool_tools.cli.output import EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE, fail
from kvpool_tools.cli.sparse_bench import sparse_choice, sparse_options
from kvpool_tools.sim.traces import Trace, TraceError

CAPACITY_BYTES = 2 << 30
DEFAULT_CLIENTS = 2
DEFAULT_CHUNK_BYTES = 64 << 10
DEFAULT_CAPACITY = "10%"

Bench = Callable[[MeasuredDaemon, bool, Advance], Sequence[Row]]

# What runs on one daemon, one kind after the other.
KINDS: dict[str, tuple[Bench, str]] = {
    "copy": (bench_copy, "Save and load, for each copying thread, against memcpy of the same bytes."),
    "shares": (
        bench_shares,
        "Load a rank's heads of chunks of other tensor-parallel sizes, against shards of its own.",
    ),
    "lookup": (bench_lookup, "Keys and lookup of a 128k-token prompt, against SHA-256 and a dict."),
    "rpc": (
        bench_rpc,
        "Acquire, save and commit of 512 chunks and hits of 8192 tokens, against a raw socket's round trip.",
    ),
}
SSD_CHUNKS_TITLE = "what chunks on disk cost in memory"
TURNS_TITLE = "how much of the control thread long requests take in one turn"
COUNTS_TITLE = "instructions of an engine's requests, by callgrind"
FOOTPRINT_TITLE = "what an idle daemon costs, and how soon it serves"
ENGINES_TITLE = "requests a second of 64 engines, against raw round trips of as many connections"
ROUND_TRIPS_TITLE = "round trips of a pull between two daemons, from the lease to the last byte"
PEER_TITLE = "chunks from node to node over loopback, against plain sockets with as many connections"
REPLAY_TITLE = "a trace's requests with real bytes, all of them checked"


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --quick, --out and --against, which the command gets as one Asked, and what every command has."""
    quick = click.option(
        "--quick", is_flag=True, help="Measure few rounds: this shows that it works, and proves nothing."
    )
    out = click.option(
        "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write the JSON document to FILE, too."
    )
    against = click.option(
        "--against",
        metavar="FILE",
        help="Compare with FILE, an earlier document (--out) of the same machine: exit code 1 where a figure is worse "
        f"by more than {TIMES.bound} x ({COUNTS.bound} x of --count), and beyond the spread of both.",
    )

    @functools.wraps(command)
    def run(options: Options, *, quick: bool, out: str | None, against: str | None, **named: Any) -> None:
        command(options, Asked(is_quick=quick, out=out, against=against), **named)

    return quick(out(against(common_options(click.pass_obj(run)))))


traces_argument = click.argument("traces", nargs=-1, metavar="[TRACE]...", type=click.Path(dir_okay=False))


@cli.group(epilog=epilog("kvpoolctl bench copy", "kvpoolctl --json bench rpc --out rpc.json"))
def bench() -> None:
    """Measure against floors of the same run on the same cores.

    Ratios are what counts: each figure stands beside its floor and its spread. Without --socket a daemon of its own is
    started and stopped.
    """
    # A plain end would leave the daemon's directory behind; this way it ends as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _add_kind(name: str) -> None:
    """A command that measures one kind."""

    @bench_options
    def measure(options: Options, asked: Asked) -> None:
        with _reporting(options, name, asked) as report:
            _measure_kinds(report, options, [name], is_quick=asked.is_quick)

    examples = epilog(f"kvpoolctl bench {name}", f"kvpoolctl bench {name} --quick --json")
    bench.command(name, help=KINDS[name][1], epilog=examples)(measure)


for _name in KINDS:
    _add_kind(_name)


@bench.command(epilog=epilog("kvpoolctl bench footprint", "kvpoolctl bench footprint --ssd-chunks 4M"))
@click.option(
    "--capacity", metavar="SIZE", help="The arena (default: 16GiB, or what the machine can spare of it; --quick: 1GiB)."
)
@click.option(
    "--ssd-chunks", metavar="COUNT", help="Measure what so many chunks on disk cost in memory, such as 4M, instead."
)
@bench_options
def footprint(options: Options, asked: Asked, capacity: str | None, ssd_chunks: str | None) -> None:
    """Cost of an idle daemon in memory and CPU time, and the time until it serves.

    Starts daemons of its own; --socket has no meaning here.
    """
    if options.socket is not None:
        fail("footprint starts daemons of its own: leave --socket out", EXIT_USAGE)
    with _reporting(options, "footprint", asked) as report:
        if ssd_chunks is not None:
            count = parse_chunks(ssd_chunks)
            report.measure("footprint", SSD_CHUNKS_TITLE, lambda advance: bench_ssd_chunks(count, advance))
            return
        size = default_capacity(asked.is_quick) if capacity is None else parse_size(capacity)
        report.measure("footprint", FOOTPRINT_TITLE, lambda advance: bench_footprint(size, asked.is_quick, advance))


@bench.command(epilog=epilog("kvpoolctl bench engines", "kvpoolctl bench engines --quick --json"))
@bench_options
def engines(options: Options, asked: Asked) -> None:
    """Requests a second of one daemon with 64 engines, which save and lease prompts of 32 chunks, and its CPU time for each.

    Starts a daemon of its own; --socket has no meaning here.
    """
    if options.socket is not None:
        fail("engines starts a daemon of its own: leave --socket out", EXIT_USAGE)
    with _reporting(options, "engines", asked) as report:
        _measure_engines(report, asked)


@bench.command(epilog=epilog("kvpoolctl bench turns", "kvpoolctl bench turns --count --against counts.json"))
@click.option("--count", is_flag=True, help="Count instructions of requests instead, by valgrind: about a minute.")
@bench_options
def turns(options: Options, asked: Asked, count: bool) -> None:
    """Time on the control thread of commits, a demotion of all chunks and requests about the longest chains.

    Runs the daemon's own classes without bytes in this process; --socket has no meaning here.
    """
    if options.socket is not None:
        fail("turns uses no daemon: leave --socket out", EXIT_USAGE)
    with _reporting(options, "turns", asked, COUNTS if count else TIMES) as report:
        if count:
            report.measure("turns", COUNTS_TITLE, bench_counts)
        else:
            report.measure("turns", TURNS_TITLE, lambda advance: bench_turns(asked.is_quick, advance))


@bench.command(epilog=epilog("kvpoolctl bench peer", "kvpoolctl bench peer --quick --json"))
@click.option(
    "--rdma-protocol",
    type=click.Choice(["tcp", "rdma"]),
    help="Use this protocol of TransferEngine and NIXL (default: rdma where the machine has a device for it, else tcp).",
)
@click.option("--rdma-devices", default="", metavar="NAMES", help="Use these RDMA devices, by comma (default: all).")
@bench_options
def peer(options: Options, asked: Asked, rdma_protocol: str | None, rdma_devices: str) -> None:
    """Chunks from one node to another by each transport, against plain sockets: rates, CPU time, the first extent.

    The stream, plain and encrypted; where Mooncake's TransferEngine is installed, its calls alone and kvpool over it;
    where NIXL is, kvpool over it. Both nodes are on this machine and use no daemon; --socket has no meaning here. Both
    libraries listen on every address of the host meanwhile. Then the round trips of a pull between two daemons, of which this
    starts its own.
    """
    if options.socket is not None:
        fail("peer starts daemons of its own: leave --socket out", EXIT_USAGE)
    protocol = rdma_protocol or _engine_protocol()
    if protocol == "rdma" and not has_rdma_devices():
        fail(f"--rdma-protocol is rdma, and {INFINIBAND} has no device", EXIT_USAGE)
    with _reporting(options, "peer", asked) as report:
        _measure_peer(report, EngineChoice(protocol, rdma_devices), is_quick=asked.is_quick)


@bench.command(epilog=epilog("kvpoolctl bench sparse", "kvpoolctl bench sparse --tokens 64k --threads 1 --paths"))
@sparse_options
@bench_options
def sparse(options: Options, asked: Asked, **named: Any) -> None:
    """A decoding step by lookup and its parts, against full attention and plain reading of the same KV.

    Summaries first, then recall, attention and the whole step for each number of threads, resident set and budget. KV is made
    up, in memory of this process; --socket has no meaning here.
    """
    if options.socket is not None:
        fail("sparse uses no daemon: leave --socket out", EXIT_USAGE)
    with _reporting(options, "sparse", asked) as report:
        bench_sparse(sparse_choice(named, is_quick=asked.is_quick), report.measure, report.note_remark)
        report.note_remark(
            "{processor}, {cores} cores, load average {load_average_before} before".format(**report.machine)
        )


path_option = click.option(
    "--path",
    metavar="FOLDER",
    help="Work here on a disk, in a fresh folder (default: the user's cache, or TMPDIR).",
)


@bench.command(epilog=epilog("kvpoolctl bench ssd", "kvpoolctl bench ssd --path /mnt/nvme --size 1GiB --json"))
@path_option
@click.option("--size", metavar="SIZE", help=f"Bytes of one pass, 8MiB or more (default: {DEFAULT_SIZE}).")
@bench_options
def ssd(options: Options, asked: Asked, path: str | None, size: str | None) -> None:
    """The SSD tier against raw I/O past the page cache: rates, the read tail, the first layer, reopening.

    Starts daemons of its own; --socket has no meaning here. The fresh folder is removed at the end. A file system in
    memory is refused: it does not measure a disk. Chunk sizes of which --size does not hold two are left out.
    """
    if options.socket is not None:
        fail("ssd starts daemons of its own: leave --socket out", EXIT_USAGE)
    with _reporting(options, "ssd", asked) as report:
        bench_ssd(path, parse_total(size, is_quick=asked.is_quick), asked.is_quick, report.measure)


@bench.command(
    epilog=epilog(
        "kvpoolctl bench replay conversation_trace.jsonl.gz --capacity 10%",
        f"{TRACES_VARIABLE}=traces kvpoolctl bench replay --quick --json",
    )
)
@traces_argument
@click.option("--clients", type=click.IntRange(1, 64), default=DEFAULT_CLIENTS, help="Client processes (default: 2).")
@click.option("--chunk-bytes", metavar="SIZE", default="64KiB", help="Bytes of a chunk (default: 64KiB).")
@click.option(
    "--capacity", metavar="SIZE|SHARE", help="The daemon's DRAM, or its share of the unique bytes (default: 10%)."
)
@click.option(
    "--ssd-ratio",
    type=NumberRange(0.0, 1000.0),
    default=0.0,
    metavar="R",
    help="An SSD tier with R times the capacity, in the folder of --path; 0: DRAM alone (default: 0).",
)
@path_option
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    metavar="N",
    help="Replay the first N requests (default: those of about a minute).",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set an option of the daemon that is started."
)
@click.option(
    "--settled",
    is_flag=True,
    help="Replay by one client, and have each request wait until nothing moves between the tiers, as in simulate.",
)
@click.option("--times", metavar="FILE", help="Write when each request began, for simulate --times (with --settled).")
@click.option(
    "--salt", default="", metavar="TEXT", help="Find the chunks of an earlier run with this salt (default: a new one)."
)
@bench_options
def replay(
    options: Options,
    asked: Asked,
    traces: tuple[str, ...],
    clients: int,
    chunk_bytes: str,
    capacity: str | None,
    ssd_ratio: float,
    path: str | None,
    requests: int | None,
    settled: bool,
    times: str | None,
    overrides: tuple[str, ...],
    salt: str,
) -> None:
    """Replay request traces through a daemon, with real bytes, every one of which is checked.

    TRACE is a file of JSON lines as Mooncake publishes them (.jsonl, .jsonl.gz) or a numpy archive (.npz). Without one the
    files of the folder that KVPOOL_TRACES names are taken. A wrong byte ends the command with exit code 1.
    """
    if options.socket is not None and (capacity is not None or ssd_ratio or overrides):
        name = "--ssd-ratio" if ssd_ratio else "--set" if overrides else "--capacity"
        fail(f"{name} is for a daemon of the benchmark's own: leave it or --socket out", EXIT_USAGE)
    with _reporting(options, "replay", asked) as report:
        named = named_traces(traces)
        if not named:
            fail(f"name traces, or the folder they are in by {TRACES_VARIABLE}=FOLDER", EXIT_USAGE)
        replayed = ReplayOptions(
            clients=1 if settled else clients,
            chunk_bytes=parse_size(chunk_bytes),
            capacity=capacity or DEFAULT_CAPACITY,
            requests=QUICK_REQUESTS if asked.is_quick and requests is None else requests,
            salt=salt,
            socket=options.socket,
            ssd_ratio=ssd_ratio,
            path=path,
            is_settled=settled,
            times=times,
            overrides=overrides,
        )
        if times is not None and not (settled and len(named) == 1):
            fail("--times is for one trace with --settled", EXIT_USAGE)
        replay_layout(replayed.chunk_bytes, Trace.block_tokens)
        parse_capacity(replayed.capacity, 1)
        _measure_replay(report, named, replayed)


@bench.command("all", epilog=epilog("kvpoolctl bench all", "kvpoolctl bench all traces/*.jsonl.gz --out bench.json"))
@traces_argument
@bench_options
def all_kinds(options: Options, asked: Asked, traces: tuple[str, ...]) -> None:
    """All benchmarks; replay where a TRACE is named, or a folder of them by KVPOOL_TRACES."""
    with _reporting(options, "all", asked) as report:
        named = named_traces(traces)
        _measure_kinds(report, options, list(KINDS), is_quick=asked.is_quick)
        if options.socket is None:
            _measure_engines(report, asked)
            size = default_capacity(asked.is_quick)
            report.measure("footprint", FOOTPRINT_TITLE, lambda advance: bench_footprint(size, asked.is_quick, advance))
            _measure_ssd(report, is_quick=asked.is_quick)
            _measure_sparse(report, is_quick=asked.is_quick)
            _measure_peer(report, EngineChoice(_engine_protocol()), is_quick=asked.is_quick)
        else:
            report.note_remark(
                "engines, footprint, ssd, sparse and peer are left out: they do not measure the daemon that --socket names"
            )
        if named:
            requests = QUICK_REQUESTS if asked.is_quick else None
            replayed = ReplayOptions(
                DEFAULT_CLIENTS, DEFAULT_CHUNK_BYTES, DEFAULT_CAPACITY, requests, "", options.socket
            )
            _measure_replay(report, named, replayed)
        else:
            report.note_remark(
                f"replay is left out: name traces, or the folder they are in by {TRACES_VARIABLE}=FOLDER"
            )


@contextmanager
def _reporting(options: Options, command: str, asked: Asked, terms: Terms = TIMES) -> Iterator[Report]:
    """A report that is finished at the end; what goes wrong, or got slower, ends the command with its exit code."""
    try:
        report = Report(options, command, asked, terms)
        yield report
        report.finish()
    except (TraceError, InvalidArgument) as error:
        fail(str(error), EXIT_USAGE)
    except DaemonUnreachable as error:
        fail(str(error), EXIT_UNREACHABLE)
    except KVPoolError as error:
        fail(str(error), EXIT_FAILURE)
    wrong = [row for row in report.rows if row.get("wrong_bytes")]
    for row in wrong:
        what = row.get("trace") or f"ssd {row['part']}"
        click.echo(f"kvpoolctl: {what}: {row['wrong_bytes']} wrong bytes, in chunks:", err=True)
        for key in row.get("wrong_keys", ()):
            click.echo(f"  {key}", err=True)
    if wrong:
        fail("wrong bytes came back: this daemon must not be used", EXIT_FAILURE)
    if report.slower:
        fail(f"slower than in {asked.against}: {len(report.slower)} of {len(report.compared)} figures", EXIT_FAILURE)


def _measure_kinds(report: Report, options: Options, kinds: Sequence[str], *, is_quick: bool) -> None:
    with _daemon(options) as daemon:
        for name in kinds:
            run, title = KINDS[name]
            report.measure(name, title, lambda advance, run=run: run(daemon, is_quick, advance))  # type: ignore[misc]


def _measure_engines(report: Report, asked: Asked) -> None:
    report.measure("engines", ENGINES_TITLE, lambda advance: bench_engines(asked.is_quick, advance))


def _measure_ssd(report: Report, *, is_quick: bool) -> None:
    if has_disk(None):
        bench_ssd(None, parse_total(None, is_quick=is_quick), is_quick, report.measure)
    else:
        report.note_remark("ssd is left out: the user's folders are in memory; name a disk by bench ssd --path FOLDER")


def _measure_sparse(report: Report, *, is_quick: bool) -> None:
    """What has bars, where memory is enough."""
    choice = short_choice(is_quick=is_quick)
    try:
        check_memory(choice.sizes)
    except InvalidArgument as error:
        report.note_remark(f"sparse is left out: {error}")
        return
    bench_sparse(choice, report.measure, report.note_remark)


def _measure_peer(report: Report, choice: EngineChoice, *, is_quick: bool) -> None:
    notes: list[str] = []
    report.measure("peer", PEER_TITLE, lambda advance: bench_peer(is_quick, advance, choice, notes))
    for note in notes:
        report.note_remark(note)
    report.measure("pull", ROUND_TRIPS_TITLE, lambda advance: bench_round_trips(is_quick, advance))


def _engine_protocol() -> str:
    return "rdma" if has_rdma_devices() else "tcp"


def _measure_replay(report: Report, traces: Sequence[Trace], asked: ReplayOptions) -> None:
    """Each trace in turn, up to the first with wrong bytes: no figure counts after that."""
    for trace in traces:
        report.measure(
            "replay",
            REPLAY_TITLE,
            lambda advance, trace=trace: [bench_replay(trace, asked, advance)],  # type: ignore[misc]
        )
        if report.rows[-1]["wrong_bytes"]:
            return


@contextmanager
def _daemon(options: Options) -> Iterator[MeasuredDaemon]:
    """The daemon to measure: the one that was named, or one started for this run."""
    if options.socket is not None:
        yield found_daemon(options.socket)
        return
    with own_daemon(CAPACITY_BYTES) as daemon:
        yield daemon
