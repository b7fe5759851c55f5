"""Conversations over real English text: documents of this machine, a tokenizer made on the spot, questions about them.

Nothing is downloaded. Documents are Debian's licence texts where they are installed and docstrings of Python's standard
library everywhere. The tokenizer is small but complete: any text is encoded, and decoded back to the same text. Pure but
for reading files; any thread.
"""

import importlib
import inspect
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LICENCES = Path("/usr/share/common-licenses")
PIECES = re.compile(r" ?\w+|\s+| ?[^\w\s]+")
BYTES = 256

SYSTEM = "You are a careful assistant. Answer from the document below and quote the sentence that you rely on.\n\n"
QUESTIONS = (
    "\n\nUser: Summarise the document in two sentences for somebody who has never heard of it.\nAssistant:",
    "\n\nUser: Which of its parts would surprise a reader the most, and what does the text say there?\nAssistant:",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text and what to call it."""

    title: str
    text: str


class WordTokenizer:
    """Token ids 0 to 255 are bytes, the rest are the words and signs that the given texts use most, at most `most` ids."""

    def __init__(self, texts: list[str], most: int) -> None:
        assert most > BYTES
        counts = Counter(piece for text in texts for piece in PIECES.findall(text) if len(piece) > 1)
        by_use = sorted(counts, key=lambda piece: (-counts[piece], piece))
        self._words = by_use[: most - BYTES]
        self._ids = {word: BYTES + number for number, word in enumerate(self._words)}

    @property
    def size(self) -> int:
        """How many ids there are."""
        return BYTES + len(self._words)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        ids: list[int] = []
        for piece in PIECES.findall(text):
            word = self._ids.get(piece)
            ids.extend(piece.encode() if word is None else (word,))
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; bytes that are no text become U+FFFD."""
        parts = (bytes([id_]) if id_ < BYTES else self._words[id_ - BYTES].encode() for id_ in ids)
        return b"".join(parts).decode(errors="replace")


def read_documents(count: int) -> list[Document]:
    """`count` documents, licence texts before docstrings."""
    found = [*_licences(), *_docstrings()]
    assert len(found) >= count, f"{len(found)} documents are on this machine, expected {count}"
    return found[:count]


def cut_prefix(tokenizer: WordTokenizer, document: Document, tokens: int) -> list[int]:
    """The shared prefix of a conversation: system prompt and document, exactly `tokens` tokens."""
    ids = tokenizer.encode(SYSTEM + document.text)
    assert len(ids) >= tokens, f"{document.title} has {len(ids)} tokens, expected at least {tokens}"
    return ids[:tokens]


def _licences() -> list[Document]:
    names = {"GPL-3": "GNU GPL 3 (Debian)", "Apache-2.0": "Apache License 2.0 (Debian)"}
    paths = {title: LICENCES / name for name, title in names.items()}
    return [Document(title, path.read_text(errors="replace")) for title, path in paths.items() if path.is_file()]


def _docstrings() -> list[Document]:
    groups = {
        "Python: threads": ("threading", "queue", "subprocess"),
        "Python: e-mail": ("smtplib", "imaplib", "email.message", "mailbox"),
        "Python: archives": ("tarfile", "zipfile", "shutil", "pathlib"),
    }
    return [Document(title, "\n\n".join(map(_docstrings_of, modules))) for title, modules in groups.items()]


def _docstrings_of(module_name: str) -> str:
    """The docstrings that a module wrote: its own, its classes', its functions' and methods', in the order of the source."""
    module = importlib.import_module(module_name)
    parts = [module.__doc__ or ""]
    for name, member in vars(module).items():
        if getattr(member, "__module__", "") == module_name and (inspect.isclass(member) or inspect.isfunction(member)):
            parts.append(f"{name}: {inspect.cleandoc(member.__doc__ or '')}")
            methods = [method for method in vars(member).values() if inspect.isfunction(method) and method.__doc__]
            parts.extend(f"{method.__qualname__}: {inspect.cleandoc(method.__doc__ or '')}" for method in methods)
    return "\n\n".join(parts)
