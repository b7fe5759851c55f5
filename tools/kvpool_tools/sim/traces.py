"""Request traces: prompts with their times, and the prefix blocks they consist of.

Two forms are read. JSON lines as Mooncake publishes them (`.jsonl`, or `.jsonl.gz`): one object a line with `timestamp`
in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, the chained ids of the prompt's 512-token
blocks, the last of which may be a partial one. And numpy archives (`.npz`) with arrays `t` (seconds), `n_in`, `n_out`,
`leaf` for each request and `parent` for each block: a prompt is the path from its leaf to the root. Either may name each
request's conversation: `session_id`, an integer, in a line, and the array `sess`.

A reader yields requests one at a time and holds only one line of a JSON trace. It is independent of caches, capacities and
keys. Invariant: a request that is yielded is valid (its ids are distinct and cover exactly the prompt's full blocks); anything
else is refused with the file, the line or entry, the field and what was expected. One thread.
"""

import gzip
import json
import reprlib
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError

BLOCK_TOKENS = 512
TOKENS_MAX = 1 << 31
HASH_ID_MAX = (1 << 63) - 1
LINE_BYTES_MAX = 64 << 20
ARRAYS_BYTES_MAX = 4 << 30
JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
SUFFIXES = (*JSON_SUFFIXES, ".npz")
# What numpy and zipfile raise for a damaged archive; a wrong shape can exhaust memory.
ARCHIVE_FAULTS = (
    *(ValueError, EOFError, KeyError, NotImplementedError, MemoryError, OverflowError),
    *(zipfile.BadZipFile, zlib.error),
)

Ints = npt.NDArray[np.int64]


class TraceError(KVPoolError):
    """A trace file was refused: names the file, the position, the field and what was expected."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `hash_ids`: the ids of its full blocks, the root first; each stands for the whole prefix up to it.

    `tail_id`: the id of the partial block behind them, `session`: the conversation, where the trace names them.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    tail_id: int | None = None
    session: int | None = None


class Trace:
    """A trace file, read again by each call of `requests`. `name` is the file's name without its suffix."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, path: Path) -> None:
        """Raises TraceError if the name has no known suffix."""
        suffix = next((ending for ending in SUFFIXES if path.name.endswith(ending)), None)
        if suffix is None:
            raise TraceError(f"{path}: name of no known form, expected one that ends with {', '.join(SUFFIXES)}")
        self.path = path
        self.name = path.name.removesuffix(suffix)
        self._suffix = suffix

    def __repr__(self) -> str:
        return f"<Trace {self.path}>"

    def requests(self) -> Iterator[TraceRequest]:
        """The requests in the file's order. Raises TraceError where the file is invalid or empty."""
        read = _read_archive if self._suffix == ".npz" else _read_json_lines
        count = 0
        for count, request in enumerate(read(self.path), 1):  # noqa: B007 - the count is used below
            yield request
        if not count:
            raise TraceError(f"{self.path}: no request, expected at least one")


def find_traces(folder: Path) -> list[Trace]:
    """The traces in a folder, by name. Raises TraceError if it cannot be listed or holds none."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES) and path.is_file())
    except OSError as error:
        raise TraceError(f"{folder}: {error.strerror}, expected a folder with traces") from error
    if not paths:
        raise TraceError(f"{folder}: no trace, expected files that end with {', '.join(SUFFIXES)}")
    return [Trace(path) for path in paths]


def _read_json_lines(path: Path) -> Iterator[TraceRequest]:
    for number, line in enumerate(_lines(path), 1):
        place = f"{path}: line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{place}: no JSON ({error}), expected one object a line") from error
        if not isinstance(fields, dict):
            _refuse(place, "the line", fields, "a JSON object")
        yield _request_of(fields, place)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain or gzipped file, read as they are asked for."""
    number = 1
    try:
        with open(path, "rb") as plain, _unzipped(path, plain) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(f"{path}: line {number}: longer than {LINE_BYTES_MAX} bytes, expected a request")
                yield line
                number += 1
    except gzip.BadGzipFile as error:
        raise TraceError(f"{path}: line {number}: no gzip ({error}), expected a whole gzip file") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: line {number}: cut off or damaged ({error}), expected a whole gzip file") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}, expected a readable file") from error


def _unzipped(path: Path, plain: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=plain)) if path.name.endswith(".gz") else plain


def _request_of(fields: dict[str, Any], place: str) -> TraceRequest:
    at_ms = _field(fields, "timestamp", place)
    is_number = isinstance(at_ms, (int, float)) and not isinstance(at_ms, bool)
    # A comparison, because an integer may be too large to become a float.
    if not is_number or not 0 <= at_ms <= 1e15:
        _refuse(place, "timestamp", at_ms, "milliseconds from 0 on")
    input_tokens = _count(fields, "input_length", place, least=1)
    output_tokens = _count(fields, "output_length", place, least=0)
    ids = _field(fields, "hash_ids", place)
    if not isinstance(ids, list):
        _refuse(place, "hash_ids", ids, "a list of integers")
    for value in ids:
        if type(value) is not int or not 0 <= value <= HASH_ID_MAX:
            _refuse(place, "hash_ids", value, f"integers 0..{HASH_ID_MAX}")
    full = input_tokens // BLOCK_TOKENS
    most = -(-input_tokens // BLOCK_TOKENS)
    if len(ids) not in (full, most):
        expected = f"{full} or {most} ids for {input_tokens} tokens in blocks of {BLOCK_TOKENS}"
        raise TraceError(f"{place}: hash_ids has {len(ids)} ids, expected {expected}")
    if len(set(ids)) != len(ids):
        _refuse(place, "hash_ids", ids, "distinct ids: each stands for the whole prefix up to it")
    session = fields.get("session_id")
    if session is not None and (type(session) is not int or not 0 <= session <= HASH_ID_MAX):
        _refuse(place, "session_id", session, f"an integer 0..{HASH_ID_MAX}, or none")
    tail_id = ids[full] if len(ids) > full else None
    return TraceRequest(at_ms / 1e3, input_tokens, output_tokens, tuple(ids[:full]), tail_id, session)


def _field(fields: dict[str, Any], name: str, place: str) -> Any:
    if name not in fields:
        raise TraceError(f"{place}: {name} is missing, expected timestamp, input_length, output_length and hash_ids")
    return fields[name]


def _count(fields: dict[str, Any], name: str, place: str, *, least: int) -> int:
    value = _field(fields, name, place)
    if type(value) is not int or not least <= value <= TOKENS_MAX:
        _refuse(place, name, value, f"an integer {least}..{TOKENS_MAX}")
    return int(value)


def _refuse(place: str, name: str, value: object, expected: str) -> NoReturn:
    raise TraceError(f"{place}: {name} is {reprlib.repr(value)}, expected {expected}")


def _read_archive(path: Path) -> Iterator[TraceRequest]:
    arrays = _load_arrays(path)
    requests = len(arrays["t"])
    for name in ("n_in", "n_out", "leaf", "sess"):
        if name in arrays and len(arrays[name]) != requests:
            raise TraceError(f"{path}: {name} has {len(arrays[name])} entries, expected {requests}, as many as t has")
    _check_range(path, "t", arrays["t"], low=0, high=1e12)
    _check_range(path, "n_in", arrays["n_in"], low=1, high=TOKENS_MAX)
    _check_range(path, "n_out", arrays["n_out"], low=0, high=TOKENS_MAX)
    blocks = len(arrays["parent"])
    _check_range(path, "parent", arrays["parent"], low=-1, high=blocks - 1)
    _check_range(path, "leaf", arrays["leaf"], low=-1, high=blocks - 1)
    if "sess" in arrays:
        _check_range(path, "sess", arrays["sess"], low=0, high=HASH_ID_MAX)
    if "block" in arrays and arrays["block"].tolist() != [BLOCK_TOKENS]:
        _refuse(str(path), "block", arrays["block"].tolist(), f"[{BLOCK_TOKENS}], the tokens of a block")
    # Parents come before their children, so that a path to the root ends.
    late = np.flatnonzero(arrays["parent"] >= np.arange(blocks))
    if len(late):
        entry = int(late[0])
        _refuse(f"{path}: entry {entry}", "parent", int(arrays["parent"][entry]), f"-1..{entry - 1}, an earlier block")
    yield from _requests_of(path, arrays)


def _requests_of(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> Iterator[TraceRequest]:
    parents: list[int] = arrays["parent"].tolist()
    columns = (arrays[name].tolist() for name in ("t", "n_in", "n_out", "leaf"))
    sessions: list[int | None] = arrays["sess"].tolist() if "sess" in arrays else [None] * len(arrays["t"])
    for number, (at_s, input_tokens, output_tokens, leaf) in enumerate(zip(*columns, strict=True)):
        full = input_tokens // BLOCK_TOKENS
        ids: list[int] = []
        block = leaf
        while block >= 0 and len(ids) <= full:
            ids.append(block)
            block = parents[block]
        if len(ids) != full:
            found = f"more than {full}" if len(ids) > full else str(len(ids))
            expected = f"{full} for {input_tokens} tokens in blocks of {BLOCK_TOKENS}"
            raise TraceError(f"{path}: entry {number}: leaf {leaf} is {found} blocks deep, expected {expected}")
        yield TraceRequest(float(at_s), input_tokens, output_tokens, tuple(reversed(ids)), session=sessions[number])


def _load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of the archive. Objects are refused by numpy, which reads only plain numbers by default."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > ARRAYS_BYTES_MAX:
            raise TraceError(f"{path}: {size} bytes of arrays, expected at most {ARRAYS_BYTES_MAX}")
        with np.load(path) as archive:
            for name in ("t", "n_in", "n_out", "leaf", "parent", "block", "sess"):
                if name in archive.files:
                    arrays[name] = archive[name]
    except ARCHIVE_FAULTS as error:
        raise TraceError(f"{path}: cut off or damaged ({error}), expected a numpy archive") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}, expected a readable file") from error
    for name in ("t", "n_in", "n_out", "leaf", "parent"):
        if name not in arrays:
            raise TraceError(f"{path}: array {name} is missing, expected t, n_in, n_out, leaf and parent")
    for name, array in arrays.items():
        kinds = "iuf" if name == "t" else "iu"
        if array.ndim != 1 or array.dtype.kind not in kinds:
            what = "numbers" if name == "t" else "integers"
            raise TraceError(f"{path}: {name} is {array.dtype} {array.shape}, expected one dimension of {what}")
    return arrays


def _check_range(path: Path, name: str, array: npt.NDArray[Any], *, low: float, high: float) -> None:
    # `not inside` rather than `outside`, so that not-a-number is refused too.
    wrong = np.flatnonzero(~((array >= low) & (array <= high)))
    if len(wrong):
        entry = int(wrong[0])
        _refuse(f"{path}: entry {entry}", name, array[entry].item(), f"{low:g}..{high:g}")
