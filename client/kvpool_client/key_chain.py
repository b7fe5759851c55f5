"""Chunk keys of a prompt, with the hash state that lets `extend` hash only new tokens.

Two levels: a leaf for each chunk's tokens, hashed many at a time, and the chain of keys over the leaves, which begins at
the namespace's root. Leaves do not depend on the root, so a chain that was made before the daemon's trust domain was
known is rooted again without hashing tokens. Only full chunks are keyed; the tail waits for `extend`.

Any thread. Lock: `_lock` guards every field below it; arrays are replaced, never changed in place. `_columns` is read without
it while its roots are the current ones.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool.ids import TOKEN_BYTES
from kvpool.key_column import KeyColumn, keys_in
from kvpool.layout import Layout
from kvpool_client.given_numbers import TOKENS_MAX, is_index

Extra = tuple[int, int, bytes]
Roots = Callable[[], tuple[bytes, ...]]

_INT32 = np.iinfo(np.int32)
_TOKEN = np.dtype(np.int32)
_NO_TOKENS: npt.NDArray[np.int32] = np.empty(0, np.int32)


class Namespace(NamedTuple):
    """A model's name with its revision, the layout of its chunks, and the daemon's socket. One object for each Pool, by which
    what is a Pool's alone is known."""

    model: str
    layout: Layout
    path: str

    def __str__(self) -> str:
        return f"the Pool of {self.model!r} at {self.path}"

    @property
    def chunks(self) -> tuple[str, Layout]:
        """What names its chunks: Pools that agree in it have them in common."""
        return self.model, self.layout


class KeyChain:
    """Names of a prompt's chunks: what `Pool.keys` answers, and `lookup`, `save` and the other verbs take.

        keys = pool.keys(prompt)        # int32 or int64 [tokens], or a list
        keys.extend([token])            # hashes only what is new
        len(keys), keys.tokens, keys[0]

    Only full chunks have a key: `len(keys)` chunks cover `tokens` tokens, and the tail behind them waits for `extend`. Each key
    is 32 bytes, which depend on all tokens up to the end of its chunk, on model, revision and layout, and on salt and adapter.
    Threads: any.
    """

    # Invariant: `_columns[r]` is the chain over `_leaves`, `chunks` of them, from `_roots[r]`; `_token_ids` joined are those
    # of all leaves from number `_ids_begin` on.

    def __init__(
        self,
        chunk_tokens: int,
        roots: Roots,
        extra: Sequence[Extra] = (),
        scope: bytes = b"",
        *,
        namespace: Namespace | None = None,
    ) -> None:
        """`Pool.keys` makes it. `roots`: the key of the root, for each rank that the Pool stands for. `scope`: adapter and salt
        tag for events; no part of the keys. `namespace`: that of the Pool whose verbs take it; None: no Pool's do."""
        self.chunk_tokens = chunk_tokens
        self.namespace = namespace
        self.scope = scope
        self._current_roots = roots
        self._extra = _checked_extra(extra) if extra else ()
        self._lock = threading.Lock()
        self._tail = _NO_TOKENS
        self._leaves = b""
        self.chunks = 0  # read without the lock, as `len`
        self._token_ids: list[bytes] = []  # i32, of whole chunks
        self._ids_begin = 0  # after the last chunk that was given without
        self._roots = roots()
        self._columns = (b"",) * len(self._roots)

    def __len__(self) -> int:
        return self.chunks

    def __getitem__(self, chunk: int) -> bytes:
        """The 32-byte key of a chunk (of the first rank, for a scheduler's chain)."""
        column = KeyColumn(self.columns()[0])
        count = len(column)
        if not -count <= chunk < count:
            raise IndexError(f"chunk {chunk} of a chain of {count}")
        return column[chunk]

    def __repr__(self) -> str:
        return f"<KeyChain {len(self)} chunks of {self.chunk_tokens} tokens>"

    @property
    def tokens(self) -> int:
        """Tokens that the keys cover: chunks × chunk_tokens."""
        return len(self) * self.chunk_tokens

    @property
    def has_tail(self) -> bool:
        """Whether there are tokens behind the last chunk, as far as they were given."""
        return len(self._tail) > 0

    def extend(self, tokens: object) -> None:
        """Append token ids, int32 or int64 [tokens] or a list; hashes only the chunks that become full. Raises InvalidArgument
        for anything else."""
        new = as_tokens(tokens)
        with self._lock:
            joined = np.concatenate([self._tail, new]) if len(self._tail) else new
            tail = len(joined) % self.chunk_tokens
            full = joined[:-tail] if tail else joined
            if len(full):
                self._append_tokens(full)
                self._token_ids.append(full.tobytes())
            self._tail = joined[-tail:].copy() if tail else _NO_TOKENS

    def append_hashes(self, hashes: Sequence[bytes], tokens: object = None) -> None:
        """Append chunks whose leaves are an engine's own chained block hashes, padded or hashed to 32 bytes.

        `tokens`: the token ids of these chunks, where the engine gives them; at least as many. Raises InvalidArgument.
        """
        covered = len(hashes) * self.chunk_tokens
        known = None if tokens is None else as_tokens(tokens)[:covered]
        if known is not None and len(known) != covered:
            raise InvalidArgument(f"tokens are {len(known)}, expected at least {covered} for {len(hashes)} chunks")
        if not hashes:
            return
        with self._lock:
            self._append(kvpool_native.blake3_each([bytes(value) for value in hashes]))
            if known is None:
                self._token_ids, self._ids_begin = [], len(self)
            else:
                self._token_ids.append(known.tobytes())

    def token_ids(self, chunks: Sequence[int]) -> bytes:
        """The token ids of these chunks, i32 little endian; empty where the engine gave hashes alone for some chunk or a
        later one. Those of a range are one piece, and those of all chunks not copied."""
        with self._lock:
            if min(chunks, default=0) < self._ids_begin:
                return b""
            self._token_ids = [b"".join(self._token_ids)]
            joined, begin = self._token_ids[0], self._ids_begin
        size = TOKEN_BYTES * self.chunk_tokens
        if isinstance(chunks, range) and chunks.step == 1:
            return joined[(chunks.start - begin) * size : (chunks.stop - begin) * size]
        return b"".join([joined[(chunk - begin) * size : (chunk - begin + 1) * size] for chunk in chunks])

    def columns(self) -> tuple[bytes, ...]:
        """All keys, packed, 32 bytes each, for each rank that the Pool stands for."""
        if self._current_roots() is self._roots:
            return self._columns
        with self._lock:
            roots = self._current_roots()
            if roots != self._roots:
                self._columns = self._chained(roots, self._leaves)
            self._roots = roots
            return self._columns

    def leading(self, chunks: int) -> KeyColumn:
        """The keys of the first chunks, of one rank after those of another: as requests name them."""
        return KeyColumn(b"".join(KeyColumn(column)[:chunks].packed for column in self.columns()))

    def _append_tokens(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append full chunks of tokens."""
        if self._extra:
            self._append(kvpool_native.hash_leaves(tokens, self.chunk_tokens))
        else:
            self._add(*kvpool_native.hash_chunks(tokens, self.chunk_tokens, self._last_keys()))

    def _append(self, leaves: bytes) -> None:
        leaves = self._mix_extra(leaves, len(self)) if self._extra else leaves
        self._add(leaves, self._chained(self._last_keys(), leaves))

    def _add(self, leaves: bytes, keys: tuple[bytes, ...]) -> None:
        """Append leaves, and their keys to each column."""
        if self._leaves:
            keys = tuple([column + more for column, more in zip(self._columns, keys, strict=True)])
        self._columns = keys
        self._leaves += leaves
        self.chunks = keys_in(self._leaves)

    def _last_keys(self) -> tuple[bytes, ...]:
        """The key of the last chunk in each column, behind which the next ones go; the roots before the first one."""
        return tuple([KeyColumn(column)[-1] for column in self._columns]) if self.chunks else self._roots

    @staticmethod
    def _chained(parents: Sequence[bytes], leaves: bytes) -> tuple[bytes, ...]:
        """The keys of chunks behind each of these parents."""
        packed, size = kvpool_native.chain_keys(b"".join(parents), leaves), len(leaves)
        return tuple([packed[at * size : (at + 1) * size] for at in range(len(parents))])

    def _mix_extra(self, leaves: bytes, first_chunk: int) -> bytes:
        mixed = []
        for number, leaf in enumerate(KeyColumn(leaves)):
            start = (first_chunk + number) * self.chunk_tokens
            payload = _extra_payload(self._extra, start, start + self.chunk_tokens)
            mixed.append(kvpool_native.mix_leaf(leaf, payload) if payload else leaf)
        return b"".join(mixed)


def as_tokens(tokens: object) -> npt.NDArray[np.int32]:
    """Token ids as a one-dimensional int32 array. Raises InvalidArgument on ids that do not fit, floats, or shapes: of a batch
    of one, [1, n], it is the row that is expected."""
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidArgument(f"tokens are {type(tokens).__name__}, expected integers: {error}") from error
    if array.size == 0:
        return _NO_TOKENS
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"tokens have shape {array.shape} of {array.dtype}, {expected_one_dimension('tokens', array)}"
        )
    if array.dtype == _TOKEN:
        return np.ascontiguousarray(array)
    if array.dtype.itemsize >= 4:
        low, high = int(array.min()), int(array.max())
        if low < _INT32.min or high > _INT32.max:
            raise InvalidArgument(f"tokens reach from {low} to {high}, expected ids of 32 bits")
    return np.ascontiguousarray(array, dtype=np.int32)


def expected_one_dimension(name: str, array: npt.NDArray[np.generic]) -> str:
    """What is expected of an argument that is an array of another shape or dtype, with the cure for a batch of one."""
    is_batch_of_one = array.ndim == 2 and len(array) == 1
    return "expected one dimension of integers" + (f": pass {name}[0]" if is_batch_of_one else "")


def _checked_extra(extra: Sequence[Extra]) -> tuple[Extra, ...]:
    checked = []
    for entry in extra:
        is_triple = isinstance(entry, (tuple, list)) and len(entry) == 3
        if not is_triple:
            raise InvalidArgument(f"extra has {entry!r}, expected (start, end, bytes)")
        start, end, content = entry
        if not is_index(start, TOKENS_MAX) or not is_index(end, TOKENS_MAX) or start >= end:
            raise InvalidArgument(f"extra covers tokens {start!r} to {end!r}, expected 0 <= start < end")
        if not isinstance(content, (bytes, bytearray, memoryview)):
            raise InvalidArgument(f"extra for tokens {start} to {end} is {type(content).__name__}, expected bytes")
        checked.append((int(start), int(end), bytes(content)))
    return tuple(checked)


def _extra_payload(extra: tuple[Extra, ...], start: int, end: int) -> bytes:
    """The extras that touch tokens `start` up to `end`, clipped and relative, in the form that layouts.md fixes."""
    touching = [entry for entry in extra if entry[0] < end and entry[1] > start]
    if not touching:
        return b""
    parts = [len(touching).to_bytes(4, "little")]
    for first, last, content in touching:
        parts.append((max(first, start) - start).to_bytes(8, "little"))
        parts.append((min(last, end) - start).to_bytes(8, "little"))
        # An image that begins in an earlier chunk is distinguished by its start as well as by its content.
        parts.append((first - start).to_bytes(8, "little", signed=True))
        parts.append(len(content).to_bytes(4, "little"))
        parts.append(content)
    return b"".join(parts)
