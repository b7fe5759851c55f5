"""Options of `kvpoolctl bench sparse`, and what they ask for. Main thread of a command."""

from collections.abc import Callable
from typing import Any

import click

from kvpool_tools.bench.lookup_attention.choice import (
    BUDGETS,
    LAYERS,
    QUICK_ROUNDS,
    QUICK_TOKENS,
    RESIDENT,
    ROUNDS,
    TOKENS,
    Choice,
    Sizes,
    parse_configs,
    parse_threads,
    parse_tokens,
)

_positive = click.IntRange(min=1)
_OPTIONS = (
    click.option(
        "--tokens",
        metavar="N",
        help=f"Length of the sequence, such as 131072 (default: {TOKENS}; --quick: {QUICK_TOKENS}).",
    ),
    click.option("--heads", type=_positive, default=32, metavar="N", help="Query heads (default: 32)."),
    click.option("--kv-heads", type=_positive, default=8, metavar="N", help="KV heads (default: 8)."),
    click.option(
        "--head-dim", type=click.IntRange(32, 256), default=128, metavar="N", help="Size of a head (default: 128)."
    ),
    click.option(
        "--layers",
        type=_positive,
        default=LAYERS,
        metavar="N",
        help=f"Layers of data in turn, so that no cache has what comes next: 4 or more (default: {LAYERS}).",
    ),
    click.option("--budgets", default=BUDGETS, metavar="LIST", help=f"Percent of middle blocks (default: {BUDGETS})."),
    click.option(
        "--resident",
        default=RESIDENT,
        metavar="LIST",
        help=f"First tokens and window that are always attended (default: {RESIDENT}).",
    ),
    click.option("--threads", metavar="LIST", help="Native threads (default: 1,2 or as many as there are processors)."),
    click.option("--paths", is_flag=True, help="Measure each instruction set of the processor, too."),
)


def sparse_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sparse_choice(options: dict[str, Any], *, is_quick: bool) -> Choice:
    """What the options ask for. Raises InvalidArgument."""
    tokens = parse_tokens(options["tokens"] or (QUICK_TOKENS if is_quick else TOKENS))
    sizes = Sizes(tokens, **{name: options[name] for name in ("heads", "kv_heads", "head_dim", "layers")})
    return Choice(
        sizes=sizes,
        configs=parse_configs(options["resident"], options["budgets"], tokens),
        threads=parse_threads(options["threads"]),
        rounds=QUICK_ROUNDS if is_quick else ROUNDS,
        paths=options["paths"],
    )
