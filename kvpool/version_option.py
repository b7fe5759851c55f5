"""`--version` of both commands: the version that was built, and the OpenSSL that the machine has for it."""

from collections.abc import Callable
from typing import Any

import click

from kvpool._version import VERSION


def version_option(name: str) -> Callable[[Any], Any]:
    """The decorator that gives it to a command of that name."""

    def show(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked:
            import kvpool_native  # loads the core, which no other option has use for

            click.echo(f"{name} {VERSION} ({kvpool_native.tls_library() or 'no OpenSSL 3'})")
            context.exit()

    return click.option(
        "--version", is_flag=True, expose_value=False, is_eager=True, callback=show, help="Show the version and exit."
    )
