"""`kvpoolctl models`: what is stored of each model, and how it is used. Main thread of a command only."""

from typing import Any

import click

from kvpool.units import format_duration, format_size
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool_tools.cli.output import print_json, print_line, print_table


@cli.command(epilog=epilog("kvpoolctl models", "kvpoolctl models --json"))
@common_options
@click.pass_obj
def models(options: Options) -> None:
    """Print each model and layout of which something is stored or an engine is connected, those with the most bytes first.

    All ranks of a layout are one row; a layout with groups has one for each group. CHUNKS counts a chunk once, whichever tiers
    have it, and each tier's column is the bytes that it has. HITS is the share of the tokens looked up since the daemon's start
    that were hits, UNUSED the time since an engine last looked up, loaded or saved, "-" for none since the start. A model with
    a revision is named model@revision.
    """
    with options.connect() as connection:
        report = ask(connection.models)
    if options.is_json:
        print_json(report)
        return
    if not report["models"]:
        print_line("no model has chunks here, and no engine is connected")
        return
    rows = [_readable(row) for row in report["models"]]
    print_table("models", rows, columns_max=len(rows[0]), words=("model", "layout"))
    if report["left_out"]:
        print_line(f"{report['left_out']} more, which have fewer bytes, are left out")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    looked_up, unused_s = row["lookup_tokens"], row["unused_s"]
    tiers = {name.removesuffix("_bytes"): format_size(size) for name, size in row.items() if name.endswith("_bytes")}
    return {
        **{name: row[name] for name in ("model", "layout", "chunks")},
        **tiers,
        "hits": f"{row['hit_tokens'] / looked_up:.1%}" if looked_up else "-",
        "unused": "-" if unused_s is None else format_duration(max(1, round(unused_s))),
        "connections": row["connections"],
    }
