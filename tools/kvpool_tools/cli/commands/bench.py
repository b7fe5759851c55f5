"""`kvpoolctl bench`: measurements of a daemon through the public client, against floors taken in the same run.

Without --socket it starts a daemon of its own and stops it afterwards. Prints medians with their spread; never a figure without
its floor. The measurements are in `kvpool_tools.bench`; here are the commands and the document that they write. Main thread
only.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from kvpool.errors import DaemonUnreachable, InvalidArgument, KVPoolError
from kvpool.transfer.child.mooncake import INFINIBAND, has_rdma_devices
from kvpool.units import parse_size
from kvpool_tools.bench.control_turns import bench_turns
from kvpool_tools.bench.copy import bench_copy
from kvpool_tools.bench.counted import RATIO_MAX, bench_counts, read_counts, slower
from kvpool_tools.bench.daemon import MeasuredDaemon, found_daemon, own_daemon
from kvpool_tools.bench.disk import has_disk
from kvpool_tools.bench.footprint import bench_footprint, default_capacity
from kvpool_tools.bench.lookup import bench_lookup
from kvpool_tools.bench.lookup_attention.steps import bench_sparse
from kvpool_tools.bench.peer.engine_ways import EngineChoice
from kvpool_tools.bench.peer.peer import bench_peer
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
from kvpool_tools.cli.bench_report import Advance, Report, Row
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
    "copy": (bench_copy, "save and load, per copying thread, against memcpy of the same bytes"),
    "shares": (bench_shares, "a rank of two loads its heads of chunks of another size, against shards of its own"),
    "lookup": (bench_lookup, "keys and lookup of a 128k-token prompt"),
    "rpc": (bench_rpc, "acquire and commit of 512 chunks and a hit of 8192 tokens against a raw socket's round trip"),
}
SSD_CHUNKS_TITLE = "what chunks on disk cost in memory"
TURNS_TITLE = "how much of the control thread long requests take in one turn"
COUNTS_TITLE = "instructions of an engine's requests, by callgrind"
FOOTPRINT_TITLE = "what an idle daemon costs, and how soon it serves"
PEER_TITLE = "chunks from node to node over loopback, against plain sockets with as many connections"
REPLAY_TITLE = "a trace's requests with real bytes, all of them checked"


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --quick and --out, and what every command has."""
    quick = click.option(
        "--quick", is_flag=True, help="Measure few rounds: this shows that it works, and proves nothing."
    )
    out = click.option(
        "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write the JSON document to FILE, too."
    )
    return quick(out(common_options(click.pass_obj(command))))


traces_argument = click.argument("traces", nargs=-1, metavar="[TRACE]...", type=click.Path(dir_okay=False))


@cli.group(epilog=epilog("kvpoolctl bench copy", "kvpoolctl --json bench rpc --out rpc.json"))
def bench() -> None:
    """Measure against floors of the same run on the same cores.

    Ratios are what counts: each figure stands beside its floor and its spread. Without --socket a daemon of its own is
    started and stopped.
    """
    # A plain end would leave the daemon's directory behind; this way it ends as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@bench.command(epilog=epilog("kvpoolctl bench copy", "kvpoolctl bench copy --quick --json"))
@bench_options
def copy(options: Options, quick: bool, out: str | None) -> None:
    """Save and load, for each copying thread, against memcpy of the same bytes."""
    with _reporting(options, "copy", out) as report:
        _measure_kinds(report, options, ["copy"], is_quick=quick)


@bench.command(epilog=epilog("kvpoolctl bench shares", "kvpoolctl bench shares --quick --json"))
@bench_options
def shares(options: Options, quick: bool, out: str | None) -> None:
    """Load a rank's heads of chunks that engines of other tensor-parallel sizes have stored, against shards of its own."""
    with _reporting(options, "shares", out) as report:
        _measure_kinds(report, options, ["shares"], is_quick=quick)


@bench.command(epilog=epilog("kvpoolctl bench lookup", "kvpoolctl bench lookup --quick --json"))
@bench_options
def lookup(options: Options, quick: bool, out: str | None) -> None:
    """Keys and lookup of a 128k-token prompt, against SHA-256 and a dict."""
    with _reporting(options, "lookup", out) as report:
        _measure_kinds(report, options, ["lookup"], is_quick=quick)


@bench.command(epilog=epilog("kvpoolctl bench rpc", "kvpoolctl bench rpc --quick --json"))
@bench_options
def rpc(options: Options, quick: bool, out: str | None) -> None:
    """Acquire and commit of 512 chunks and a hit of 8192 tokens, against a raw socket's round trip."""
    with _reporting(options, "rpc", out) as report:
        _measure_kinds(report, options, ["rpc"], is_quick=quick)


@bench.command(epilog=epilog("kvpoolctl bench footprint", "kvpoolctl bench footprint --ssd-chunks 4M"))
@click.option(
    "--capacity", metavar="SIZE", help="The arena (default: 16GiB, or what the machine can spare of it; --quick: 1GiB)."
)
@click.option(
    "--ssd-chunks", metavar="COUNT", help="Measure what so many chunks on disk cost in memory, such as 4M, instead."
)
@bench_options
def footprint(options: Options, capacity: str | None, ssd_chunks: str | None, quick: bool, out: str | None) -> None:
    """Cost of an idle daemon in memory and CPU time, and the time until it serves.

    Starts daemons of its own; --socket has no meaning here.
    """
    if options.socket is not None:
        fail("footprint starts daemons of its own: leave --socket out", EXIT_USAGE)
    with _reporting(options, "footprint", out) as report:
        if ssd_chunks is not None:
            count = parse_chunks(ssd_chunks)
            report.measure("footprint", SSD_CHUNKS_TITLE, lambda advance: bench_ssd_chunks(count, advance))
            return
        size = default_capacity(quick) if capacity is None else parse_size(capacity)
        report.measure("footprint", FOOTPRINT_TITLE, lambda advance: bench_footprint(size, quick, advance))


@bench.command(epilog=epilog("kvpoolctl bench turns", "kvpoolctl bench turns --count --against counts.json"))
@click.option("--count", is_flag=True, help="Count instructions of requests instead, by valgrind: about a minute.")
@click.option(
    "--against",
    metavar="FILE",
    help=f"With --count: fail where a request needs {RATIO_MAX} times what this earlier document (--out) has.",
)
@bench_options
def turns(options: Options, count: bool, against: str | None, quick: bool, out: str | None) -> None:
    """Time on the control thread of commits, a demotion of all chunks and requests about the longest chains.

    Runs the daemon's own classes without bytes in this process; --socket has no meaning here.
    """
    if options.socket is not None:
        fail("turns uses no daemon: leave --socket out", EXIT_USAGE)
    if not count and against is not None:
        fail("--against is for --count: times are not compared", EXIT_USAGE)
    with _reporting(options, "turns", out) as report:
        if count:
            before = {} if against is None else read_counts(against)
            report.measure("turns", COUNTS_TITLE, lambda advance: bench_counts(advance, before))
            if against is not None and not before:
                report.note_remark(f"nothing is compared: {against} is of another version of Python, or architecture")
        else:
            report.measure("turns", TURNS_TITLE, lambda advance: bench_turns(quick, advance))
    for line in slower(report.rows):
        click.echo(f"kvpoolctl: {line}", err=True)
    if slower(report.rows):
        fail(
            f"requests need more than {RATIO_MAX} times what they did: find out why, or write the new counts down",
            EXIT_FAILURE,
        )


@bench.command(epilog=epilog("kvpoolctl bench peer", "kvpoolctl bench peer --quick --json"))
@click.option(
    "--rdma-protocol",
    type=click.Choice(["tcp", "rdma"]),
    help="Use this protocol of TransferEngine (default: rdma where the machine has a device for it, else tcp).",
)
@click.option("--rdma-devices", default="", metavar="NAMES", help="Use these RDMA devices, by comma (default: all).")
@bench_options
def peer(options: Options, rdma_protocol: str | None, rdma_devices: str, quick: bool, out: str | None) -> None:
    """Chunks from one node to another by each transport, against plain sockets: rates, CPU time, the first extent.

    The stream, plain and encrypted; where Mooncake's TransferEngine is installed, its calls alone and kvpool over it. Both
    nodes are on this machine and use no daemon; --socket has no meaning here. TransferEngine listens on every address of the
    host meanwhile.
    """
    if options.socket is not None:
        fail("peer uses no daemon: leave --socket out", EXIT_USAGE)
    protocol = rdma_protocol or _engine_protocol()
    if protocol == "rdma" and not has_rdma_devices():
        fail(f"--rdma-protocol is rdma, and {INFINIBAND} has no device", EXIT_USAGE)
    with _reporting(options, "peer", out) as report:
        _measure_peer(report, EngineChoice(protocol, rdma_devices), is_quick=quick)


@bench.command(epilog=epilog("kvpoolctl bench sparse", "kvpoolctl bench sparse --tokens 64k --threads 1 --paths"))
@sparse_options
@bench_options
def sparse(options: Options, quick: bool, out: str | None, **asked: Any) -> None:
    """A decoding step by lookup and its parts, against full attention and plain reading of the same KV.

    Summaries first, then recall, attention and the whole step for each number of threads, resident set and budget. KV is made
    up, in memory of this process; --socket has no meaning here.
    """
    if options.socket is not None:
        fail("sparse uses no daemon: leave --socket out", EXIT_USAGE)
    with _reporting(options, "sparse", out) as report:
        bench_sparse(sparse_choice(asked, is_quick=quick), report.measure, report.note_remark)
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
def ssd(options: Options, path: str | None, size: str | None, quick: bool, out: str | None) -> None:
    """The SSD tier against raw I/O past the page cache: rates, the read tail, the first layer, reopening.

    Starts daemons of its own; --socket has no meaning here. The fresh folder is removed at the end. A file system in
    memory is refused: it does not measure a disk. Chunk sizes of which --size does not hold two are left out.
    """
    if options.socket is not None:
        fail("ssd starts daemons of its own: leave --socket out", EXIT_USAGE)
    with _reporting(options, "ssd", out) as report:
        bench_ssd(path, parse_total(size, is_quick=quick), quick, report.measure)


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
    quick: bool,
    out: str | None,
) -> None:
    """Replay request traces through a daemon, with real bytes, every one of which is checked.

    TRACE is a file of JSON lines as Mooncake publishes them (.jsonl, .jsonl.gz) or a numpy archive (.npz). Without one the
    files of the folder that KVPOOL_TRACES names are taken. A wrong byte ends the command with exit code 1.
    """
    if options.socket is not None and (capacity is not None or ssd_ratio or overrides):
        name = "--ssd-ratio" if ssd_ratio else "--set" if overrides else "--capacity"
        fail(f"{name} is for a daemon of the benchmark's own: leave it or --socket out", EXIT_USAGE)
    with _reporting(options, "replay", out) as report:
        named = named_traces(traces)
        if not named:
            fail(f"name traces, or the folder they are in by {TRACES_VARIABLE}=FOLDER", EXIT_USAGE)
        asked = ReplayOptions(
            clients=1 if settled else clients,
            chunk_bytes=parse_size(chunk_bytes),
            capacity=capacity or DEFAULT_CAPACITY,
            requests=QUICK_REQUESTS if quick and requests is None else requests,
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
        replay_layout(asked.chunk_bytes, Trace.block_tokens)
        parse_capacity(asked.capacity, 1)
        _measure_replay(report, named, asked)


@bench.command("all", epilog=epilog("kvpoolctl bench all", "kvpoolctl bench all traces/*.jsonl.gz --out bench.json"))
@traces_argument
@bench_options
def all_kinds(options: Options, traces: tuple[str, ...], quick: bool, out: str | None) -> None:
    """All benchmarks; replay where a TRACE is named, or a folder of them by KVPOOL_TRACES."""
    with _reporting(options, "all", out) as report:
        named = named_traces(traces)
        _measure_kinds(report, options, list(KINDS), is_quick=quick)
        if options.socket is None:
            size = default_capacity(quick)
            report.measure("footprint", FOOTPRINT_TITLE, lambda advance: bench_footprint(size, quick, advance))
            _measure_ssd(report, is_quick=quick)
            _measure_peer(report, EngineChoice(_engine_protocol()), is_quick=quick)
        else:
            report.note_remark(
                "footprint, ssd and peer are left out: they do not measure the daemon that --socket names"
            )
        if named:
            requests = QUICK_REQUESTS if quick else None
            asked = ReplayOptions(DEFAULT_CLIENTS, DEFAULT_CHUNK_BYTES, DEFAULT_CAPACITY, requests, "", options.socket)
            _measure_replay(report, named, asked)
        else:
            report.note_remark(
                f"replay is left out: name traces, or the folder they are in by {TRACES_VARIABLE}=FOLDER"
            )


@contextmanager
def _reporting(options: Options, command: str, out: str | None) -> Iterator[Report]:
    """A report that is finished at the end; what goes wrong ends the command with its exit code."""
    try:
        report = Report(options, command, out)
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


def _measure_kinds(report: Report, options: Options, kinds: Sequence[str], *, is_quick: bool) -> None:
    with _daemon(options) as daemon:
        for name in kinds:
            run, title = KINDS[name]
            report.measure(name, title, lambda advance, run=run: run(daemon, is_quick, advance))  # type: ignore[misc]


def _measure_ssd(report: Report, *, is_quick: bool) -> None:
    if has_disk(None):
        bench_ssd(None, parse_total(None, is_quick=is_quick), is_quick, report.measure)
    else:
        report.note_remark("ssd is left out: the user's folders are in memory; name a disk by bench ssd --path FOLDER")


def _measure_peer(report: Report, choice: EngineChoice, *, is_quick: bool) -> None:
    notes: list[str] = []
    report.measure("peer", PEER_TITLE, lambda advance: bench_peer(is_quick, advance, choice, notes))
    for note in notes:
        report.note_remark(note)


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
