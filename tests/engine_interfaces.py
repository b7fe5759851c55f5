"""The signatures of engines' base classes, read out of their sources, which are not imported: of a package or a wheel.

    python -m tests.engine_interfaces > tests/golden/engine_interfaces.txt

writes what is at hand anew and keeps what is not. A line is a class and one of its methods; what is abstract says so.
"""

import ast
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "engine_interfaces.txt"


@dataclass(frozen=True)
class Interface:
    """Where an engine has the classes that an adapter derives from. `wheel`: the variable that may name its wheel."""

    package: str
    wheel: str
    modules: Mapping[str, tuple[str, ...]]


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
            )
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
    ),
}


def signatures(engine: str) -> list[str]:
    """The engine's lines; empty where its sources are not at hand."""
    interface = INTERFACES[engine]
    lines = []
    for module, classes in interface.modules.items():
        source = _source(interface, module)
        for node in ast.parse(source).body if source else ():
            if isinstance(node, ast.ClassDef) and node.name in classes:
                lines += [f"{engine} {node.name}{member}" for member in _members(node)]
    return lines


def recorded(engine: str) -> list[str]:
    """The engine's lines in the golden file."""
    return [line for line in GOLDEN.read_text().splitlines() if line.startswith(f"{engine} ")]


def methods_of(lines: list[str], class_name: str) -> dict[str, ast.arguments]:
    """The parameters of a class's methods, by name."""
    found = {}
    for line in lines:
        _, _, said = line.partition(" ")
        name, _, rest = said.removesuffix("  (abstract)").removesuffix("  (property)").partition(".")
        if name == class_name and rest.endswith(":"):
            function = ast.parse(f"def {rest} ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            found[function.name] = function.args
    return found


def _source(interface: Interface, module: str) -> bytes:
    wheel = os.environ.get(interface.wheel, "")
    if wheel:
        with zipfile.ZipFile(wheel) as archive:
            name = f"{interface.package}/{module}"
            return archive.read(name) if name in archive.namelist() else b""
    spec = find_spec(interface.package)
    path = Path(spec.origin).parent / module if spec is not None and spec.origin else None
    return path.read_bytes() if path is not None and path.is_file() else b""


def _members(node: ast.ClassDef) -> Iterator[str]:
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign):
            yield f".{ast.unparse(entry)}"
        if isinstance(entry, (ast.FunctionDef, ast.AsyncFunctionDef)):
            returns = f" -> {ast.unparse(entry.returns)}" if entry.returns else ""
            marks = {ast.unparse(mark) for mark in entry.decorator_list} & {"abstractmethod", "property"}
            said = f"  ({'abstract' if 'abstractmethod' in marks else 'property'})" if marks else ""
            yield f".{entry.name}({ast.unparse(entry.args)}){returns}:{said}"


def main() -> None:
    for engine in INTERFACES:
        for line in signatures(engine) or recorded(engine):
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
