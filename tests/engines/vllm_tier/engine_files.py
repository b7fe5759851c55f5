"""vLLM's own Python files, out of its wheel, importable beside stubs: its scheduler, its offloading connector and its tiers.

`open_files(DIRECTORY)` has modules of REAL come from the directory, and stands stubs in for the rest of vLLM and for packages
that are not installed. A stub's capitalised names are empty classes, its others callables that answer themselves. For a process
of its own: nothing is taken back.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REAL = (
    "vllm.v1.kv_offload",
    "vllm.v1.kv_hints",
    "vllm.v1.core",
    "vllm.v1.request",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.outputs",
    "vllm.v1.utils",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.metrics.stats",
    "vllm.v1.engine",
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector",
    "vllm.utils.math_utils",
    "vllm.utils.hashing",
)
# Imported for their classes, whose files import half of vLLM.
STUBBED = (
    "vllm.v1.kv_offload.cpu.gpu_worker",
    "vllm.v1.kv_offload.cpu.host_register",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
)
# What stubs have to answer.
GIVEN: dict[str, dict[str, Any]] = {
    "vllm.utils.torch_utils": {"get_dtype_size": lambda dtype: dtype.itemsize},
    "vllm.platforms": {
        "current_platform": types.SimpleNamespace(
            get_device_name=lambda: "a device of a script", register_custom_kv_cache_specs=lambda _: None
        )
    },
    "vllm.utils": {"length_from_prompt_token_ids_or_embeds": lambda tokens, _: len(tokens)},
}


class _Stub(type):
    """Any class, and anything that is called: what is asked of it is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(name)

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


def _stub(name: str) -> Any:
    def init_subclass(*_: object, **__: object) -> None: ...

    def init(self: Any, *args: Any, **fields: Any) -> None:
        names = [each for kind in reversed(type(self).__mro__) for each in getattr(kind, "__annotations__", {})]
        for each in names:
            if hasattr(type(self), each):
                setattr(self, each, getattr(type(self), each))
        for each, value in [*zip(names, args, strict=False), *fields.items()]:
            setattr(self, each, value)

    def new(cls: Any, *args: Any, **_: Any) -> Any:
        # A decorator gives back what it decorates.
        return args[0] if cls.__name__[:1].islower() and len(args) == 1 and callable(args[0]) else object.__new__(cls)

    content = {
        "__init_subclass__": classmethod(init_subclass),
        "__class_getitem__": classmethod(lambda cls, _: cls),
        "__init__": init,
        "__new__": new,
        "__call__": lambda self, *args, **_: args[0] if len(args) == 1 and callable(args[0]) else self,
        "__getattr__": lambda self, asked: _stub(asked),
        "__iter__": lambda self: iter(()),
    }
    return _Stub(name, (), content)


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _stub(name)
        setattr(self, name, found)
        return found


class _Files(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's modules first, and what nobody else has found last."""

    def __init__(self, directory: Path, *, is_last: bool) -> None:
        self._directory = directory
        self._is_last = is_last

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        is_ours = name == "vllm" or name.startswith("vllm.")
        if is_ours == self._is_last:
            return None
        if not is_ours:
            return self._missing(name)
        place = self._directory.joinpath(*name.split("."))
        is_real = any(name == real or name.startswith(f"{real}.") for real in REAL) and not name.startswith(STUBBED)
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if is_real and file.exists():
            return importlib.machinery.PathFinder.find_spec(name, [str(place.parent)])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _missing(self, name: str) -> Any:
        frame = sys._getframe(2)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        is_asked_by_vllm = frame.f_code.co_filename.startswith(str(self._directory))
        top = name.partition(".")[0]
        if isinstance(sys.modules.get(top), _StubModule) or (is_asked_by_vllm and top not in sys.stdlib_module_names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        vars(module).update(GIVEN.get(module.__name__, {}))


def open_files(directory: Path) -> None:
    """From now on `import vllm…` finds these files."""
    sys.meta_path.insert(0, _Files(directory, is_last=False))
    sys.meta_path.append(_Files(directory, is_last=True))
