"""The rules of the tree, as tests: layers, names, what must not appear. The rule and its check are one thing."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.rigs.runs.for_each import for_each

ROOT = Path(__file__).parents[2]
POSITIONAL_MAX = 4
# Functions with more positional parameters than that: their signatures are the client library's public contract.
MANY_PARAMETERS = {
    ("client/kvpool_client/pool.py", "save"),
    ("client/kvpool_client/pool.py", "keys_from_hashes"),
}

PYTHON = sorted(
    path
    for folder in ("kvpool", "client", "tools", "studies", "tests", "demo", "examples")
    for path in (ROOT / folder).rglob("*.py*")
    if path.suffix == ".py"
)
NATIVE = sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in (".cpp", ".h"))
PRODUCT = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in {"kvpool", "client", "tools", "studies"}]

# The packages from the ground up, each with those that it may import.
PACKAGES: dict[str, set[str]] = {
    "kvpool": set(),
    "kvpool_client": {"kvpool"},
    "kvpool_blocks": {"kvpool", "kvpool_client"},
    "kvpool_sparse": {"kvpool", "kvpool_client"},
    "kvpool_tools": {"kvpool", "kvpool_client", "kvpool_blocks", "kvpool_sparse"},
    "studies": {"kvpool", "kvpool_client", "kvpool_blocks", "kvpool_sparse", "kvpool_tools"},
}
BASE = {
    *(
        "ids",
        "states",
        "usage",
        "events",
        "errors",
        "units",
        "layout",
        "layouts",
        "keys",
        "clock",
        "failpoint",
        "ownership",
        "escaping",
    ),
    *(
        "key_column",
        "packed_rows",
        "row_structs",
        "packed_numbers",
        "memory_limit",
        "log_pace",
        "socket_path",
        "_version",
        "version_option",
        "standard_streams",
    ),
}
# Which rooms of `kvpool` may import which: the layers of ARCHITECTURE.md from the ground up, base being open to all.
KVPOOL_LAYERS: dict[str, set[str]] = {
    "config": set(),
    "router_events": set(),
    "protocol": {"router_events"},
    "index": {"config"},
    "journal": {"config", "index", "tiers"},
    "peers": {"config", "protocol", "index"},
    "transfer": {"protocol", "peers"},
    "tiers": {"config", "index", "peers", "transfer"},
    "checks": {"index", "tiers", "transfer"},
    "tiering": {"config", "index", "tiers", "checks"},
    "pool": {"config", "protocol", "index", "journal", "tiers", "transfer", "checks", "tiering"},
    "server": {
        *("config", "protocol", "router_events", "index", "journal", "tiers", "peers", "tiering", "pool", "transfer")
    },
    "cli": {"config", "protocol", "server"},
}
LAYERS = {"kvpool": KVPOOL_LAYERS, "kvpool_tools": {"sim": set(), "bench": {"sim"}, "cli": {"sim", "bench"}}}
# Which rooms of the core may include which, from the ground up; bindings, tests, fuzz targets and benchmarks may include all.
NATIVE_LAYERS: dict[str, set[str]] = {
    "base": set(),
    "threads": {"base"},
    "frames": {"base"},
    "hash": {"base"},
    "checksum": {"base"},
    "records": {"base", "hash", "checksum"},
    "arena": {"base", "records"},
    "remote_index": {"base", "hash"},
    "shared_index": {"base", "hash", "records", "arena", "remote_index"},
    "eviction": {"base", "hash", "checksum", "records"},
    "retention": {"base", "records", "arena"},
    "holds": {"base", "records", "arena"},
    "directory": {"base", "hash", "records", "arena", "shared_index", "eviction", "retention", "holds"},
    "saves": {"base", "frames", "hash", "eviction", "holds", "directory"},
    "leases": {"base", "frames", "eviction", "directory", "saves"},
    "copy": {"base", "threads", "checksum", "shared_index"},
    "ssd": {"base", "threads", "checksum", "shared_index", "copy"},
    "net": {"base", "threads", "checksum", "shared_index", "copy"},
    "device": {"base", "copy"},
    "mover": {"base", "threads", "checksum", "shared_index", "copy", "device"},
    "near": {"base", "threads", "checksum", "shared_index", "copy", "net"},
    "sparse": {"base", "threads", "checksum", "copy"},
}
# What the packages of client/ may import of `kvpool`.
SHARED = {
    *(
        "ids",
        "states",
        "usage",
        "events",
        "key_column",
        "errors",
        "layout",
        "layouts",
        "keys",
        "clock",
        "failpoint",
        "protocol",
    ),
    *("router_events", "socket_path", "__version__"),
}
NAMES_REFUSED = {"utils", "helpers", "common", "misc", "manager"}
# Each of these counts what it catches, logs it once with its context, and keeps the rest alive. A reading of weights is refused
# with the reason, which the adapter counts and logs.
BROAD_EXCEPT_ALLOWED = {
    "kvpool/transfer/workers.py",
    "kvpool/server/connections/connection.py",
    "kvpool/server/connections/turns.py",
    "client/kvpool_client/engines/failure_guard.py",
    "client/kvpool_client/engines/weights_reading.py",
    "kvpool/server/events/publisher.py",
    "kvpool/peers/control/server.py",
}
# The last one is a process that runs without this package.
CLOCK_ALLOWED = {"kvpool/clock.py", "kvpool/failpoint.py", "kvpool/server/keeping/keeper_process.py"}
TIME_IS_READ_IN = ("tools/kvpool_tools/bench/", "tools/kvpool_tools/cli/commands/operate")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's tree, the tree itself first."""
    return tuple(ast.walk(ast.parse(text_of(path))))


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """The trees of all files end with the last test here: what stays would slow every later collection of garbage."""
    yield
    nodes_of.cache_clear()


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def _part(module: str, name: str) -> str:
    """The part of a package that an import names: `kvpool.index.leases` is `index`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else name


@for_each(PRODUCT, name_of)
def test_imports_go_down_only(path: Path) -> None:
    package, own = [*_module(path).split("."), ""][:2]
    above = {*PACKAGES, "demo", "examples", "tests"} - {package} - PACKAGES[package]
    for module, name in _imports(path):
        top, part = module.split(".")[0], _part(module, name)
        assert top not in above, f"imports {module}"
        if top == "kvpool" and path.is_relative_to(ROOT / "client"):
            assert part in SHARED, f"imports {module}"
        if top == package == "kvpool" and own in BASE:
            assert part in BASE, f"imports {module}"
        elif top == package and package in LAYERS:
            assert part in {own} | LAYERS[package].get(own, set()) | BASE | {"__version__"}, f"imports {module}"


def test_the_wheel_has_every_package_but_studies() -> None:
    found = re.search(r"^wheel.packages = \[(.*)\]$", text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    assert found
    folders = [ROOT / folder for folder in re.findall(r'"(.*?)"', found[1])]
    assert all((folder / "py.typed").exists() for folder in folders)
    assert {folder.name for folder in folders} == PACKAGES.keys() - {"studies"}


@for_each(NATIVE, name_of)
def test_native_includes_go_down_only(path: Path) -> None:
    room = path.relative_to(ROOT / "native").parts[0]
    included = set(re.findall(r'#include "([a-z_]+)/', text_of(path)))
    if room in {"bindings", "tests", "fuzz", "bench"}:
        assert included <= {*NATIVE_LAYERS, "tests"}
    else:
        refused = included - NATIVE_LAYERS[room] - {room}
        assert not refused, f"includes {', '.join(sorted(refused))}"


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] in {"client", "tools"} else parts).removesuffix(".__init__")


def _runs_at_import(path: Path) -> Iterator[tuple[str, str]]:
    """Imports that run when a module is imported: none in functions, none for type checkers alone."""
    waiting = list(ast.parse(text_of(path)).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_for_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            waiting += (
                [] if is_for_checkers else [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            )


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {_module(path): path for path in PRODUCT}
    needs = {
        name: {
            target
            for module, imported in _runs_at_import(path)
            for target in ([f"{module}.{imported}"] if f"{module}.{imported}" in modules else [module])
            if target in modules and not name.startswith(f"{target}.")
        }
        for name, path in modules.items()
    }
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    assert not needs, "these import one another"


def test_headers_stand_beside_their_sources() -> None:
    sources = {path.stem: path.parent for path in NATIVE if path.suffix == ".cpp"}
    for path in NATIVE:
        if path.suffix == ".h" and "tests" not in path.parts:
            assert sources.get(path.stem, path.parent) == path.parent, f"{name_of(path)} and its source are apart"


def test_unit_tests_are_found_by_package() -> None:
    packages = (ROOT / "kvpool", ROOT / "client" / "kvpool_client", ROOT / "tools" / "kvpool_tools")
    rooms = {path.name for package in packages for path in package.iterdir() if path.is_dir()}
    packages_of_client = {path.name.removeprefix("kvpool_") for path in (ROOT / "client").iterdir()}
    found = {path.name for path in (ROOT / "tests" / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    # `words` is what stands in kvpool/ itself, `native` the bindings.
    assert found - rooms - packages_of_client == {"words", "native", "studies"}


@for_each([*PYTHON, *NATIVE], name_of)
def test_files_are_named_for_one_thing(path: Path) -> None:
    assert not NAMES_REFUSED & set(path.relative_to(ROOT).with_suffix("").parts)
    assert not re.search(r"_v\d+$|\d$", path.stem) or path.stem in {
        "blake3",
        "test_blake3",
        "blake3_avx2",
        "blake3_avx512",
        "crc32c_avx512",
        "crc32c_sse42",
        "attention_avx2",
        "attention_avx512",
        "kernels_avx2",
        "kernels_avx512",
    }


@for_each(PYTHON, name_of)
def test_modules_say_what_they_are(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(text_of(path)))
    assert docstring, "no module docstring"
    is_question = re.match(r"(What|Who|Whose|Whether|How|Where|Which|When|Why)\b", docstring)
    assert not is_question, "the docstring begins with a question word"


@for_each(PRODUCT, name_of)
def test_what_could_be_mistaken_is_passed_by_name(path: Path) -> None:
    """At most four positional parameters: more are keyword-only, or one record. click passes those of commands by name."""
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            count = len(positional) - (positional[:1] in (["self"], ["cls"]))
            is_command = any(".command(" in ast.unparse(decorator) for decorator in node.decorator_list)
            is_public = (name_of(path), node.name) in MANY_PARAMETERS
            assert (count > POSITIONAL_MAX and not is_command) == is_public, f"{node.name} in line {node.lineno}"


@for_each(PRODUCT, name_of)
def test_public_functions_say_what_they_do(path: Path) -> None:
    for node in nodes_of(path):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if not node.name.startswith("_") and not _is_nested(path, node):
            assert ast.get_docstring(node), f"{node.name} in line {node.lineno} has no docstring"


def _is_nested(path: Path, wanted: ast.AST) -> bool:
    line = getattr(wanted, "lineno", 0)
    return any(first < line <= last for first, last in _functions(path))


@cache
def _functions(path: Path) -> tuple[tuple[int, int], ...]:
    """First and last line of each function."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple((node.lineno, node.end_lineno or 0) for node in nodes_of(path) if isinstance(node, functions))


@for_each([path for path in NATIVE if "bindings" in path.parts], name_of)
def test_bindings_keep_to_the_stable_interface(path: Path) -> None:
    """CPython's macros are no part of it, and the wheel for 3.12 and later would not compile: nanobind's NB_… are for both."""
    macros = re.findall(r"\bPy[A-Z][A-Za-z]*_[A-Z][A-Z_]+\(", text_of(path))
    assert not macros, f"has {macros}"


@for_each(PRODUCT, name_of)
def test_nothing_dangerous_is_used(path: Path) -> None:
    text = text_of(path)
    for word in ("pickle", "torch.load", "0.0.0.0", "tcp://*", "recv_pyobj"):
        assert word not in text, f"has {word}"
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile"}, f"calls {node.func.id} in line {node.lineno}"
        if isinstance(node, ast.ExceptHandler) and name_of(path) not in BROAD_EXCEPT_ALLOWED:
            caught = (
                set() if node.type is None else {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
            )
            is_broad = node.type is None or caught & {"Exception", "BaseException"}
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            assert passes_on or not is_broad, f"catches everything in line {node.lineno}"


@for_each(PRODUCT, name_of)
def test_time_and_chance_come_from_their_owners(path: Path) -> None:
    if name_of(path) in CLOCK_ALLOWED or name_of(path).startswith(TIME_IS_READ_IN):
        return  # this module is where time is read or measured
    for module, name in _imports(path):
        assert module not in {"random"}, "imports random"
        assert module != "time", "imports time"
        assert (module, name) != ("datetime", "datetime"), "imports datetime"


@for_each([*PYTHON, *NATIVE], name_of)
def test_no_work_is_left_for_later(path: Path) -> None:
    marks = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))
    assert not re.search(rf"\b({marks})\b", text_of(path))


@for_each(PRODUCT, name_of)
def test_columns_of_keys_are_cut_in_one_place(path: Path) -> None:
    """KEY_BYTES is used for the length of one key alone; only `KeyColumn` counts keys in packed bytes."""
    if name_of(path) == "kvpool/key_column.py":
        return  # this module is the place
    for node in nodes_of(path):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in {"range", "divmod", "slice"}
        if is_call or isinstance(node, (ast.BinOp, ast.Slice)):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            assert "KEY_BYTES" not in names, f"counts keys by their bytes in line {getattr(node, 'lineno', 0)}"


PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


@cache
def _files() -> tuple[str, ...]:
    return tuple(f"/{name_of(there)}" for there in (*PYTHON, *NATIVE, *PAGES, *(ROOT / "configs").iterdir()))


@for_each([*PRODUCT, *NATIVE, *PAGES], name_of)
def test_files_that_are_named_are_there(path: Path) -> None:
    """`leases.py` or (../index/leases.py) is the end of some file's path; an engine's own files are named otherwise."""
    for named in re.findall(r"[`(](?:\.\./)*([\w./-]+\.(?:py|h|cpp|md|toml|service))[`)#]", text_of(path)):
        assert named.startswith("/") or any(file.endswith(f"/{named}") for file in _files()), f"{named} is not there"


def test_the_client_is_thin() -> None:
    """`import kvpool_client` loads the standard library, msgpack, numpy, the native module and kvpool's base."""
    code = "import sys, kvpool_client; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    allowed = {"kvpool", "kvpool_client", "kvpool_native", "numpy", "msgpack"}
    foreign = {
        name.split(".")[0]
        for name in loaded
        if name.split(".")[0] not in allowed | set(sys.stdlib_module_names) and not name.startswith("_")
    }
    foreign -= {"sitecustomize", "usercustomize", "distutils-precedence", "cython_runtime"}
    assert not foreign
    parts = {name.split(".")[1] for name in loaded if name.startswith("kvpool.")}
    assert parts <= {
        *("ids", "states", "usage", "events", "key_column", "errors", "layout", "layouts", "keys", "clock", "protocol"),
        *(
            "router_events",
            "failpoint",
            "units",
            "ownership",
            "socket_path",
            "packed_numbers",
            "row_structs",
            "_version",
        ),
    }


def test_a_plain_daemon_has_no_numpy() -> None:
    """It costs 16 MiB of the memory of a daemon that does nothing, and 55 ms of its start. An SSD tier, a device, other nodes
    and self probes may bring it."""
    code = "import sys, kvpool.cli.serving; print(*(name for name in sys.modules if name.startswith('numpy')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []
