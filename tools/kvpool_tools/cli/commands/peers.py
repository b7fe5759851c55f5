"""The command about other nodes: peers."""

from typing import Any

import click

from kvpool.units import format_duration, format_size
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool_tools.cli.output import print_json, print_line, print_table

pass_options = click.pass_obj
# As many digits of a life show which it is.
_LIFE_DIGITS = 8
_TEXT_COLUMNS = ("node", "address", "state", "seen", "life")


@cli.command(epilog=epilog("kvpoolctl peers", "kvpoolctl peers --json"))
@common_options
@pass_options
def peers(options: Options) -> None:
    """Print the other nodes of the fleet, and how this node gets on with each.

    First comes this node, as the others know it; last the problems and the latest error of each node that had one. What is
    counted begins with this daemon's start, and goes on when another node starts anew.

    \b
    STATE    following   connected; this node knows which chunks it has
             snapshot    connected; which chunks it has is still being read
             waiting     connected; reading that has failed, and is tried again soon
             suspended   several pulls in a row have failed: not asked for so long
             deferred    it has brought less than it announced: asked after others
                         that have the same chunks for so long
             refused     one of both refuses the other, with the code of
                         docs/peer-protocol.md; "name": another node has its name
             connecting  it has not answered yet
             away        its connection has ended or could not be made; tried
                         again, at least every 30 seconds
             left        it is no member any more; shown for 15 minutes
    SEEN     when it was connected last
    LIFE     changes when its daemon starts anew
    CHUNKS   that this node knows it to have
    PULLS    requests for chunks from here; FAILED: those that brought less than was
             offered, or no offer; READ: bytes that came
    RATE     measured bytes a second of its chunks, and WAIT, the time before the
             first of them: by both a load is estimated; "-" before a measurement

    The exit code is 0 whatever the states are; kvpoolctl check has another one where the daemon has problems.
    """
    with options.connect() as connection:
        report = ask(connection.peers)
    if options.is_json:
        print_json(report)
        return
    _print_here(report.get("here"))
    if report["peers"]:
        rows = [_readable(row) for row in report["peers"]]
        print_table("peers", rows, columns_max=len(rows[0]), words=_TEXT_COLUMNS)
    for problem in report.get("problems", []):
        print_line(f"problem: {problem}")
    for row in report["peers"]:
        if row["last_error"]:
            print_line(f"latest error of {row['node'] or _address(row)}: {row['last_error']}")
    if not report["peers"]:
        print_line(_why_none(report))


def _print_here(here: dict[str, Any] | None) -> None:
    if here is None:
        return
    keys = "keys" if here["has_keys"] else "no keys"
    chunks = f"chunks {'' if here['is_encrypted'] else 'not '}encrypted"
    print_line(f"this node: {here['node']} at {here['listen'].removeprefix('tcp://')}, {keys}, {chunks}")


def _why_none(report: dict[str, Any]) -> str:
    """Why no other node is listed. `here` is missing in the report of an older daemon."""
    if "here" in report and report["here"] is None:
        return "this node has no peers: set peer.listen and peer.stream, and restart the daemon (docs/cluster.md)"
    source = report.get("here", {}).get("members_from", "nowhere")
    if source == "nowhere":
        return "no other node is known: peer.members in the configuration names them"
    if source == "list":
        return "no other node is known: peer.members lists none but this one that may be used"
    return f"no other node is known: {source} has none yet"


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "node": row["node"] or "?",
        "address": _address(row),
        "state": _state(row),
        "seen": _seen(row),
        "life": row["life"][:_LIFE_DIGITS] or "-",
        "chunks": row["known_chunks"],
        "pulls": row["pulls"],
        "failed": row["failures"],
        "read": format_size(row["read_bytes"]),
        "rate": "-" if row["bytes_per_s"] is None else f"{format_size(row['bytes_per_s'])}/s",
        "wait": "-" if row["latency_us"] is None else f"{row['latency_us'] / 1000:.1f}ms",
    }


def _address(row: dict[str, Any]) -> str:
    return str(row["address"]).removeprefix("tcp://")


def _state(row: dict[str, Any]) -> str:
    if row["state"] == "refused":
        return f"refused ({row['code']})"
    has_time = row["state"] in ("suspended", "deferred")
    return f"{row['state']} {row['retry_s']:.0f}s" if has_time else str(row["state"])


def _seen(row: dict[str, Any]) -> str:
    """When the node was connected last. An older daemon does not report it."""
    if row["state"] in ("following", "snapshot", "waiting", "suspended", "deferred") or row["code"] == "name":
        return "now"
    away_s = row.get("away_s")
    return "-" if away_s is None else f"{format_duration(max(1, round(away_s)))} ago"
