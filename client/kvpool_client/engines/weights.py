"""Identity of an engine's weights: digests of files that distinguish one model from another, and a fine-tuned one from its
origin.

Of a directory (or one file) with weights: sizes, headers and a sample of every tensor, so that two random models of one shape
differ, and a model and its successor in the same place. Of a model of the Hub: the commit that lies in the local cache. What is
not here: which other settings of an engine change its KV; each adapter knows its own.

Reads files once, at an engine's start. Any thread.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import kvpool_native
from kvpool.errors import LayoutMismatch

DIGEST_HEX = 32
SAMPLE_BYTES = 4096
SAMPLES_MAX = 4096
HEADER_BYTES_MAX = 100 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIGURATION = "config.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def weights_of(name: str, revision: str, environment: Mapping[str, str]) -> str:
    """The identity of the weights `name`, a directory, a file or a model of the Hub: a digest, or a commit.

    A directory's configuration, which changes KV as weights do, is in the digest. Raises LayoutMismatch where nothing does.
    """
    path = Path(name)
    if path.exists():
        digest = directory_digest(path)
        if not digest:
            raise LayoutMismatch(f"no weights in {name!r} distinguish one version of the model from another")
        configuration = path / CONFIGURATION
        words = configuration.read_bytes() if configuration.is_file() else b""
        return digest_of({"weights": digest, "configuration": _hex(words)})
    commit = cached_commit(name, revision, environment)
    if not commit:
        raise LayoutMismatch(
            f"nothing identifies the version of {name!r} that is served, expected a commit or a directory"
        )
    return commit


def directory_digest(path: Path) -> str:
    """A digest of the weights in a directory (or of one file); empty where there are none."""
    files = sorted(entry for entry in _files_of(path) if entry.suffix in WEIGHT_SUFFIXES)
    if not files:
        return ""
    return digest_of({entry.name: "".join(_file_facts(entry)) for entry in files})


def cached_commit(name: str, revision: str, environment: Mapping[str, str]) -> str:
    """The commit of a model of the Hub: `revision` where it is one, else what the local cache has for it; else empty."""
    if _COMMIT.fullmatch(revision):
        return revision
    home = environment.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = environment.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    reference = Path(cache) / f"models--{name.replace('/', '--')}" / "refs" / (revision or "main")
    try:
        commit = reference.read_text().strip()
    except (OSError, ValueError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""


def digest_of(facts: Mapping[str, object]) -> str:
    """A short digest of named facts, in any order."""
    return _hex(json.dumps(facts, sort_keys=True, default=str).encode())[:DIGEST_HEX]


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (entry for entry in path.iterdir() if entry.is_file())


def _file_facts(path: Path) -> Iterator[str]:
    """Size and samples: of a safetensors file its header and the middle of each tensor, of others evenly and by date."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        yield f"{size} "
        header = _header_of(file, size) if path.suffix == ".safetensors" else b""
        middles = _tensor_middles(header)
        if middles:
            yield _hex(header)
        else:
            yield f"{status.st_mtime_ns} "
            middles = list(range(0, size, max(SAMPLE_BYTES, size // SAMPLES_MAX)))
        for offset in middles:
            file.seek(offset)
            yield _hex(file.read(SAMPLE_BYTES))


def _header_of(file: BinaryIO, size: int) -> bytes:
    """The header of a safetensors file, empty where it has none."""
    header_bytes = int.from_bytes(file.read(8), "little")
    return file.read(header_bytes) if 0 < header_bytes <= min(HEADER_BYTES_MAX, size) else b""


def _tensor_middles(header: bytes) -> list[int]:
    """Where to sample each tensor that the header names; empty where it is no header."""
    try:
        named = json.loads(header)
        spans = [entry["data_offsets"] for key, entry in sorted(named.items()) if key != "__metadata__"]
        begins = 8 + len(header)
        return [begins + max(first, (first + last - SAMPLE_BYTES) // 2) for first, last in spans]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _hex(data: bytes) -> str:
    return kvpool_native.blake3(data).hex()
