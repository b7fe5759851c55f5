"""`kvpoolctl keygen`: a CURVE key pair in a new file. Asks no daemon. Main thread of a command only."""

import importlib.util

import click

from kvpool_tools.cli.kvpoolctl import Options, cli, common_options, epilog
from kvpool_tools.cli.output import EXIT_FAILURE, fail, print_json


@cli.command(epilog=epilog("kvpoolctl keygen /etc/kvpool/node.key", "kvpoolctl keygen node.key --json"))
@click.argument("path", type=click.Path(dir_okay=False), metavar="FILE")
@common_options
@click.pass_obj
def keygen(options: Options, path: str) -> None:
    """Make a CURVE key pair, write it to the new FILE (rights 0600), and print the public key.

    FILE holds the secret key: it stays on this node, and belongs to the daemon's user. The public key goes to the others' lists
    of keys that may connect, one to a line. An existing FILE is never overwritten.
    """
    if importlib.util.find_spec("zmq") is None:
        fail("keygen needs pyzmq: pip install 'kvpool[daemon]'", EXIT_FAILURE)
    from kvpool.config.curve_keys import make_key_pair, write_key_file  # loads ZMQ, which other commands do without

    pair = make_key_pair()
    try:
        write_key_file(path, pair)
    except FileExistsError:
        fail(
            f"{path} exists and is not overwritten: name another file, or remove it if no node uses its keys",
            EXIT_FAILURE,
        )
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}", EXIT_FAILURE)
    if options.is_json:
        print_json({"file": path, "public_key": pair.public.decode()})
    else:
        click.echo(pair.public.decode())
