"""The command about other nodes: peers."""

from typing import Any

import click

from kvpool.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool.cli.output import print_json, print_line, print_table
from kvpool.units import format_size

pass_options = click.pass_obj
# As many digits of a life show which it is.
_LIFE_DIGITS = 8


@cli.command(epilog=epilog("kvpoolctl peers", "kvpoolctl peers --json"))
@common_options
@pass_options
def peers(options: Options) -> None:
    """Print the other nodes of the fleet, as far as they are known, and how this node gets on with each.

    STATE is "following" where this node knows what the other one has, and "snapshot" while it is still reading that; "waiting"
    after an attempt that failed, until the next one. "refused" comes with the code of docs/peer-protocol.md. "suspended" is a
    node from which several pulls in a row have failed: it is not asked for so long. "connecting" is one that has not answered
    yet, "away" one whose connection has ended or could not be made; both are tried again and again. LIFE changes when the
    node's daemon starts anew. CHUNKS are those that this node knows the other one to have. PULLS, FAILED and READ count what
    this node has taken from it; RATE and WAIT are the measured pace by which a load from there is estimated: bytes a second,
    and the time before the first of them. ERROR is the latest one.
    """
    with options.connect() as connection:
        report = ask(connection.peers)
    if options.is_json:
        print_json(report)
        return
    if not report["peers"]:
        print_line("no other node is known: peer.members in the configuration names them")
        return
    rows = [_readable(row) for row in report["peers"]]
    print_table("peers", rows, columns_max=len(rows[0]))


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    is_measured = row["bytes_per_s"] is not None
    return {
        "node": row["node"] or "?",
        "address": row["address"].removeprefix("tcp://"),
        "state": _state(row),
        "life": row["life"][:_LIFE_DIGITS] or "-",
        "chunks": row["known_chunks"],
        "pulls": row["pulls"],
        "failed": row["failures"],
        "read": format_size(row["read_bytes"]),
        "rate": f"{format_size(row['bytes_per_s'])}/s" if is_measured else "-",
        "wait": f"{row['latency_us'] / 1000:.1f}ms" if is_measured else "-",
        "error": row["last_error"],
    }


def _state(row: dict[str, Any]) -> str:
    if row["state"] == "refused":
        return f"refused ({row['code']})"
    return f"suspended {row['retry_s']:.0f}s" if row["state"] == "suspended" else str(row["state"])
