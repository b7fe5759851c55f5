"""The signatures of engines' base classes, read out of their sources, which are not imported: of a package or a wheel.

    python -m tests.rigs.engine_interfaces > tests/golden/engine_interfaces.txt

writes the version at hand anew, or adds it, and keeps the others: an adapter may serve several of an engine. A line is a class
and one of its methods or fields; what is abstract says so. Before the lines of a version stands its name.
"""

import ast
import copy
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "engine_interfaces.txt"


@dataclass(frozen=True)
class Interface:
    """Where an engine has the classes that an adapter derives from. `wheel`: the variable that may name its wheel.

    `has_types`: whether annotations and defaults are recorded too.
    """

    package: str
    wheel: str
    modules: Mapping[str, tuple[str, ...]]
    has_types: bool = True


INTERFACES = {
    "vllm": Interface(
        "vllm",
        "KVPOOL_VLLM_WHEEL",
        {
            "distributed/kv_transfer/kv_connector/v1/base.py": (
                "KVConnectorBase_V1",
                "KVConnectorMetadata",
                "KVConnectorWorkerMetadata",
                "SupportsHMA",
            ),
            "distributed/kv_transfer/kv_connector/v1/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
            "distributed/kv_events.py": ("BlockStored", "BlockRemoved", "AllBlocksCleared"),
            "v1/kv_hints/protocol.py": ("KvHintAction", "KvHintsEnvelope"),
            "v1/kv_offload/tiering/base.py": ("TransferJob", "JobResult", "SecondaryTierManager"),
            "v1/engine/core.py": ("EngineCore",),
            "v1/kv_offload/base.py": ("ReqContext", "RequestOffloadingContext", "OffloadingCounterMetadata"),
        },
    ),
    "sglang": Interface(
        "sglang",
        "KVPOOL_SGLANG_WHEEL",
        {
            "srt/mem_cache/hicache_storage.py": (
                "HiCacheStorage",
                "HiCacheStorageConfig",
                "HiCacheStorageExtraInfo",
            ),
            "srt/mem_cache/unified_cache/unified_cache_linker.py": ("UnifiedCacheLinker", "LayerWiseLoadCounter"),
            "srt/mem_cache/cache_init_params.py": ("CacheInitParams",),
        },
    ),
    "lmcache": Interface(
        "lmcache",
        "KVPOOL_LMCACHE_WHEEL",
        {
            "v1/distributed/l2_adapters/base.py": ("L2AdapterInterface",),
            "v1/distributed/api.py": ("ObjectKey", "MemoryLayoutDesc", "MemoryTags"),
            "v1/distributed/internal_api.py": ("L1MemoryDesc", "L2StoreResult"),
            "v1/platform/event_notifier.py": ("EventNotifier",),
        },
    ),
    "tensorrt_llm": Interface(
        "tensorrt_llm",
        "KVPOOL_TRTLLM_WHEEL",
        {
            "_torch/pyexecutor/connectors/kv_cache_connector.py": (
                "KvCacheConnectorScheduler",
                "KvCacheConnectorWorker",
                "RequestData",
                "SchedulerOutput",
            )
        },
        has_types=False,
    ),
}


def signatures(engine: str) -> list[str]:
    """The engine's lines; empty where its sources are not at hand."""
    interface = INTERFACES[engine]
    lines = []
    for module, classes in interface.modules.items():
        source = source_of(interface, module)
        for node in ast.parse(source).body if source else ():
            if isinstance(node, ast.ClassDef) and node.name in classes:
                lines += [f"{engine} {node.name}{member}" for member in _members(node, has_types=interface.has_types)]
    return lines


def recorded(engine: str) -> dict[str, list[str]]:
    """The engine's lines in the golden file, by version, the oldest first."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in GOLDEN.read_text().splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "#":
            name, _, of_version = rest.partition(" ")
            lines = found.setdefault(of_version, []) if name == engine else []
        else:
            lines.append(line)
    return found


def methods_of(lines: list[str], class_name: str) -> dict[str, ast.arguments]:
    """The parameters of a class's methods, by name."""
    found = {}
    for line in lines:
        _, _, signature = line.partition(" ")
        name, _, rest = signature.removesuffix("  (abstract)").removesuffix("  (property)").partition(".")
        if name == class_name and rest.endswith(":"):
            function = ast.parse(f"def {rest} ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            found[function.name] = function.args
    return found


def source_of(interface: Interface, module: str) -> bytes:
    """The source of one of an engine's modules; empty where it is not at hand."""
    wheel = os.environ.get(interface.wheel, "")
    if wheel:
        with zipfile.ZipFile(wheel) as archive:
            name = f"{interface.package}/{module}"
            return archive.read(name) if name in archive.namelist() else b""
    spec = find_spec(interface.package)
    path = Path(spec.origin).parent / module if spec is not None and spec.origin else None
    return path.read_bytes() if path is not None and path.is_file() else b""


def _members(node: ast.ClassDef, *, has_types: bool) -> Iterator[str]:
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign):
            yield f".{ast.unparse(entry if has_types else entry.target)}"
        if isinstance(entry, (ast.FunctionDef, ast.AsyncFunctionDef)):
            returns = f" -> {ast.unparse(entry.returns)}" if entry.returns and has_types else ""
            marks = {ast.unparse(mark) for mark in entry.decorator_list} & {"abstractmethod", "property"}
            suffix = f"  ({'abstract' if 'abstractmethod' in marks else 'property'})" if marks else ""
            taken = entry.args if has_types else _names_alone(entry.args)
            yield f".{entry.name}({ast.unparse(taken)}){returns}:{suffix}"


def _names_alone(arguments: ast.arguments) -> ast.arguments:
    bare = copy.deepcopy(arguments)
    bare.defaults, bare.kw_defaults = [], [None] * len(bare.kwonlyargs)
    for argument in (*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg):
        if argument is not None:
            argument.annotation = None
    return bare


def version_at_hand(engine: str) -> str:
    """The version of the engine's sources. Requires: they are at hand."""
    interface = INTERFACES[engine]
    wheel = os.environ.get(interface.wheel, "")
    return Path(wheel).name.split("-")[1] if wheel else version(packages_distributions()[interface.package][0])


def main() -> None:
    for engine in INTERFACES:
        known = recorded(engine)
        if found := signatures(engine):
            known[version_at_hand(engine)] = found
        for of_version, lines in known.items():
            sys.stdout.write("\n".join([f"# {engine} {of_version}", *lines, ""]))


if __name__ == "__main__":
    main()
