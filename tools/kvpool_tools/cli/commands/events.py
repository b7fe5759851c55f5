"""`kvpoolctl events`: chunks that are stored, removed and moved, as text, as JSON, or in TensorRT-LLM's form.

Reads the daemon's log over its socket, as any operator's connection may; needs no ZMQ. Main thread of a command only.
"""

import json
import sys
from contextlib import suppress
from typing import Any

import click

from kvpool.events import Event, EventKind
from kvpool.key_column import SHOWN_DIGITS
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import events as em
from kvpool.router_events.columns import NamespaceNames, unpack_events, unpack_namespaces
from kvpool.router_events.trtllm_format import trtllm_event
from kvpool.states import levels_in
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool_tools.cli.output import EXIT_USAGE, fail, print_json, print_line

WAIT_S = 10.0
ID_MAX = (1 << 63) - 1


@cli.command(
    epilog=epilog(
        "kvpoolctl events --follow", "kvpoolctl events --since 1200 --json", "kvpoolctl events --format trtllm"
    )
)
@click.option(
    "--since", type=click.IntRange(-1, ID_MAX), default=-1, metavar="ID", help="Print only events behind this id."
)
@click.option("--follow", is_flag=True, help="Go on printing as they happen, until interrupted.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N events (default: never).")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "trtllm"]),
    default="text",
    help="trtllm: the objects of TensorRT-LLM's KV cache events (default: text).",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="With --format trtllm: cut chunks into blocks of N tokens (default: 0, whole chunks).",
)
@common_options
@click.pass_obj
def events(options: Options, since: int, follow: bool, count: int | None, form: str, block_tokens: int) -> None:
    """Print the events in the daemon's log, the oldest first.

    --json and --format trtllm print one array, with --follow one object to a line. Where requested events have left the log, a
    line on standard error reports a gap, and the remaining ones follow.
    """
    if block_tokens and form != "trtllm":
        fail("--block-tokens is for --format trtllm: the other form names whole chunks", EXIT_USAGE)
    shown: list[dict[str, Any]] = []
    printed, incarnation, last = 0, b"", since
    by_interrupt = (KeyboardInterrupt,) if follow else ()  # people end it so
    with options.connect() as connection, suppress(*by_interrupt):
        while count is None or printed < count:
            answer = _next(connection, incarnation, last, wait_s=WAIT_S if follow else 0.0)
            incarnation, last = answer.incarnation, answer.last
            if answer.is_gap:
                last = answer.oldest - 1
                sys.stderr.write(
                    f"kvpoolctl: a gap: what happened before event {answer.oldest} is not known any more\n"
                )
                continue
            found = unpack_events(answer.events)
            if not found and not follow:
                break
            names = unpack_namespaces(answer.namespaces)
            for event in found[: None if count is None else count - printed]:
                printed += 1
                if form == "trtllm":
                    shown.append(trtllm_event(event, names, block_tokens))
                elif options.is_json:
                    shown.append(_plain(event, names))
                else:
                    print_line(_line(event, names))
            if follow:
                while shown:
                    click.echo(json.dumps(shown.pop(0)))
                sys.stdout.flush()
    if not follow and (options.is_json or form == "trtllm"):
        print_json(shown)


def _next(connection: BlockingConnection, incarnation: bytes, last: int, *, wait_s: float) -> em.Events:
    """The events after an id."""
    answer: em.Events = ask(lambda: connection.events(incarnation, last, wait_s))
    return answer


def _plain(event: Event, names: NamespaceNames) -> dict[str, Any]:
    return {
        "id": event.id,
        "kind": event.kind.name.lower(),
        "model": names[event.namespace][0] if event.namespace in names else "",
        "rank": names[event.namespace][1].rank if event.namespace in names else None,
        "keys": [key.hex() for key in event.chunks],
        "parent": event.parent.hex(),
        "tiers": [level.name.lower() for level in levels_in(event.tiers)],
        "tiers_before": [level.name.lower() for level in levels_in(event.tiers_before)],
        "priority": event.priority,
        "priority_before": event.priority_before,
        "cause": _cause(event),
        "tokens": len(event.tokens) // 4,
        "adapter": event.adapter,
        "salt_tag": event.salt_tag.hex(),
    }


def _line(event: Event, names: NamespaceNames) -> str:
    model = names[event.namespace][0] if event.namespace in names else "-"
    if event.kind == EventKind.CREATED:
        return f"{event.id:>8}  created   room for {sum(event.capacities)} chunks"
    tiers = "+".join(level.name.lower() for level in levels_in(event.tiers)) or "-"
    before = "+".join(level.name.lower() for level in levels_in(event.tiers_before)) or "-"
    what = f"{event.id:>8}  {event.kind.name.lower():<8}  {len(event.chunks):>5}  {model}  {before} -> {tiers}"
    what += f"  {event.chunks[0].hex()[:SHOWN_DIGITS]}"
    if event.kind == EventKind.STORED and event.parent:
        what += f" behind {event.parent.hex()[:SHOWN_DIGITS]}"
    if event.adapter:
        what += f"  adapter {event.adapter}"
    if event.salt_tag:
        what += f"  salt {event.salt_tag.hex()[:SHOWN_DIGITS]}"
    if event.priority != event.priority_before:
        what += f"  priority {event.priority_before} -> {event.priority}"
    return f"{what}  {_cause(event)}".rstrip()


def _cause(event: Event) -> str:
    """Nothing where the tiers are those before: of another priority."""
    return event.cause.name.lower().replace("_", "-") if event.tiers != event.tiers_before else ""
