"""Writes the manual pages of both commands into the folder that is named, from what the commands' help says.

    man_pages.py VERSION DAY FOLDER

Every command and option is in them, whole: a help's list of commands cuts its lines. What no help says, files and environment,
is here.
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from kvpool.cli.kvpoold import command as kvpoold
from kvpool_tools.cli.kvpoolctl import cli as kvpoolctl
from kvpool_tools.cli.kvpoolctl import common_options

# Of every command.
COMMON = {"--help", *(word for option in common_options(click.Command("any")).params for word in option.opts)}
WHAT = {"kvpoold": "the KV cache pool daemon of a node", "kvpoolctl": "inspect and steer a running kvpoold"}
SOCKET = {
    "/run/kvpool/kvpool.sock": "The service's, for the group kvpool; that of kvpoold@2 is /run/kvpool2/kvpool.sock.",
    "$XDG_RUNTIME_DIR/kvpool/kvpool.sock, /tmp/kvpool-UID/kvpool.sock": "A user's own.",
}
FILES = {
    "kvpoold": {
        "/etc/kvpool/kvpool.toml": "The service's configuration; that of kvpoold@2 is /etc/kvpool/kvpool2.toml.",
        "/usr/share/doc/kvpool/configs/kvpool.toml": "Every option at its default, explained.",
        **SOCKET,
        "/var/lib/kvpool": "What the service stores; ssd.path may name another directory.",
        "/usr/local/lib/kvpool": "Packages of Python that are added beside those of the daemon.",
    },
    "kvpoolctl": SOCKET,
}
ENVIRONMENT = {
    "kvpoold": {
        "RUNTIME_DIRECTORY": "The directory of the socket where server.socket is not set, as systemd names it to a service."
    },
    "kvpoolctl": {"KVPOOL_SOCKET": "The daemon's socket."},
}
SEE = {
    "kvpoold": ("kvpoolctl(8)", "systemctl(1)", "journalctl(1)"),
    "kvpoolctl": ("kvpoold(8)",),
}
PAGES = "/usr/share/doc/kvpool/docs/operations.md"


def main() -> None:
    """Write both."""
    version, day, folder = sys.argv[1:]
    for name, command in (("kvpoold", kvpoold), ("kvpoolctl", kvpoolctl)):
        lines = [f'.TH {name.upper()} 8 "{day}" "kvpool {version}" "kvpool"', *_page(name, command)]
        Path(folder, f"{name}.8").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _page(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=name, **command.context_settings)
    examples, codes = _epilog(command)
    yield from (".SH NAME", f"{name} \\- {_plain(WHAT[name])}", ".SH SYNOPSIS", _usage(context))
    yield from (".SH DESCRIPTION", *_prose(command), ".SH OPTIONS", *_options(context, set()))
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        yield "Each takes \\-\\-socket, \\-\\-timeout and \\-\\-json too, and shows its help by \\-\\-help."
        for each in command.list_commands(context):
            yield from _section(context, each)
    yield from (".SH ENVIRONMENT", *_terms(ENVIRONMENT[name]), ".SH FILES", *_terms(FILES[name]))
    yield from (".SH EXIT STATUS", *_verbatim(codes), ".SH EXAMPLES", *_verbatim(examples), ".SH SEE ALSO")
    yield from (f".BR {each[:-3]} {each[-3:]}" for each in SEE[name])
    yield from (".PP", _plain(PAGES))


def _section(above: click.Context, name: str) -> Iterator[str]:
    """A command of a group, and those of its own."""
    group = above.command
    assert isinstance(group, click.Group)
    command = group.get_command(above, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=above)
    yield from (f".SS {_plain(context.command_path)}", _usage(context), ".PP", *_prose(command))
    yield from _options(context, COMMON)
    examples, _ = _epilog(command)
    if examples:
        yield from (".PP", *_verbatim(examples))
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            yield from _section(context, each)


def _usage(context: click.Context) -> str:
    return f".B {_plain(context.command_path)}\n{_plain(' '.join(context.command.collect_usage_pieces(context)))}"


def _prose(command: click.Command) -> Iterator[str]:
    for number, paragraph in enumerate(inspect.cleandoc(command.help or "").split("\n\n")):
        yield from ([".PP"] if number else [])
        yield from _verbatim(paragraph[2:]) if paragraph.startswith("\b\n") else [_plain(" ".join(paragraph.split()))]


def _options(context: click.Context, without: set[str]) -> Iterator[str]:
    records = (
        each.get_help_record(context) for each in context.command.get_params(context) if without.isdisjoint(each.opts)
    )
    yield from _terms({term: text for term, text in filter(None, records) if term.startswith("-")})


def _terms(terms: dict[str, str]) -> Iterator[str]:
    for term, text in terms.items():
        yield f".TP\n.B {_plain(term)}\n{_plain(text)}"


def _epilog(command: click.Command) -> tuple[str, str]:
    """Examples and exit codes."""
    examples, _, codes = (command.epilog or "").replace("\b\n", "").partition("Exit codes:\n")
    return examples.removeprefix("Examples:\n").rstrip(), codes.rstrip()


def _verbatim(text: str) -> Iterator[str]:
    yield ".nf"
    yield from (_plain(line) for line in inspect.cleandoc(" \n" + text).splitlines())
    yield ".fi"


def _plain(text: str) -> str:
    """Text that roff takes as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


if __name__ == "__main__":
    main()
