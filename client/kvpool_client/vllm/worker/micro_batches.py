"""Micro-batches: with dual-batch overlap vLLM runs a step in several, and each calls the hooks of every layer.

A layer may be read when the last micro-batch has written it. A step too small to be split runs as one, and only vLLM decides
that; layers that are not announced here are announced when the forward pass has ended. The threads of the micro-batches, of
which one runs at a time.
"""

import sys
from collections import Counter
from collections.abc import Callable

OVERLAP = "vllm.v1.worker.ubatching"


def _is_split_now() -> bool:
    """Whether the forward pass under way runs in micro-batches. Reads vLLM's module where it is loaded."""
    ask: Callable[[], object] | None = getattr(sys.modules.get(OVERLAP), "dbo_enabled", None)
    return ask is not None and bool(ask())


class MicroBatches:
    """The layers that every micro-batch of a step has written. `count`: micro-batches of a split step."""

    def __init__(self, count: int, is_split: Callable[[], bool] = _is_split_now) -> None:
        self._count = count
        self._is_split = is_split
        self._written: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<MicroBatches {self._count}, {len(self._written)} layers>"

    @classmethod
    def of(cls, parallel: object) -> "MicroBatches":
        """The micro-batches of vLLM's configuration."""
        is_on = bool(getattr(parallel, "use_ubatching", False))
        return cls(int(getattr(parallel, "num_ubatches", 2)) if is_on else 1)

    def begin_step(self) -> None:
        """A step begins."""
        self._written.clear()

    def has_written(self, layer: str) -> bool:
        """A micro-batch has written a layer; whether it was the last one."""
        if self._count < 2 or not self._is_split():
            return True
        self._written[layer] += 1
        return self._written[layer] == self._count
