"""Keys of a sequence's chunks: those of its tokens, or, where the tokens are not known, keys that nobody else has.

A sequence without token ids gets random ones under a random salt: its chunks are found by it and its forks alone. One
with ids gets random ones behind those that it knows once a chunk is to be saved whose ids did not come in time; what
comes later is not looked at. So it does behind the last token whose KV full attention gives: what a model computes after
a step that estimated some of its attention is near that, and not the KV that others expect under the tokens' keys.
One thread at a time.
"""

import os

import numpy as np
import numpy.typing as npt

from kvpool.states import TokenRange
from kvpool_client.key_chain import KeyChain, as_tokens
from kvpool_client.pool import Pool
from kvpool_sparse.config import TOKENS_MAX

SALT_BYTES = 16
GIVEN_UP_PRIORITY = 0


class KeySource:
    """The chunk keys of one growing sequence. `keys` covers whole chunks of the tokens known so far."""

    def __init__(self, pool: Pool, tokens: object, salt: bytes | None, adapter: str) -> None:
        """`tokens` None: private keys. Raises InvalidArgument on anything but token ids."""
        self.is_private = tokens is None
        self.given = 0  # ids that came, those of approximate KV included
        self._known: int | None = None  # ids before random ones, of a sequence with ids that did not come in time
        self._exact = TOKENS_MAX  # tokens before one whose KV may be approximate
        self._pool = pool
        self._salt = os.urandom(SALT_BYTES) if self.is_private else salt
        self._adapter = adapter
        self._ids: list[npt.NDArray[np.int32]] = []
        self._random = np.random.default_rng(int.from_bytes(os.urandom(SALT_BYTES), "little"))
        self.keys: KeyChain = pool.keys([], salt=self._salt, adapter=adapter)
        if tokens is not None:
            self.extend(tokens)

    def give_up(self) -> None:
        """Have private chunks evicted first from now on: nobody finds them again. Those that a fork has leased stay
        while it lives. One round trip; nothing while the daemon is away."""
        first = 0 if self.is_private else self._known
        if first is not None and len(self.keys):
            self._pool.retain(self.keys, (TokenRange(first, None, GIVEN_UP_PRIORITY),))

    def extend(self, tokens: object) -> None:
        """Append token ids, of tokens that are to be found by others. Raises InvalidArgument."""
        new = as_tokens(tokens)
        self.given += len(new)
        if self._known is None:
            self._append(new[: max(0, self._exact - self._count)])

    def end_exact(self, tokens: int) -> None:
        """Have nobody find chunks with other tokens than the first `tokens`: those behind have approximate KV."""
        self._exact = min(self._exact, tokens)
        if not self.is_private and self._known is None and self._count > self._exact:
            common = np.concatenate(self._ids)[: self._exact]
            self.keys, self._ids = self._pool.keys([], salt=self._salt, adapter=self._adapter), []
            self._append(common)

    @property
    def _count(self) -> int:
        """Ids that there are, random ones included."""
        return sum(map(len, self._ids))

    def _append(self, tokens: object) -> None:
        self.keys.extend(tokens)
        self._ids.append(np.array(tokens, dtype=np.int32).reshape(-1))

    def cover(self, chunks: int) -> int:
        """Make sure that there are keys for so many chunks: random ones where ids are missing. How many there are."""
        missing = chunks - len(self.keys)
        if missing > 0:
            count = self._count
            if not self.is_private and self._known is None:
                self._known = count
            wanted = chunks * self.keys.chunk_tokens - count
            self._append(self._random.integers(1 << 30, size=wanted, dtype=np.int32))
        return len(self.keys)

    def fork(self, tokens: int) -> "KeySource":
        """The keys of a sequence that goes on from this one, of whose tokens every layer has `tokens`: all ids that
        are known, or, of random ones, those of the chunks that are whole."""
        child = KeySource(self._pool, None, self._salt, self._adapter)
        child.is_private, child.given = self.is_private, self.given
        child._known, child._exact = self._known, self._exact
        child._salt = self._salt
        child.keys = self._pool.keys([], salt=self._salt, adapter=self._adapter)
        common = np.concatenate(self._ids) if self._ids else np.empty(0, np.int32)
        if self.is_private or self._known is not None:  # what comes behind them is the child's own
            whole = tokens // self.keys.chunk_tokens * self.keys.chunk_tokens
            common = common[: max(whole, self._known or 0)]
        child._append(common)
        return child
