"""Restored prefix: leading tokens of a prompt that the pool has, on their way into the engine's blocks.

    RESTORING ──every layer waited for──► SETTLED, `tokens` as promised
        └──a wait finds fewer chunks────► SETTLED, `tokens` smaller: prefill again from there

It moves no bytes and depends on no engine: the Load copies, and this class turns "fewer chunks than leased" into the one number
that an engine needs, the token at which its own prefill begins. Invariant: `tokens` never rises; once settled, the load has
ended and every layer of the first `tokens` tokens is in place. One thread at a time, as the Load it waits for.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from kvpool.errors import InvalidArgument
from kvpool_client.arguments import as_index
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load

T = TypeVar("T")


class PrefixShortened(Exception):
    """Unwinds a forward pass that began behind KV which did not arrive: what it computes is of no use.

    Raise it with the Restored whose `wait_layer` was False; `gated` does. The `prefill` of that Restored catches it, and
    `prefill_batch` of a batch with that Restored; no other does. `restored.tokens` is where prefill begins again.
    """

    def __init__(self, restored: "Restored") -> None:
        """`restored`: the prefix that came shorter."""
        super().__init__(f"less came than was promised: {restored!r}")
        self.restored = restored


class Restored:
    """A prefix that is being restored into an engine's blocks: what `PagedPrefixCache.restore` answers, and `Allocation.load`.

    A context: leaving it ends the load, cancelled if an exception leaves it, and releases the lease. One thread at a time.
    """

    def __init__(
        self, tokens: int, *, layers: int, held_tokens: int = 0, lease: Lease | None = None, load: Load | None = None
    ) -> None:
        """`layers`: of the engine."""
        assert 0 <= held_tokens <= tokens
        assert (lease is None) == (load is None)
        self.layers = layers
        self._tokens = tokens
        self._held_tokens = held_tokens
        self._lease = lease
        self._load = load
        self._waited: set[int] = set()
        self._promised = tokens  # what `tokens` was when it was last read
        self._is_settled = load is None
        self._is_left = False
        self._reason = "complete"

    def __repr__(self) -> str:
        return f"<Restored {self._tokens} tokens, {self._reason if self._is_settled else 'under way'}>"

    def __enter__(self) -> "Restored":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_use()
        if self._load is not None and kind is not None:
            self._load.cancel()
        self.finish_load()
        if self._lease is not None:
            self._lease.release()

    @property
    def tokens(self) -> int:
        """Leading tokens that need no prefill: it begins at token number `tokens`. Falls when a wait finds fewer."""
        self._promised = self._tokens
        return self._tokens

    @property
    def reason(self) -> str:
        """Why the load stopped where it did (`LoadResult.reason`); `complete` while nothing has failed."""
        return self._reason

    def wait_layer(self, layer: int) -> bool:
        """Wait until this layer of the tokens that `tokens` gave when it was last read is in the engine's blocks. Raises
        InvalidArgument for a number that is no layer.

        False: fewer came. The load has ended then, `tokens` is the number of good ones, and what the engine computed after the
        old number is invalid: prefill begins again at the new one.
        """
        if self._is_settled or self._load is None:
            as_index("layer", layer, self.layers - 1)
        else:
            if self._load.wait_layer(layer) and self._load.chunks_so_far == self._load.chunks:
                self._waited.add(layer)
                return True
            self.finish_load()
        return self._tokens == self._promised

    def prefill(self, forward: Callable[[int], T]) -> T:
        """`forward(first_token)`, and once more from a lower token if the restored prefix came out shorter; its answer.

        `forward` computes tokens from `first_token` on. Before it reads a layer it waits for it, and raises
        PrefixShortened(this) where that wait was False; `gated` does both. Raises InvalidArgument where `forward` returned
        and a layer was never waited for: its KV may not have been there.
        """
        return prefill_batch([self], lambda starts: forward(starts[0]))

    def settle(self) -> int:
        """Wait for the whole load; `tokens`, which are in place in every layer then. Idempotent."""
        self.finish_load()
        return self.tokens

    def finish_load(self) -> int:
        """Wait for the whole load, as `settle`, for others than who computes behind it: what `wait_layer` answers to that one
        is what it was."""
        if not self._is_settled and self._load is not None:
            result = self._load.wait()
            self._is_settled = True
            self._reason = result.reason
            self._tokens = max(self._held_tokens, min(self._tokens, result.tokens))
        return self._tokens

    def drop_tokens(self, tokens: int) -> None:
        """Those behind so many tokens are of no use any more: they were taken back."""
        self._tokens = self._promised = min(self._tokens, tokens)

    def check_usable(self) -> None:
        """Raises InvalidArgument where it was left: the engine may have given its blocks to others since."""
        if self._is_left:
            raise InvalidArgument(
                f"{self!r} has ended: its context was left or its request freed, and its blocks may be another prompt's by now"
            )

    def end_use(self) -> None:
        """The engine may give the blocks to others from now on: nothing is to be computed behind it any more."""
        self._is_left = True

    def check_waited(self) -> None:
        """Raises InvalidArgument where a layer was never waited for, and `settle` was not called."""
        missing = [] if self._is_settled else [layer for layer in range(self.layers) if layer not in self._waited]
        if missing:
            raise InvalidArgument(
                f"layer {missing[0]} of {self.layers} was never waited for, {len(missing)} in all: what was computed may have "
                "read KV that had not come; expected wait_layer(layer) before each is read, as gated does"
            )


def prefill_batch(batch: Sequence[Restored], forward: Callable[[list[int]], T]) -> T:
    """`Restored.prefill` of several prompts in one forward pass. `batch`: what `PagedPrefixCache.restore` answered for each, or
    `Allocation.load`. `forward` gets the first token to compute of each, and is called once more, with what each prompt has
    then, where one came out shorter. Returns its answer.

    Raises InvalidArgument where `forward` returned and a layer of a prompt was never waited for. One thread.
    """
    check_batch(batch)
    starts = [restored.tokens for restored in batch]
    try:
        answer = forward(starts)
    except PrefixShortened as shortened:
        if all(restored is not shortened.restored for restored in batch):
            raise
    else:
        for restored in batch:
            restored.check_waited()
        # A forward pass that went on after a wait was False has computed on what did not come.
        if [restored.tokens for restored in batch] == starts:
            return answer
    return forward([restored.settle() for restored in batch])


def check_batch(batch: Sequence[Restored]) -> None:
    """Raises InvalidArgument where one of a batch is no Restored, or was left."""
    for restored in batch:
        if not isinstance(restored, Restored):
            raise InvalidArgument(
                f"restored is {type(restored).__name__}, expected what PagedPrefixCache.restore answered, or Allocation.load"
            )
        restored.check_usable()
