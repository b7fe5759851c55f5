"""Stand-ins for what SGLang's memory cache imports and never calls here: kernels, models, servers, packages of a GPU build.

`install(DIRECTORY, PACKAGES)` has `sglang.srt.mem_cache` come out of the unpacked wheel in DIRECTORY, and msgspec out of
PACKAGES: its records are real. Everything else that the wheel's modules import and this Python lacks is a module of empty
classes.
"""

import importlib
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

BARE = ("sglang", *(f"sglang.srt{name}" for name in ("", ".managers", ".configs", ".mem_cache", ".disaggregation")))
# Of the wheel itself: what leads to models, kernels and servers.
ABSENT = tuple(
    f"sglang.{name}"
    for name in (
        "kernels",
        "srt.layers",
        "srt.batch_invariant_ops",
        "srt.model_executor",
        "srt.speculative",
        "srt.lora",
        "srt.models",
        "srt.sampling",
        "srt.utils.hf_transformers",
        "srt.managers.cache_controller",
        "srt.managers.schedule_batch",
    )
)
PACKAGES = ("transformers", "tokenizers", "huggingface_hub", "triton")  # absent, also where this Python has them
REAL = ("sglang", "torch", "tabulate", "accelerate", "optree")


class _Empty(type):
    """A class that can be anything at import time: decorator, base, generic, container."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if not cls.__dict__.get("is_stand_in"):
            return super().__call__(*arguments, **named)
        return arguments[0] if len(arguments) == 1 and not named and callable(arguments[0]) else _made("made")

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __setitem__(cls, key: Any, value: Any) -> None:
        pass

    def __iter__(cls) -> Any:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __bool__(cls) -> bool:
        return True


def _made(name: str) -> Any:
    def begin_subclass(cls: Any, /, **_: Any) -> Any:
        cls.is_stand_in = False

    return _Empty(name, (), {"is_stand_in": True, "__init_subclass__": classmethod(begin_subclass)})


class _StandIn(types.ModuleType):
    """A module whose every name is an empty class."""

    __version__ = "99"

    def __init__(self, name: str, path: Sequence[str] = ()) -> None:
        super().__init__(name)
        self.__path__ = list(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _made(name)
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """First: what is absent on purpose. Last: what the wheel's modules import and nobody has."""

    taken: ClassVar[set[str]] = set()
    root = ""

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if self._is_first:
            is_absent = name.startswith(ABSENT) or (top in PACKAGES and (top in self.taken or _is_from_wheel()))
        else:
            is_free = top not in REAL and top not in sys.stdlib_module_names and not top.startswith("_")
            is_absent = is_free and (top in self.taken if "." in name else _is_from_wheel())
        if not is_absent:
            return None
        self.taken.add(top)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_from_wheel() -> bool:
    """Whether a module of the wheel imports now."""
    frame = sys._getframe(2)
    while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_Finder.root)


def install(directory: Path, packages: Path) -> None:
    """See the module."""
    sys.path[:0] = [str(directory), str(packages)]
    importlib.import_module("msgspec")  # real, and before the finders
    import torch

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    torch.compile = as_it_is  # type: ignore[assignment]  # it wants a compiler
    _Finder.root = str(directory / "sglang")
    sys.meta_path.insert(0, _Finder(is_first=True))
    sys.meta_path.append(_Finder(is_first=False))
    for name in BARE:
        kind = _StandIn if name.endswith(".configs") else types.ModuleType
        package = kind(name)
        package.__path__ = [str(directory / name.replace(".", "/"))]
        sys.modules[name] = package
