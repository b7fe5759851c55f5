"""Layerwise overlap without touching a model's code: forward hooks that wait for, and announce, one layer at a time.

`modules[i]` is whatever reads and writes layer i's KV: an attention module or a whole decoder layer. A hook costs one
native wait; it copies nothing. The thread that runs the model's forward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from kvpool_client.save import Save
from kvpool_client.torch.restored import PrefixShortened, Restored


@contextmanager
def gated(restored: Restored, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the context each module waits for its layer just before it runs, so layer i computes while i+1 is copied.

    A forward whose layer came out shorter raises PrefixShortened, which `Restored.prefill` answers.
    """

    def wait_for(layer: int) -> Callable[[torch.nn.Module, object], None]:
        def wait(_module: torch.nn.Module, _inputs: object) -> None:
            if not restored.wait_layer(layer):
                raise PrefixShortened(f"layer {layer} ended at token {restored.tokens}: {restored.reason}")

        return wait

    handles = [module.register_forward_pre_hook(wait_for(layer)) for layer, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def announced(save: Save, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the context each layer is announced to the save right after its module ran: layer i is copied while i+1 computes.

    Requires: one forward pass, the last one that writes to the saved chunks. An exception aborts the save; otherwise
    the caller commits it.
    """

    def announce(layer: int) -> Callable[[torch.nn.Module, object, object], None]:
        def after(_module: torch.nn.Module, _inputs: object, _output: object) -> None:
            save.layer(layer)

        return after

    handles = [module.register_forward_hook(announce(layer)) for layer, module in enumerate(modules)]
    try:
        yield
    except BaseException:
        save.abort()
        raise
    finally:
        for handle in handles:
            handle.remove()
