"""Restored prefix: leading tokens of a prompt that the pool has, on their way into the engine's blocks.

    RESTORING ──every layer waited for──► SETTLED, `tokens` as promised
        └──a wait finds fewer chunks────► SETTLED, `tokens` smaller: prefill again from there

It moves no bytes and depends on no engine: the Load copies, and this class turns "fewer chunks than leased" into the one number
that an engine needs, the token at which its own prefill begins. Invariant: `tokens` never rises; once settled, the load has
ended and every layer of the first `tokens` tokens is in place. One thread at a time, as the Load it waits for.
"""

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from kvpool_client.lease import Lease
from kvpool_client.load import Load

T = TypeVar("T")


class PrefixShortened(Exception):
    """Unwinds a forward pass that began after KV which did not arrive. `Restored.prefill` catches it."""


class Restored:
    """A context: leaving it ends the load, cancelled if an exception leaves it, and releases the lease."""

    def __init__(
        self, tokens: int, *, held_tokens: int = 0, lease: Lease | None = None, load: Load | None = None
    ) -> None:
        assert 0 <= held_tokens <= tokens
        assert (lease is None) == (load is None)
        self._tokens = tokens
        self._held_tokens = held_tokens
        self._lease = lease
        self._load = load
        self._is_settled = load is None
        self._reason = "complete"

    def __repr__(self) -> str:
        return f"<Restored {self._tokens} tokens, {self._reason if self._is_settled else 'under way'}>"

    def __enter__(self) -> "Restored":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._load is not None and kind is not None:
            self._load.cancel()
        self.settle()
        if self._lease is not None:
            self._lease.release()

    @property
    def tokens(self) -> int:
        """Leading tokens that need no prefill: it begins at token number `tokens`. Falls when a wait finds fewer."""
        return self._tokens

    @property
    def reason(self) -> str:
        """Why the load stopped where it did (`LoadResult.reason`); `complete` while nothing has failed."""
        return self._reason

    def wait_layer(self, layer: int) -> bool:
        """Wait until the restored tokens' KV of this layer is in the engine's blocks.

        False: fewer tokens came than `tokens` had announced. The load has ended then, `tokens` is the number of good ones, and
        what the engine computed after the old number is invalid: prefill begins again at the new one.
        """
        if self._is_settled or self._load is None:
            return True
        if self._load.wait_layer(layer) and self._load.chunks_so_far == self._load.lease.chunks:
            return True
        promised = self._tokens
        self.settle()
        return self._tokens == promised

    def prefill(self, forward: Callable[[int], T]) -> T:
        """`forward(first_token)`, and once more from a lower token if the restored prefix came out shorter.

        `forward` computes tokens from `first_token` on and raises PrefixShortened where a wait was False; `gated` does.
        """
        try:
            return forward(self._tokens)
        except PrefixShortened:
            assert self._is_settled, "PrefixShortened without a wait that was False"
            return forward(self._tokens)

    def settle(self) -> int:
        """Wait for the whole load; the number of tokens that are in place in every layer. Idempotent."""
        if not self._is_settled and self._load is not None:
            result = self._load.wait()
            self._is_settled = True
            self._reason = result.reason
            self._tokens = max(self._held_tokens, min(self._tokens, result.tokens))
        return self._tokens
