"""`kvpoolctl drain`: a node from which what DRAM alone has is to go to disk, as before a planned end. Main thread only."""

import click

from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog, require_durable
from kvpool_tools.cli.output import print_json, print_line

WRITE_TIMEOUT_S = 600.0


@cli.command(epilog=epilog("kvpoolctl drain", "kvpoolctl drain --undo"))
@click.option("--undo", is_flag=True, help="Take new saves again.")
@common_options
@click.pass_obj
def drain(options: Options, undo: bool) -> None:
    """Have the daemon decline new saves, and write the chunks that only DRAM has to the SSD tier, beyond ssd.write_budget too.

    The daemon goes on serving loads, and its health is "draining", until kvpoolctl drain --undo or its end. Saves under way
    end first. The exit code is 1 where some chunks are in DRAM alone afterwards, because there is no SSD tier or it has no room
    or not enough time; new saves are declined nevertheless.
    """
    with options.connect() as connection:
        before = ask(lambda: connection.drain(is_on=not undo))
        if undo:
            _print_undone(options, before=before)
            return
        report = ask(lambda: connection.demote_all(WRITE_TIMEOUT_S, is_forced=True))
        if options.is_json:
            print_json({"drained": True, **report})
        else:
            written = f"{report['chunks']} chunks are written to the SSD tier, {report['left']} are in DRAM alone"
            print_line(f"new saves are declined; {written}")
        require_durable(connection, report)


def _print_undone(options: Options, *, before: bool) -> None:
    if options.is_json:
        print_json({"drained": False, "before": before})
    else:
        print_line("new saves are taken again" if before else "new saves were not declined")
