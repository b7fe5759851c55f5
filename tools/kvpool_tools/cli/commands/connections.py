"""Commands about connections: connections, disconnect."""

from typing import Any

import click

from kvpool.units import format_size
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool_tools.cli.output import EXIT_FAILURE, fail, print_json, print_line, print_table

pass_options = click.pass_obj


@cli.command(epilog=epilog("kvpoolctl connections", "kvpoolctl connections --json"))
@common_options
@pass_options
def connections(options: Options) -> None:
    """Print all connections and what each holds, those that hold the most first.

    HELD counts chunks that cannot be evicted because of the connection: slots that it writes, or may still write after their
    reservation has expired, chunks that it has leased, and chunks that it has announced. UNREAD is the part of a request that
    has arrived without the rest. RANK is "-" for a scheduler, which stands for all ranks, and for an operator. A connection
    that is "ending" has been disconnected and not closed by its process yet: slots that it may still write stay reserved.

    NAME is what the process calls itself, and no proof: an adapter names engine, pod or host, and rank. PID is 0 where the
    process is in a process namespace of its own, as in another container.
    """
    with options.connect() as connection:
        report = ask(connection.connections)
    if options.is_json:
        print_json(report)
        return
    rows = [_readable(row) for row in report["connections"]]
    print_table("connections", rows, columns_max=len(rows[0]))
    if report["left_out"]:
        print_line(f"{report['left_out']} more, which hold less, are left out")


@cli.command(epilog=epilog("kvpoolctl disconnect 17"))
@click.argument("connection", type=click.IntRange(1, (1 << 63) - 1), metavar="ID")
@common_options
@pass_options
def disconnect(options: Options, connection: int) -> None:
    """End the connection with a number that `kvpoolctl connections` shows.

    Its leases and announcements end at once, its saves are given up. Slots that its process may still write are free when the
    process has closed the connection, as the client library does by itself; the library then connects again.
    """
    with options.connect() as operator:
        is_found = ask(lambda: operator.disconnect(connection))
    if not is_found:
        fail(f"there is no connection {connection}: kvpoolctl connections shows those that there are", EXIT_FAILURE)
    if options.is_json:
        print_json({"disconnected": True})
    else:
        print_line(f"connection {connection} ends")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: row[name] for name in ("id", "pid", "uid")},
        "name": row.get("name", "") or "-",
        **{name: row[name] for name in ("role", "model", "rank")},
        "age": f"{row['age_s']:.0f}s",
        "leases": row["leases"],
        "saves": row["reservations"],
        "held": format_size(row["held_bytes"]),
        "unread": format_size(row["unread_bytes"]),
        "state": row["state"],
    }
