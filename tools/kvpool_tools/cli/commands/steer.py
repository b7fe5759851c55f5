"""Commands about the configuration of a running daemon: config, log-level, reload. Main thread only."""

import json

import click

from kvpool.config.config import OPTIONS
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool_tools.cli.output import EXIT_USAGE, fail, print_json, print_line

LEVELS = sorted(OPTIONS["log.level"].expected.removeprefix("one of ").split(", "))
MOST_VALUE_WIDTH = 60


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


@cli.command(epilog=epilog("kvpoolctl config", "kvpoolctl config dram", "kvpoolctl config --json"))
@click.argument("section", required=False)
@common_options
@click.pass_obj
def config(options: Options, section: str | None) -> None:
    """Print the configuration in force: the value of each option, or of those of one SECTION, and where it was written.

    That is a line of the configuration file, --set of kvpoold's command line, an operator's order (log-level), or nowhere:
    "default". Values are shown as they were written. An option that was changed in the file but needs a restart has the value
    and the line of its start.
    """
    with options.connect() as connection:
        settings = ask(connection.config)
    sections = list(dict.fromkeys(name.partition(".")[0] for name in settings))
    if section is not None and section not in sections:
        fail(f"{section!r} is no section, expected one of {', '.join(sections)}", EXIT_USAGE)
    chosen = {name: one for name, one in settings.items() if section in (None, name.partition(".")[0])}
    if options.is_json:
        print_json(chosen)
        return
    values = {name: f"{name} = {json.dumps(one['value'], ensure_ascii=False)}" for name, one in chosen.items()}
    width = min(MOST_VALUE_WIDTH, max(map(len, values.values())))
    for name, one in chosen.items():
        print_line(f"{values[name]:<{width}}  # {one['source']}")
