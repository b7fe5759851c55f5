"""Fleet: hit rates of traces in a pool of many nodes, by a model of the router, with peers and a shared store between them.

    python -m studies.fleet TRACE... --nodes 1,4,16,64,256,1000 --router session-affine,kv-aware --png nodes.png

Each node runs the daemon's own decisions; docs/sizing.md has the models. Exit codes are those of `kvpoolctl`. Main thread only.
"""

from pathlib import Path
from typing import Any

import click

from kvpool.errors import ConfigError, InvalidArgument, KVPoolError
from kvpool_tools.cli.simulation.document import simulate_each
from kvpool_tools.cli.simulation.trace_options import TRACE_OPTIONS, add_options, parse_options, policy_option
from kvpool_tools.sim.pool import POLICIES
from kvpool_tools.sim.traces import TraceError
from studies.fleet.node_options import NODE_OPTIONS, NodeOptions
from studies.fleet.plot import plot_nodes
from studies.fleet.rows import print_node_rows, simulate_nodes


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@add_options((*TRACE_OPTIONS, policy_option(POLICIES[:1]), *NODE_OPTIONS))
@click.option("--json", "is_json", is_flag=True, help="Print one JSON document.")
def fleet(is_json: bool, **given: Any) -> None:
    """Print where the hits of request traces come from, and what nodes exchange, with so many nodes.

    TRACE is a file of JSON lines as Mooncake publishes them (.jsonl, .jsonl.gz) or a numpy archive (.npz).
    """
    try:
        nodes, wanted = NodeOptions.parse(given), parse_options(given)
        if wanted.hbm_capacity is not None:
            raise InvalidArgument(f"--tiers {given['tiers']} has hbm, which has no meaning for many nodes")
        rows = simulate_each(
            given,
            lambda path, progress: simulate_nodes(path, wanted, nodes, progress),
            lambda rows: print_node_rows(rows, wanted.block_bytes, nodes),
            command="fleet",
            is_json=is_json,
        )
        if given["png"] is not None:
            plot_nodes(rows, Path(given["png"]))
    except (TraceError, InvalidArgument, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    except KVPoolError as error:
        raise click.ClickException(str(error)) from error
    if any(row["holes"] for row in rows):
        raise click.ClickException("the index was found broken: see holes")


if __name__ == "__main__":
    fleet(prog_name="fleet")
