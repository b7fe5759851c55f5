"""Layerwise overlap without touching a model's code: forward hooks that wait for, and announce, one layer at a time.

`modules[i]` is whatever reads and writes layer i's KV: an attention module or a whole decoder layer. A hook costs one
native wait for each prompt; it copies nothing. The thread that runs the model's forward.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral

import torch

from kvpool.errors import InvalidArgument
from kvpool_client.save import Save
from kvpool_client.torch.restored import PrefixShortened, Restored

EACH_TIME = "save what each pass has computed: store(tokens[:end]) and announced in every pass"


@contextmanager
def gated(restored: Restored | Sequence[Restored], modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the context each module waits for its layer just before it runs, so layer i computes while i+1 is copied.

    `restored`: the prefix of one prompt, or of each prompt of a batch. `modules`: one for each layer, in the order in which
    they run. A layer of which fewer tokens came than were promised raises PrefixShortened, which `Restored.prefill` and
    `prefill_batch` answer. Raises InvalidArgument for another number of modules, and for one that stands for two layers.
    """
    batch = [restored] if isinstance(restored, Restored) else list(restored)
    listed = list(modules)
    for one in batch:
        _check_modules(listed, one.layers)

    def wait_for(layer: int) -> Callable[[torch.nn.Module, object], None]:
        def wait(_module: torch.nn.Module, _inputs: object) -> None:
            for one in batch:
                if not one.wait_layer(layer):
                    raise PrefixShortened(one)

        return wait

    handles = [module.register_forward_pre_hook(wait_for(layer)) for layer, module in enumerate(listed)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def announced(
    save: Save | Sequence[Save], modules: Iterable[torch.nn.Module], end: int | Sequence[int]
) -> Iterator[None]:
    """Within the context each layer is announced to the save right after its module ran: layer i is copied while i+1 computes.

    For one forward pass. `save`: of one prompt, or of each prompt of a batch. `modules`: one for each layer, in the order in
    which they run. `end`: how many tokens of the prompt, or of each, have KV when the pass is over, counted from the prompt's
    begin. A prompt that is computed in several passes has a save of its own in each: `store(tokens[:end])`.

    An exception aborts the saves; otherwise the caller commits them. Raises InvalidArgument for a save that goes on beyond
    `end` or was announced before, for another number of modules, and where they run in another order or a second time.
    """
    saves, ends = (list(save), list(end)) if isinstance(save, Sequence) else ([save], [end])  # type: ignore[arg-type]  # each
    listed = list(modules)
    _check_saves(saves, ends)
    for one in saves:
        _check_modules(listed, one.layers)
    done = 0

    def announce(layer: int) -> Callable[[torch.nn.Module, object, object], None]:
        def after(_module: torch.nn.Module, _inputs: object, _output: object) -> None:
            nonlocal done
            if layer < done:
                raise InvalidArgument(f"module {layer} ran a second time, expected one forward pass: {EACH_TIME}")
            if layer > done:
                raise InvalidArgument(
                    f"module {layer} ran before module {done}, expected modules in the order of layers"
                )
            done += 1
            for one in saves:
                one.layer(layer)

        return after

    handles = [module.register_forward_hook(announce(layer)) for layer, module in enumerate(listed)]
    try:
        yield
    except BaseException:
        for one in saves:
            one.abort()
        raise
    finally:
        for handle in handles:
            handle.remove()


def _check_modules(modules: Sequence[torch.nn.Module], layers: int) -> None:
    if len(modules) != layers:
        raise InvalidArgument(f"modules are {len(modules)}, expected one for each of {layers} layers")
    if len(set(map(id, modules))) != len(modules):
        raise InvalidArgument("modules has one module twice, expected another one for each layer")


def _check_saves(saves: Sequence[Save], ends: Sequence[object]) -> None:
    if len(saves) != len(ends):
        raise InvalidArgument(f"end has {len(ends)} numbers, expected one for each of {len(saves)} saves")
    for save, end in zip(saves, ends, strict=True):
        if not isinstance(end, Integral):
            raise InvalidArgument(f"end is {end!r}, expected a number of tokens for each save")
        if save.end_token > int(end):
            raise InvalidArgument(
                f"save has the tokens up to {save.end_token}, and the pass computes those up to {end!r}: {EACH_TIME}"
            )
        if save.is_announced:
            raise InvalidArgument(f"save was announced before: {EACH_TIME}")
