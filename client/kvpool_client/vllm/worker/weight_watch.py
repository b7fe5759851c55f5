"""Weight watch: weights that change in place, of which vLLM does not notify connectors, seen at the methods by which they come.

    vLLM's own updates          Worker: update_weights, reload_weights …
    others' into its models     AutoWeightsLoader, which most models load with: a method of a trainer's, called in the worker
    functions on the model      apply_model, whatever they do

The methods are wrapped on vLLM's classes, once in a worker's process; what they do is unchanged. Not seen: whoever writes into
parameters by other means (docs/engines/vllm.md). Invariant: when a watched method has returned, or raised, the connector of
this process's worker knows. The thread that runs the model.
"""

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from kvpool_client.vllm.identity.engine_process import worker_here
from kvpool_client.vllm.worker.worker_calls import WorkerCalls

WATCHED = {
    ("vllm.v1.worker.gpu_worker", "Worker"): (
        "update_weights",
        "finish_weight_update",
        "reload_weights",
        "reset_weights",
    ),
    ("vllm.v1.worker.worker_base", "WorkerBase"): ("apply_model",),
    ("vllm.model_executor.models.utils", "AutoWeightsLoader"): ("load_weights",),
}
MARK = "_kvpool_watches"


def watch_weights() -> None:
    """Have the connector of this process's worker notified behind each of the methods. Again: nothing."""
    for (module, name), methods in WATCHED.items():
        kind = getattr(sys.modules.get(module), name, None)
        for method in methods:
            function = vars(kind).get(method) if isinstance(kind, type) else None
            if isinstance(function, FunctionType) and not hasattr(function, MARK):
                setattr(kind, method, _watched(function))


def note_new_weights() -> None:
    """Notify it now. Never raises."""
    worker = worker_here()
    if isinstance(worker, WorkerCalls):
        worker.note_new_weights()


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        finally:
            note_new_weights()

    setattr(call, MARK, True)
    return call
