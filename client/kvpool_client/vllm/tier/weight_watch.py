"""Weight watch: calls by which weights change in place, of which vLLM notifies no tier, seen where its core passes them on.

    update_weights, reload_weights, apply_model, a trainer's own method ──► the core's collective_rpc ──► workers

The core makes the scheduler and so the tier: it is in the same process, and its calls are made on the scheduler's thread,
between steps. The method is wrapped on that one object; what it does is unchanged. A call that vLLM makes itself and that
leaves weights alone is known by name; every other one counts as a change, whatever it does. Not seen: whoever writes into
parameters without such a call.

Invariant: when a call has returned, or raised, the tier knows of it. The scheduler's thread.
"""

import functools
from collections.abc import Callable
from typing import Any

HARMLESS = frozenset(
    {
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "release_late_interaction_query_cache",
        "shutdown_weight_transfer_engine",
        "update_max_model_len",
    }
)


class WeightWatch:
    """See the module. `has_kv`: whether vLLM has KV that was computed or loaded since the last reset of its caches."""

    def __init__(self, core: Any, on_change: Callable[[str, bool], None]) -> None:
        """`core`: vLLM's, None where there is none. `on_change`: called with the name of a call that may have changed weights,
        and whether vLLM has KV from before it. It must not raise."""
        self._core = core
        self._on_change = on_change
        self.has_kv = False
        if core is not None:
            core.collective_rpc = self._watched(core.collective_rpc)

    def __repr__(self) -> str:
        return f"<WeightWatch of {self._core!r}, {'with' if self.has_kv else 'without'} KV>"

    def end_step(self) -> None:
        """A step was scheduled: its requests have blocks."""
        if not self.has_kv and self._core is not None:
            self.has_kv = self._has_blocks()

    def note_reset(self) -> None:
        """vLLM has emptied its caches, but for what running requests have."""
        self.has_kv = self._core is not None and self._has_blocks()

    def _has_blocks(self) -> bool:
        try:
            return bool(self._core.scheduler.kv_cache_manager.usage > 0)
        except (AttributeError, TypeError):  # a scheduler that shows nothing of its blocks
            return True

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(method: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return function(method, *arguments, **named)
            finally:
                if not (isinstance(method, str) and method in HARMLESS):
                    name = method if isinstance(method, str) else getattr(method, "__qualname__", "a function")
                    self._on_change(name, self.has_kv or self._has_blocks())

        return call
