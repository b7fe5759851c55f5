"""Layerwise overlap without touching a model's code: forward hooks that wait for, and announce, one layer at a time.

`modules[i]` is whatever reads and writes layer i's KV: an attention module or a whole decoder layer. A hook costs one
native wait for each prompt; it copies nothing. The thread that runs the model's forward.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral

import torch
from torch.utils.hooks import RemovableHandle as Handle

from kvpool.errors import InvalidArgument
from kvpool_client.torch.restored import PrefixShortened, Restored, check_batch
from kvpool_client.verbs.save import Save

Hook = Callable[..., None]

EACH_TIME = "save what each pass has computed: store(tokens[:end]) and announced in every pass"


@contextmanager
def gated(restored: Restored | Sequence[Restored], modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the context each module waits for its layer just before it runs, so layer i computes while i+1 is copied.

    `restored`: the prefix of one prompt, or of each prompt of a batch. `modules`: one for each layer, in the order in which
    they run. A layer of which fewer tokens came than were promised raises PrefixShortened, which `Restored.prefill` and
    `prefill_batch` answer. One that was never waited for, where the context is left without an exception, raises
    InvalidArgument. Of the thread that enters it: what other threads run meanwhile waits for nothing. Raises
    InvalidArgument for another number of modules, for one that stands for two layers, and for a Restored that was left.
    """
    batch = list(restored) if isinstance(restored, Sequence) else [restored]
    check_batch(batch)
    listed = _checked_modules(modules, {one.layers for one in batch})

    def wait_for(layer: int) -> Hook:
        def wait(_module: torch.nn.Module, *_: object) -> None:
            for one in batch:
                if not one.wait_layer(layer):
                    raise PrefixShortened(one)

        return wait

    with _hooked(listed, torch.nn.Module.register_forward_pre_hook, wait_for):
        yield
    for one in batch:
        one.check_waited()


@contextmanager
def announced(
    save: Save | Sequence[Save], modules: Iterable[torch.nn.Module], end: int | Sequence[int]
) -> Iterator[None]:
    """Within the context each layer is announced to the save right after its module ran: layer i is copied while i+1 computes.

    For one forward pass. `save`: of one prompt, or of each prompt of a batch. `modules`: one for each layer, in the order in
    which they run. `end`: how many tokens of the prompt, or of each, have KV when the pass is over, counted from the prompt's
    begin. A prompt that is computed in several passes has a save of its own in each: `store(tokens[:end])`.

    An exception aborts the saves; otherwise the caller commits them. Raises InvalidArgument for a save that goes on beyond
    `end` or was announced before, for another number of modules, and where one does not run, or runs in another order or a
    second time. Of the thread that enters it: what other threads run meanwhile is not announced.
    """
    if isinstance(save, Sequence) != isinstance(end, Sequence):
        raise InvalidArgument(f"end is {end!r}, expected a number for one save, and a list of them for a list")
    saves, ends = (list(save), list(end)) if isinstance(save, Sequence) else ([save], [end])  # type: ignore[arg-type]  # each
    _check_saves(saves, ends)
    listed = _checked_modules(modules, {one.layers for one in saves})
    done = 0

    def announce(layer: int) -> Hook:
        def after(_module: torch.nn.Module, *_: object) -> None:
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

    try:
        with _hooked(listed, torch.nn.Module.register_forward_hook, announce):
            yield
        if done < len(listed):
            raise InvalidArgument(
                f"module {done} of {len(listed)} did not run: its KV may not be computed, nothing is saved"
            )
    except BaseException:
        for one in saves:
            one.abort()
        raise


@contextmanager
def _hooked(
    modules: Sequence[torch.nn.Module],
    register: Callable[[torch.nn.Module, Hook], Handle],
    hook_of: Callable[[int], Hook],
) -> Iterator[None]:
    """Hooks of this thread's forward passes alone: other threads may run the model meanwhile."""
    thread = threading.get_ident()

    def in_this_thread(hook: Hook) -> Hook:
        def run(module: torch.nn.Module, *given: object) -> None:
            if threading.get_ident() == thread:
                hook(module, *given)

        return run

    with ExitStack() as handles:
        for layer, module in enumerate(modules):
            handles.callback(register(module, in_this_thread(hook_of(layer))).remove)
        yield


def _checked_modules(modules: Iterable[torch.nn.Module], layers: Collection[int]) -> list[torch.nn.Module]:
    """A module for each layer of every prompt."""
    if not isinstance(modules, Iterable):
        raise InvalidArgument(f"modules is {type(modules).__name__}, expected a torch.nn.Module for each layer")
    listed = list(modules)
    for number, module in enumerate(listed):
        if not isinstance(module, torch.nn.Module):
            raise InvalidArgument(
                f"module {number} is {type(module).__name__}, expected a torch.nn.Module for each layer"
            )
    for count in layers:
        if len(listed) != count:
            raise InvalidArgument(f"modules are {len(listed)}, expected one for each of {count} layers")
    if len(set(map(id, listed))) != len(listed):
        raise InvalidArgument("modules has one module twice, expected another one for each layer")
    return listed


def _check_saves(saves: Sequence[Save], ends: Sequence[object]) -> None:
    if len(saves) != len(ends):
        raise InvalidArgument(f"end has {len(ends)} numbers, expected one for each of {len(saves)} saves")
    for save, end in zip(saves, ends, strict=True):
        if not hasattr(save, "end_token"):
            raise InvalidArgument(f"save is {type(save).__name__}, expected what PagedPrefixCache.store answered")
        if not isinstance(end, Integral):
            raise InvalidArgument(f"end is {end!r}, expected a number of tokens for each save")
        if save.end_token > int(end):
            raise InvalidArgument(
                f"save has the tokens up to {save.end_token}, and the pass computes those up to {end!r}: {EACH_TIME}"
            )
        if save.is_announced:
            raise InvalidArgument(f"save was announced before: {EACH_TIME}")
