"""Allocation: the blocks of one request, and the leading tokens whose KV is in them already or still on its way.

`reused_tokens` is a promise until the load has ended. The engine learns that a load came shorter in one of two places:
`wait_layer` is False for a layer that it is about to read, or `settle` returns fewer tokens. From then on `reused_tokens`
is the final number, it never rises, and prefill begins again there. An engine that asks neither cannot publish wrong KV:
`BlockPool.computed` is refused where its first token is behind the KV that is in place.
"""

from collections.abc import Callable
from typing import TypeVar

from kvpool_blocks.sequence import Sequence
from kvpool_client.torch.restored import Restored

T = TypeVar("T")


class Allocation:
    """The blocks of one request, and how much of its KV is in them: what `BlockPool.allocate` and `BlockPool.fork` answer.

        with gated(allocation.load, attention_modules):
            logits = allocation.prefill(lambda start: model.prefill(prompt, start, allocation.block_ids))
        blocks.computed(request_id, allocation.reused_tokens, len(prompt))

    `load`: what `gated` of `kvpool_client.torch` takes. `reused_tokens` is final when a wait was False, or after `settle`.
    Threads: one at a time, not necessarily the engine's.
    """

    def __init__(self, sequence: Sequence, load: Restored) -> None:
        """`BlockPool.allocate` makes it. `load`: the leading tokens that are in the blocks, or on their way."""
        self._sequence = sequence
        self.load = load

    def __repr__(self) -> str:
        return f"<Allocation {len(self._sequence.blocks)} blocks, {self.load!r}>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The request's block table as it is now: `append` and `rewind` change it. Raises InvalidArgument after `free`: the
        blocks may be another request's."""
        self.load.check_usable()
        return tuple(self._sequence.blocks)

    @property
    def reused_tokens(self) -> int:
        """Leading tokens that need no prefill: all of them only with `has_logits`. Falls when a load comes shorter."""
        return self.load.tokens

    def wait_layer(self, layer: int) -> bool:
        """Wait until this layer of the reused tokens is in the blocks. False: `reused_tokens` has fallen; prefill again from
        there. Raises InvalidArgument after `free`."""
        self.load.check_usable()
        return self.load.wait_layer(layer)

    def settle(self) -> int:
        """Wait for all layers; the final `reused_tokens`. Raises InvalidArgument after `free`."""
        self.load.check_usable()
        return self.load.settle()

    def prefill(self, forward: Callable[[int], T]) -> T:
        """`forward(first_token)`, and once more from a lower token if it raised PrefixShortened (see `gated`).
        For a batch: `prefill_batch([allocation.load, …], forward)`. Raises InvalidArgument as that does, and after `free`."""
        return self.load.prefill(forward)
