"""Settings that an operator gives an adapter: each checked against its kind, all faults named at once.

Not where they stand: an adapter takes them from its engine's options, or from the environment. A wrong one refuses the engine's
start, which is the one moment at which raising is right. Invariant: what is answered is right as a whole. Pure; any thread.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvpool.errors import ConfigError, did_you_mean
from kvpool.socket_path import SOCKET_VARIABLE, fault_of_path, find_socket
from kvpool.states import PRIORITY_MAX
from kvpool_client.arguments import COPY_THREADS_MAX, TIMEOUT_S_MAX, is_text

# What is expected where a value cannot be one of the kind; empty where it can.
Kind = Callable[[Any], str]

# Leaves room for a revision in `kvpool.ids.MODEL_BYTES_MAX`.
MODEL_BYTES_MAX = 300
SECONDS_MIN = 0.001
# Of each pair the first is a part of the second.
_PARTS = (
    ("claim_timeout_s", "timeout_s"),
    ("scheduler_timeout_s", "timeout_s"),
    ("timeout_s", "batch_timeout_s"),
    ("timeout_s", "task_timeout_s"),
)


def integer(least: int, most: int) -> Kind:
    """An integer from `least` to `most`."""
    return _kind(f"an integer {least}..{most}", lambda value: type(value) is int and least <= value <= most)


def seconds(least: float = SECONDS_MIN, most: float = TIMEOUT_S_MAX) -> Kind:
    """A number from `least` to `most`."""
    return _kind(
        f"a number of seconds {least:g}..{most:.0f}",
        lambda value: type(value) in (int, float) and least <= value <= most,
    )


def choice(*words: str) -> Kind:
    """One of these words."""
    return _kind(" or ".join(map(repr, words)), lambda value: value in words)


def switch(value: object) -> str:
    """True or false."""
    return "" if isinstance(value, bool) else "true or false"


def _kind(expected: str, is_right: Callable[[Any], bool]) -> Kind:
    return lambda value: "" if is_right(value) else expected


def _socket(value: object) -> str:
    return fault_of_path(value) or ("" if os.path.isabs(value) else "an absolute path")  # type: ignore[arg-type]  # a path


def _is_model(value: object) -> bool:
    return (
        isinstance(value, str) and value.isprintable() and len(value.encode()) <= MODEL_BYTES_MAX and _is_named(value)
    )


def _is_named(value: object) -> bool:
    """Whether this is text, and not spaces alone."""
    return is_text(value) and (value == "" or bool(str(value).strip()))


# Of those that adapters have in common: they mean the same everywhere. An empty model or revision is none.
_COMMON: Mapping[str, Kind] = {
    "socket": _socket,
    "model": _kind(f"a name of 1 to {MODEL_BYTES_MAX} bytes, or none", _is_model),
    "revision": _kind("a name, or none", _is_named),
    "salt": _kind("a string", is_text),
    "timeout_s": seconds(),
    "copy_threads": integer(1, COPY_THREADS_MAX),
    "priority": integer(0, PRIORITY_MAX),
}


def kinds_of(record: type, own: Mapping[str, Kind]) -> dict[str, Kind]:
    """The settings of an adapter: the common ones that its dataclass has, and its own."""
    has = {field.name for field in fields(record)}
    return {name: kind for name, kind in _COMMON.items() if name in has} | dict(own)


def read_settings(
    record: type,
    given: Mapping[str, object],
    own: Mapping[str, Kind],
    *,
    where: str = "",
    spelled: Callable[[str], str] = str,
    faults: Sequence[str] = (),
) -> dict[str, Any]:
    """The values that are given, and the socket. Raises ConfigError with every fault.

    `record`: the dataclass that has them, with their defaults; `own`: the kinds of those that only this adapter has. `where`
    they stand, and how they are `spelled` there. `faults`: what the adapter has found itself.
    """
    defaults = {field.name: field.default for field in fields(record)}
    kinds = kinds_of(record, own)
    values, known = {"socket": find_socket(), **given}, [spelled(name) for name in kinds]
    found = [
        *faults,
        *(f"{name} is no setting{_nearest(name, known)}" for name in map(spelled, given) if name not in known),
    ]
    wrong = {name: kind(values[name]) for name, kind in kinds.items() if name in values and kind(values[name])}
    found += [
        f"{spelled(name) if name in given else SOCKET_VARIABLE} is {values[name]!r:.80}, expected {expected}"
        for name, expected in wrong.items()
    ]
    for part, whole in _PARTS:
        if {part, whole} <= kinds.keys() - wrong.keys():
            least, most = (values.get(name, defaults[name]) for name in (part, whole))
            if least > most:  # type: ignore[operator]  # numbers by the check above
                shown = (
                    f"{one!r}{'' if name in given else ' by default'}" for name, one in ((part, least), (whole, most))
                )
                found.append(f"{spelled(part)} is {next(shown)}, expected no more than {spelled(whole)}, {next(shown)}")
    if found:
        raise ConfigError([where + fault for fault in found])
    return values | {"socket": os.fsdecode(values["socket"])}  # type: ignore[arg-type]  # a path by the check above


def _nearest(name: str, known: Sequence[str]) -> str:
    return did_you_mean(name, known) or f", expected one of {', '.join(known)}"
