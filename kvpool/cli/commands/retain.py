"""Command that sets the retention of stored chunks: retain.

Chunks are named by their keys, or by the token ids of a prompt: then the keys are computed for every layout in which the daemon
has served the model, as engines that hash tokens do. Main thread only.
"""

import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import click

from kvpool.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool.cli.output import EXIT_FAILURE, EXIT_USAGE, fail, print_json, print_line
from kvpool.errors import InvalidArgument
from kvpool.key_column import KEY_DIGITS, KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.types import PRIORITY_MAX, RetainState
from kvpool.units import parse_duration
from kvpool_client.connection.roots import Roots
from kvpool_client.key_chain import KeyChain


@cli.command(
    epilog=epilog(
        "kvpoolctl retain --tokens-file system_prompt.json --model llama-3-8b --priority 100",
        "kvpoolctl retain 5f0e…c1 --priority 80 --duration 10m --json",
    )
)
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--tokens-file", type=click.Path(exists=True, dir_okay=False), metavar="F", help="Token ids of a prompt.")
@click.option("--model", metavar="M", help="The model whose prompt it is (with --tokens-file).")
@click.option("--salt", default="", metavar="TEXT", help="The salt of the prompt (default: none).")
@click.option("--adapter", default="", metavar="NAME", help="The adapter of the prompt (default: none).")
@click.option(
    "--priority",
    type=click.IntRange(0, PRIORITY_MAX),
    default=PRIORITY_MAX,
    metavar="P",
    help="0 (evicted first) to 100 (evicted only if nothing else can be; the default). 35 undoes an earlier order.",
)
@click.option("--duration", metavar="DURATION", help="Counts from the last use, such as 30m (default: no end).")
@common_options
@click.pass_obj
def retain(
    options: Options,
    keys: tuple[str, ...],
    tokens_file: str | None,
    model: str | None,
    salt: str,
    adapter: str,
    priority: int,
    duration: str | None,
) -> None:
    """Set the priority of stored chunks, in every tier that has them. Prints how many are accepted, clipped and absent.

    Each KEY has 64 hexadecimal digits. A tokens file is a JSON list, or numbers with white space between; its chunks are found
    for engines whose keys come from tokens. Clipped chunks stay at the default priority, because dram.retained_share of a tier
    has higher ones already. Exit code 1 when any chunk is clipped, or none is stored.
    """
    if bool(keys) == bool(tokens_file) or (tokens_file and not model):
        fail("name chunks by KEY..., or by --tokens-file F and --model M", EXIT_USAGE)
    duration_s = _seconds(duration)
    with options.connect() as connection:
        if tokens_file:
            layouts = [Layout.from_wire(wire) for wire in ask(lambda: connection.layouts(model or ""))]
            if not layouts:
                fail(f"the daemon has served no model {model}", EXIT_FAILURE)
            domain, tokens = connection.welcome.domain, _tokens(tokens_file)
            columns = _keys_of(tokens, layouts, model=model or "", domain=domain, salt=salt, adapter=adapter)
        else:
            columns = [KeyColumn.of(_key(text) for text in keys)]
        counts: Counter[int] = Counter()
        for column in columns:
            for part in column.parts(m.RETAIN_KEYS_MAX):
                counts.update(ask(partial(connection.retain, part, priority, duration_s)))
    report = {state.name.lower(): counts[state] for state in RetainState}
    if options.is_json:
        print_json({**report, "priority": priority, "duration_s": duration_s})
    else:
        clipped = f", {report['clipped']} clipped to the default" if report["clipped"] else ""
        print_line(
            f"{report['accepted']} chunks are kept at priority {priority}{clipped}; {report['absent']} are not stored"
        )
    sys.exit(EXIT_FAILURE if report["clipped"] or not report["accepted"] else 0)


def _seconds(text: str | None) -> float:
    """Seconds of a duration; 0: no end."""
    try:
        seconds = 0.0 if text is None else parse_duration(text)
    except InvalidArgument as error:
        fail(f"--duration: {error}", EXIT_USAGE)
    if text is not None and seconds <= 0.0:
        fail(f"--duration is {text}, expected more than 0", EXIT_USAGE)
    return seconds


def _key(text: str) -> bytes:
    if not re.fullmatch(f"[0-9a-fA-F]{{{KEY_DIGITS}}}", text):
        fail(f"KEY is {text!r}, expected {KEY_DIGITS} hexadecimal digits", EXIT_USAGE)
    return bytes.fromhex(text)


def _tokens(path: str) -> list[int]:
    text = Path(path).read_text(errors="replace")
    try:
        tokens = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except ValueError as error:
        fail(f"--tokens-file {path} has no token ids: {error}", EXIT_USAGE)
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        fail(f"--tokens-file {path} has no list of token ids", EXIT_USAGE)
    return tokens


def _keys_of(
    tokens: list[int], layouts: list[Layout], *, model: str, domain: bytes, salt: str, adapter: str
) -> list[KeyColumn]:
    """The keys of a prompt's full chunks, for each layout's own rank."""
    columns = []
    for layout in layouts:
        chain = KeyChain(layout.chunk_tokens, partial(Roots(model, layout).of, domain, salt.encode(), adapter))
        try:
            chain.extend(tokens)
        except InvalidArgument as error:
            fail(f"--tokens-file: {error}", EXIT_USAGE)
        columns.append(KeyColumn(chain.columns()[0]))
    return columns
