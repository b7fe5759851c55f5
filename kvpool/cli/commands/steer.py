"""Commands that steer a running daemon: log-level, reload. Main thread only."""

import click

from kvpool.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool.cli.output import print_json
from kvpool.config.config import OPTIONS

LEVELS = sorted(OPTIONS["log.level"].expected.removeprefix("one of ").split(", "))


@cli.command("log-level", epilog=epilog("kvpoolctl log-level", "kvpoolctl log-level debug"))
@click.argument("level", required=False, type=click.Choice(LEVELS))
@common_options
@click.pass_obj
def log_level(options: Options, level: str | None) -> None:
    """Print from which level on the daemon logs, or have it log from another LEVEL on.

    Such a level lasts until the daemon reads its configuration again, or ends.
    """
    with options.connect() as connection:
        report = ask(lambda: connection.log_level(level or ""))
    if options.is_json:
        print_json(report)
    elif level is None:
        click.echo(report["level"])
    else:
        click.echo(f"log level {report['before']} -> {report['level']}")


@cli.command(epilog=epilog("kvpoolctl reload", "kvpoolctl reload --json"))
@common_options
@click.pass_obj
def reload(options: Options) -> None:
    """Have the daemon read its configuration file again and change what can be changed while it serves, as SIGHUP does.

    Prints each change, and the options that have changed but need a restart. The exit code is 1 where the file has a fault:
    then nothing is changed.
    """
    with options.connect() as connection:
        report = ask(connection.reload)
    if options.is_json:
        print_json(report)
        return
    for line in report["changed"]:
        click.echo(line)
    for name in report["needs_restart"]:
        click.echo(f"{name}: needs a restart")
    if not report["changed"] and not report["needs_restart"]:
        click.echo("no option has changed")
