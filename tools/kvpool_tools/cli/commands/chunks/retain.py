"""Command that sets the retention of stored chunks: retain.

Chunks are named by their keys, or by the token ids of a prompt: then the keys are computed for every layout in which the daemon
has served the model, as engines that hash tokens do. Main thread only.
"""

import sys
from collections import Counter
from functools import partial
from typing import IO

import click

from kvpool.errors import InvalidArgument
from kvpool.key_column import KeyColumn
from kvpool.protocol.records import messages as m
from kvpool.states import PRIORITY_MAX, RetainState
from kvpool.units import parse_duration
from kvpool_tools.cli.commands.chunks.prompt import Prompt, parse_key, prompt_options
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog, require_model
from kvpool_tools.cli.output import EXIT_FAILURE, EXIT_USAGE, fail, print_json, print_line


@cli.command(
    epilog=epilog(
        "kvpoolctl retain --tokens-file system_prompt.json --model llama-3-8b --priority 100",
        "kvpoolctl retain 5f0e…c1 --priority 80 --duration 10m --json",
    )
)
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@prompt_options
@click.option("--model", metavar="M", help="The model whose prompt it is (with --tokens-file).")
@click.option(
    "--priority",
    type=click.IntRange(0, PRIORITY_MAX),
    default=PRIORITY_MAX,
    metavar="P",
    help="The priority, from 0 (evicted first) to 100 (evicted only if nothing else can be; the default); 35 undoes an "
    "earlier order.",
)
@click.option(
    "--duration",
    metavar="DURATION",
    help="Keep the priority for this long after the last use, such as 30m (default: no end).",
)
@common_options
@click.pass_obj
def retain(
    options: Options,
    keys: tuple[str, ...],
    tokens_file: IO[str] | None,
    model: str | None,
    salt: str,
    adapter: str,
    priority: int,
    duration: str | None,
) -> None:
    """Set the priority of stored chunks, in every tier that has them. Prints how many are accepted, clipped and absent.

    Each KEY has 64 hexadecimal digits. The chunks of a tokens file are found for engines whose keys come from tokens; kvpoolctl
    why finds those of other engines, and prints their keys. Clipped chunks stay at the default priority, because
    dram.retained_quota of a tier has higher ones already. The exit code is 1 when any chunk is clipped, or none is stored.
    """
    if bool(keys) == bool(tokens_file) or (tokens_file and not model):
        fail("name chunks by KEY..., or by --tokens-file F and --model M", EXIT_USAGE)
    duration_s = _seconds(duration)
    wanted, prompt = [parse_key(text) for text in keys], Prompt.read(tokens_file, salt, adapter)
    with options.connect() as connection:
        columns = [KeyColumn.of(wanted)]
        if tokens_file:
            require_model(connection, model or "")
            layouts = [layout for name, layout in ask(connection.namespaces).values() if name == model]
            domain = connection.welcome.domain
            columns = [KeyColumn(prompt.chain(domain, model or "", layout).columns()[0]) for layout in layouts]
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
