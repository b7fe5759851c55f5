"""`kvpoolctl why`: the history of a chunk, or of a prompt's chunks: where stored, when and why removed, why declined.

A prompt's keys are computed here, for every model and layout that the daemon knows, so that a prompt which is stored under
another name is found too. Engines that hash tokens themselves (vLLM) have keys that cannot be computed: chunks of theirs are
found by the token ids stored with them. Main thread of a command only.
"""

import struct
from collections.abc import Iterator
from typing import IO, Any

import click

from kvpool.events import StoredChunk
from kvpool.ids import TOKEN_BYTES
from kvpool.key_column import SHOWN_DIGITS
from kvpool.keys import salt_tag
from kvpool.layout import Layout
from kvpool.layouts.groups import FULL
from kvpool.protocol.blocking import BlockingConnection
from kvpool.router_events.columns import NamespaceNames, unpack_chunks
from kvpool_tools.cli.commands.chunks.prompt import Prompt, parse_key, prompt_options
from kvpool_tools.cli.kvpoolctl import Options, ask, cli, common_options, epilog, require_model
from kvpool_tools.cli.output import EXIT_FAILURE, EXIT_USAGE, fail, print_json, print_line

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
    "quota": "its engine already held dram.connection_quota of what the others left",
    "too-long": "its prompt has more chunks than server.max_chain_chunks, or a request can name",
    "foreign": "its key belongs to another model or layout: a namespace mismatch",
}


@cli.command(epilog=epilog("kvpoolctl why 3f2a…", "kvpoolctl why --tokens-file prompt.json --model llama-3-8b@5f0b02c"))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@prompt_options
@click.option("--model", metavar="M", help="The model asked for (default: every model).")
@common_options
@click.pass_obj
def why(
    options: Options, keys: tuple[str, ...], tokens_file: IO[str] | None, model: str | None, salt: str, adapter: str
) -> None:
    """Print where chunks are stored, or why they are not.

    KEY is a chunk's key in hex, 64 digits. With --tokens-file the keys are computed from token ids as an engine with this
    model, salt and adapter does. Keys of engines that hash tokens themselves, such as vLLM, cannot be computed: where no
    computed key is stored, all stored chunks are read, and those that have the prompt's token ids are shown. Gone chunks of
    such engines, their windows and states, and chunks without token ids (SGLang) are found by KEY alone.

    The daemon has the history of the latest events.history_chunks removed chunks; others are unknown: never stored, or removed
    long ago.
    Saves that clients decline by themselves (too late, away) are not reported by key.
    """
    if bool(keys) == (tokens_file is not None):
        fail("name one or more KEYs or --tokens-file FILE, and not both", EXIT_USAGE)
    wanted = [parse_key(text) for text in keys]
    prompt = Prompt.read(tokens_file, salt, adapter)
    with options.connect() as connection:
        rows = ask(lambda: _of_keys(connection, wanted, model) if keys else _of_prompt(connection, prompt, model))
        if not rows and model is not None:
            require_model(connection, model)
    if options.is_json:
        print_json(rows)
    else:
        for row in rows:
            print_line(_line(row))
    if not rows:
        fail("the prompt has no whole chunk in any layout of that model that the daemon knows", EXIT_FAILURE)


def _of_keys(connection: BlockingConnection, keys: list[bytes], model: str | None) -> list[dict[str, Any]]:
    rows = connection.chunk_history(keys)
    for row in rows:
        if model is not None and row.get("model", model) != model:
            row["mismatch"] = model
    return rows


def _of_prompt(connection: BlockingConnection, prompt: Prompt, model: str | None) -> list[dict[str, Any]]:
    names = connection.namespaces()
    computed = {number: _rows(connection, prompt, *named) for number, named in names.items()}
    if not any(row["state"] == "stored" for rows in computed.values() for row in rows):
        computed |= _rows_by_tokens(connection, prompt, names, computed)
    asked = [row for number, (name, _) in names.items() if model in (None, name) for row in computed[number]]
    if model is None or any(row["state"] == "stored" for row in asked):
        return asked
    elsewhere = [row for number, (name, _) in names.items() if name != model for row in computed[number]]
    return [*asked, *({**row, "mismatch": model} for row in elsewhere if row["state"] == "stored")]


def _rows(connection: BlockingConnection, prompt: Prompt, model: str, layout: Layout) -> list[dict[str, Any]]:
    """A row for each whole chunk of the prompt in one namespace, by computed keys."""
    chain = prompt.chain(connection.welcome.domain, model, layout)
    return _history(connection, model, layout, [chain[number] for number in range(len(chain))])


def _history(connection: BlockingConnection, model: str, layout: Layout, keys: list[bytes]) -> list[dict[str, Any]]:
    place: dict[str, Any] = {"rank": layout.rank, "chunk_tokens": layout.chunk_tokens}
    if layout.group is not None:
        place["group"] = str(layout.group)
    history = connection.chunk_history(keys)
    return [{"chunk": number, **place, **entry, "model": model} for number, entry in enumerate(history)]


def _rows_by_tokens(
    connection: BlockingConnection, prompt: Prompt, names: NamespaceNames, computed: dict[int, list[dict[str, Any]]]
) -> dict[int, list[dict[str, Any]]]:
    """The rows of namespaces where stored chunks have the prompt's token ids. In other groups of the same models, whose chunks
    do not follow one another, nothing is known: they have no rows."""
    found = _found_by_tokens(connection, prompt, names)
    hashed = {names[number][0] for number in found}
    rows: dict[int, list[dict[str, Any]]] = {}
    for number, (model, layout) in names.items():
        keys = found.get(number, [])
        if keys:
            unknown = [{**row, "key": ""} for row in computed[number][len(keys) :]]
            rows[number] = [*_history(connection, model, layout, keys), *unknown]
        elif model in hashed and layout.group is not None and not layout.group.is_full:
            rows[number] = []
    return rows


def _found_by_tokens(connection: BlockingConnection, prompt: Prompt, names: NamespaceNames) -> dict[int, list[bytes]]:
    """The keys of the prompt's leading stored chunks, by namespace: each follows the one before it, and has its token ids. Of
    several such chains, as images behind equal token ids make them, one of the longest."""
    tokens = struct.pack(f"<{len(prompt.tokens)}i", *prompt.tokens)
    scope = (prompt.adapter, salt_tag(prompt.salt))
    following: dict[tuple[int, bytes, bytes], list[bytes]] = {}
    for chunk in _stored(connection):
        if chunk.tokens and (chunk.adapter, chunk.salt_tag) == scope and chunk.tokens in tokens:
            following.setdefault((chunk.namespace, chunk.parent, chunk.tokens), []).append(chunk.key)
    found: dict[int, list[bytes]] = {}
    for number, (_, layout) in names.items():
        size = layout.chunk_tokens * TOKEN_BYTES
        chains: list[list[bytes]] = [[]]
        for begin in range(0, len(tokens) - size + 1, size):
            wanted = tokens[begin : begin + size]
            longer = [
                [*chain, key]
                for chain in chains
                for key in following.get((number, chain[-1] if chain else b"", wanted), [])
            ]
            if not longer:
                break
            chains = longer
        if chains[0]:
            found[number] = chains[0]
    return found


def _stored(connection: BlockingConnection) -> Iterator[StoredChunk]:
    """All stored chunks, page by page."""
    cursor = 0
    while cursor >= 0:
        page = connection.snapshot(cursor)
        yield from unpack_chunks(page.chunks)
        cursor = page.cursor


def _line(row: dict[str, Any]) -> str:
    first = f"chunk {row['chunk']} of {row['chunk_tokens']} tokens, " if "chunk" in row else ""
    if "group" in row:
        first = f"{row['group']}, {first}"
    where = f"{first}{row['key'][:SHOWN_DIGITS] or 'unknown key'}"
    if row.get("model"):
        where += f" ({row['model']}" + (f", rank {row['rank']})" if row.get("rank") else ")")
    if "mismatch" in row:
        where += f" is no chunk of {row['mismatch']}: namespace mismatch"
    return f"{where}: {_history_line(row)}"


def _history_line(row: dict[str, Any]) -> str:
    if row["state"] == "stored":
        return f"stored in {' and '.join(row['tiers'])}, priority {row['priority']}"
    if not row["key"]:
        return "not stored: what has become of it is known by its KEY alone, which its engine computes"
    if row["state"] == "unknown" and row.get("group", FULL) != FULL:
        return "not stored, or removed too long ago to be known: windows and states are stored at boundaries only"
    if row["state"] == "unknown":
        return "never stored, or removed too long ago to be known"
    reason = REASONS.get(row["reason"], row["reason"])
    if row["state"] == "declined":
        return f"not taken {row['age_s']:g} s ago: {reason}"
    return f"left {row['tier']} {row['age_s']:g} s ago at priority {row['priority']}: {reason}"
