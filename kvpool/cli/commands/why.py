"""`kvpoolctl why`: the history of a chunk, or of a prompt's chunks: where stored, when and why removed, why declined.

A prompt's keys are computed here, for every model and layout that the daemon knows, so that a prompt which is stored under
another name is found too. Main thread of a command only.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import click

from kvpool.cli.kvpoolctl import Options, ask, cli, common_options, epilog
from kvpool.cli.output import EXIT_FAILURE, EXIT_USAGE, fail, print_json, print_line
from kvpool.key_column import KEY_BYTES, KEY_DIGITS
from kvpool.keys import root_key
from kvpool.layout import Layout
from kvpool.layouts.groups import FULL
from kvpool.protocol.blocking import BlockingConnection
from kvpool_client.key_chain import KeyChain

# Reasons for a removal or refusal, in words.
REASONS = {
    "own-class": "evicted for a newer chunk of its own size: it was the eviction policy's first choice",
    "other-class": "evicted: its memory went to chunks of another size",
    "index-full": "evicted: as many chunks were stored as there is room for in the index",
    "flushed": "flushed by order of an operator",
    "dropped": "dropped: its bytes were bad, or those of a chunk before it, or the disk had lost them",
    "discarded": "released by its only user",
    "landing-failed": "dropped: it or a chunk before it could not be read back from the SSD tier",
    "pending": "another engine was just saving it, or it was on its way here from another tier",
    "no-parent": "the chunk before it was not stored",
    "full": "everything that could have made room was in use",
    "not-ready": "memory was not ready, or the chunk it would have replaced had still to be written to disk",
    "share": "its engine already held dram.connection_share of what the others left",
    "too-long": "its prompt has more chunks than server.max_chain_chunks, or a request can name",
    "foreign": "its key belongs to another model or layout: a namespace mismatch",
}


@cli.command(epilog=epilog("kvpoolctl why 3f2a…", "kvpoolctl why --tokens-file prompt.json --model llama-3-8b"))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option(
    "--tokens-file", type=click.File("r"), metavar="FILE", help="Token ids of a prompt; - for standard input."
)
@click.option("--model", metavar="M", help="The model asked for (default: every model).")
@click.option("--salt", default="", metavar="HEX", help="The salt that the engine gives, in hex (default: none).")
@click.option("--adapter", default="", metavar="NAME", help="The adapter that the engine names (default: none).")
@common_options
@click.pass_obj
def why(options: Options, keys: tuple[str, ...], tokens_file: Any, model: str | None, salt: str, adapter: str) -> None:
    """Print where chunks are stored, or why they are not.

    KEY is a chunk's key in hex, 64 digits. With --tokens-file the keys are computed from token ids (a JSON array, or numbers
    with anything between them) as an engine with this model, salt and adapter does. The daemon has the history of the latest
    events.fates removed chunks; others are unknown: never stored, or removed long ago. Saves that clients decline by themselves
    (too late, away) are not reported by key.
    """
    if bool(keys) == (tokens_file is not None):
        fail("name one or more KEYs, or --tokens-file FILE", EXIT_USAGE)
    wanted = [_key(text) for text in keys]
    prompt = _Prompt([] if keys else _tokens(tokens_file.read()), _salt(salt), adapter)
    with options.connect() as connection:
        rows = ask(lambda: _of_keys(connection, wanted, model) if keys else _of_prompt(connection, prompt, model))
    if options.is_json:
        print_json(rows)
    else:
        for row in rows:
            print_line(_line(row))
    if not rows:
        fail("the prompt has no whole chunk in any layout of that model that the daemon knows", EXIT_FAILURE)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt's token ids, and what separates its keys from those of equal tokens."""

    tokens: list[int]
    salt: bytes
    adapter: str


def _of_keys(connection: BlockingConnection, keys: list[bytes], model: str | None) -> list[dict[str, Any]]:
    rows = connection.chunk_history(keys)
    for row in rows:
        if model is not None and row.get("model", model) != model:
            row["mismatch"] = model
    return rows


def _of_prompt(connection: BlockingConnection, prompt: _Prompt, model: str | None) -> list[dict[str, Any]]:
    names = connection.namespaces().values()
    asked = [(name, layout) for name, layout in names if model in (None, name)]
    rows = [row for name, layout in asked for row in _rows(connection, prompt, name, layout)]
    if model is None or any(row["fate"] == "stored" for row in rows):
        return rows
    for name, layout in names:
        if name != model:
            stored = [row for row in _rows(connection, prompt, name, layout) if row["fate"] == "stored"]
            rows += [{**row, "mismatch": model} for row in stored]
    return rows


def _rows(connection: BlockingConnection, prompt: _Prompt, model: str, layout: Layout) -> list[dict[str, Any]]:
    """A row for each whole chunk of the prompt in one namespace."""
    root = root_key(connection.welcome.domain, model=model, adapter=prompt.adapter, salt=prompt.salt, layout=layout)
    chain = KeyChain(layout.chunk_tokens, lambda: (root,))
    chain.extend(prompt.tokens)
    history = connection.chunk_history([chain[number] for number in range(len(chain))])
    place: dict[str, Any] = {"rank": layout.rank, "chunk_tokens": layout.chunk_tokens}
    if layout.group is not None:
        place["group"] = str(layout.group)
    return [{"chunk": number, **place, **entry, "model": model} for number, entry in enumerate(history)]


def _line(row: dict[str, Any]) -> str:
    first = f"chunk {row['chunk']} of {row['chunk_tokens']} tokens, " if "chunk" in row else ""
    if "group" in row:
        first = f"{row['group']}, {first}"
    where = f"{first}{row['key'][:16]}"
    if row.get("model"):
        where += f" ({row['model']}" + (f", rank {row['rank']})" if row.get("rank") else ")")
    if "mismatch" in row:
        where += f" is no chunk of {row['mismatch']}: namespace mismatch"
    return f"{where}: {_history_line(row)}"


def _history_line(row: dict[str, Any]) -> str:
    if row["fate"] == "stored":
        return f"stored in {' and '.join(row['tiers'])}, priority {row['priority']}"
    if row["fate"] == "unknown" and row.get("group", FULL) != FULL:
        return "not stored, or removed too long ago to be known: windows and states are stored at boundaries only"
    if row["fate"] == "unknown":
        return "never stored, or removed too long ago to be known"
    reason = REASONS.get(row["reason"], row["reason"])
    if row["fate"] == "declined":
        return f"not taken {row['age_s']:g} s ago: {reason}"
    return f"left {row['tier']} {row['age_s']:g} s ago at priority {row['priority']}: {reason}"


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        fail(f"{text!r} is no key, expected {KEY_DIGITS} hex digits", EXIT_USAGE)
    return key


def _salt(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        fail(f"--salt {text!r} is no hex", EXIT_USAGE)


def _tokens(text: str) -> list[int]:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):
        loaded = [int(word) for word in re.findall(r"[0-9]+", text)]
    if not isinstance(loaded, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in loaded):
        fail("--tokens-file: expected token ids", EXIT_USAGE)
    return loaded
