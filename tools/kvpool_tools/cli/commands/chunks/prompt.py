"""Prompt on a command line: its token ids, salt and adapter, and the keys that engines which hash tokens give its chunks.

Whatever names chunks by a prompt takes the same options with the same meaning. Main thread of a command only.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import click

from kvpool.key_column import KEY_DIGITS
from kvpool.keys import root_key
from kvpool.layout import Layout
from kvpool_client.key_chain import KeyChain
from kvpool_tools.cli.output import EXIT_USAGE, fail

HEX_PREFIX = "hex:"
TOKEN_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and what separates its keys from those of equal tokens."""

    tokens: list[int]
    salt: bytes
    adapter: str

    @classmethod
    def read(cls, file: IO[str] | None, salt: str, adapter: str) -> "Prompt":
        """The prompt that the options name, without tokens where they name no file; ends the command where they are wrong."""
        return cls([] if file is None else _tokens(file), _salt(salt), adapter)

    def chain(self, domain: bytes, model: str, layout: Layout) -> KeyChain:
        """The keys of its whole chunks in a layout of one rank and group."""
        root = root_key(domain, model=model, adapter=self.adapter, salt=self.salt, layout=layout)
        chain = KeyChain(layout.chunk_tokens, lambda: (root,))
        chain.extend(self.tokens)
        return chain


def prompt_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --tokens-file, --salt and --adapter."""
    file = click.option(
        "--tokens-file",
        type=click.File("r", errors="replace"),
        metavar="FILE",
        help="Token ids of a prompt: a JSON array, or numbers with spaces, commas or line ends between; - for standard input.",
    )
    salt = click.option(
        "--salt",
        default="",
        metavar="SALT",
        help=f"The salt that the engine gives: its text, or its bytes as {HEX_PREFIX}DIGITS (default: none).",
    )
    adapter = click.option(
        "--adapter", default="", metavar="NAME", help="The adapter that the engine names (default: none)."
    )
    return file(salt(adapter(command)))


def parse_key(text: str) -> bytes:
    """A chunk's key; ends the command where it is none."""
    if not re.fullmatch(f"[0-9a-fA-F]{{{KEY_DIGITS}}}", text):
        fail(f"KEY is {text!r}, expected {KEY_DIGITS} hexadecimal digits", EXIT_USAGE)
    return bytes.fromhex(text)


def _salt(text: str) -> bytes:
    if not text.startswith(HEX_PREFIX):
        return text.encode("utf-8", "surrogatepass")
    try:
        return bytes.fromhex(text.removeprefix(HEX_PREFIX))
    except ValueError:
        fail(f"--salt is {text!r}, expected hexadecimal digits behind {HEX_PREFIX}", EXIT_USAGE)


def _tokens(file: IO[str]) -> list[int]:
    text = file.read()
    try:
        tokens = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [int(word) for word in re.split(r"[\s,]+", text.strip())]
        )
    except (ValueError, RecursionError):
        tokens = []
    if not tokens or not all(type(one) is int and 0 <= one <= TOKEN_MAX for one in tokens):
        fail(f"--tokens-file has other content, expected token ids: integers of 0 to {TOKEN_MAX}", EXIT_USAGE)
    return list(tokens)
