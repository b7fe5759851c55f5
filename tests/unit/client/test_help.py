"""Help of public names: who reads `help()` finds what a thing is, how to get one, shapes, dtypes, units, errors and threads."""

import ast
import dataclasses
import enum
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvpool_client
import kvpool_sparse

PACKAGES = ["kvpool_client", "kvpool_blocks", "kvpool_sparse"]
PACKAGES += ["kvpool_client.torch"] if importlib.util.find_spec("torch") else []
# Imported by who has transformers; not re-exported by a package.
TRANSFORMERS = Path(kvpool_sparse.__file__).parent / "transformers_attention.py"
# Classes that callers construct; any other one's help names what answers it.
CONSTRUCTED = {
    *("Layout", "Group", "Share", "TokenRange", "SparseConfig", "SparseSequence"),
    *("BlockPool", "KVCacheManager", "PagedPrefixCache", "Prompt"),
}
# Parameters that are arrays where they are no number, whatever their annotation.
ARRAYS = {"layers", "into", "from_", "k", "v", "q"}
SHAPE = re.compile(r"\[[\w ,*·+…-]+\]")
DTYPE = re.compile(r"\b(dtypes?|u?int\d+|float\d+|bool)\b")
CHECKS = re.compile(r"_?check(ed)?_\w+|_?check")


def package_of(name: str) -> ModuleType:
    if name != "kvpool_client" and name != "kvpool_sparse":
        pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")
    return importlib.import_module(name)


def public_of(name: str) -> dict[str, Any]:
    package = package_of(name)
    return {public: getattr(package, public) for public in package.__all__ if not public.startswith("__")}


def is_function(thing: Any) -> bool:
    return inspect.isfunction(inspect.unwrap(thing))


def is_record(thing: Any) -> bool:
    return dataclasses.is_dataclass(thing) or (inspect.isclass(thing) and issubclass(thing, tuple))


def fields_of(record: type) -> list[str]:
    """The fields that callers see of a record, but those of its base."""
    return [name for name in inspect.get_annotations(record) if not name.startswith("_")]


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties that a class shows, but those of another package's making."""
    for name, member in inspect.getmembers(cls):
        member = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
        if not name.startswith("_") and inspect.isfunction(member) and member.__module__.startswith("kvpool"):
            yield name, member


def helps_of(package: str) -> Iterator[tuple[str, str | None]]:
    """The help of each function and class of a package, and of the methods and properties of its classes."""
    for name, thing in public_of(package).items():
        if inspect.isclass(thing):
            yield name, vars(thing).get("__doc__")
            yield from ((f"{name}.{member}", inspect.getdoc(function)) for member, function in members_of(thing))
        elif is_function(thing):
            yield name, thing.__doc__


def callables_of(package: str) -> Iterator[tuple[str, Any, str]]:
    """Each function of a package, each constructor that callers call and each method of its classes, with its help."""
    for name, thing in public_of(package).items():
        if inspect.isclass(thing):
            if name in CONSTRUCTED:
                made = vars(thing).get("__post_init__" if is_record(thing) else "__init__")
                yield from [(name, made, f"{inspect.getdoc(thing)}\n{made.__doc__}")] if made else []
            yield from (
                (f"{name}.{member}", function, inspect.getdoc(function) or "") for member, function in members_of(thing)
            )
        elif is_function(thing):
            yield name, inspect.unwrap(thing), inspect.getdoc(thing) or ""


def raises(function: Any) -> bool:
    """True for a function that raises an error by itself, or has an argument checked; what it catches again does not count."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tried = [node for block in ast.walk(tree) if isinstance(block, ast.Try) and block.handlers for node in block.body]
    caught = {inner for node in tried for inner in ast.walk(node)}
    return any(
        (isinstance(node, ast.Raise) and node.exc is not None)
        or (isinstance(node, ast.Call) and CHECKS.fullmatch(ast.unparse(node.func).rpartition(".")[2]))
        for node in ast.walk(tree)
        if node not in caught
    )


def has_arrays(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    annotations = [str(function.__annotations__.get("return", "")), *(str(each.annotation) for each in parameters)]
    return any(re.search(r"\b(NDArray|ndarray|Tensor)\b", text) for text in annotations) or any(
        each.name in ARRAYS and each.annotation not in (int, "int", "int | None") for each in parameters
    )


def floats_of(function: Any) -> set[str]:
    annotations = {name: str(kind) for name, kind in function.__annotations__.items()}
    answer = annotations.pop("return", "")
    names = {name for name, kind in annotations.items() if re.search(r"\bfloat\b", kind)}
    return names | ({function.__name__} if re.match(r"(<class ')?float", answer) else set())


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_has_help_of_its_own_that_is_written_for_callers(package: str) -> None:
    faults = []
    for name, text in helps_of(package):
        if not text or text.startswith(f"{name}("):
            faults.append(f"{name} has no help of its own")
        elif re.match(r"See\b", text) or "the module" in text:
            faults.append(f"the help of {name} is somewhere else")
        elif re.search(r"`_(?!_)\w+", text):
            faults.append(f"the help of {name} has names that are nobody else's")
    assert not faults


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_constructed_names_its_parameters_and_what_is_not_names_what_answers_it(package: str) -> None:
    faults = []
    public = public_of(package)
    every = {**public_of("kvpool_client"), **public}
    for name, thing in public.items():
        if is_function(thing) or name in CONSTRUCTED or is_record(thing):
            text = f"{inspect.getdoc(thing)}\n{getattr(thing, '__init__', thing).__doc__}"
            parameters = fields_of(thing) if is_record(thing) else inspect.signature(thing).parameters
            faults += [
                f"the help of {name} does not name {each}" for each in parameters if not re.search(rf"\b{each}\b", text)
            ]
        if inspect.isclass(thing) and name not in CONSTRUCTED and not issubclass(thing, (enum.Enum, Exception)):
            named = re.findall(r"`(?:(\w+)\.[\w.]+|connect)`", inspect.getdoc(thing) or "")
            if not any(maker in every or maker == "" for maker in named):
                faults.append(f"the help of {name} does not name what answers it")
    assert not faults


@pytest.mark.parametrize("package", PACKAGES)
def test_what_takes_or_answers_arrays_has_their_shapes_and_dtypes(package: str) -> None:
    faults = []
    for name, function, text in callables_of(package):
        if has_arrays(function):
            faults += [f"the help of {name} has no shape"] * (SHAPE.search(text) is None)
            faults += [f"the help of {name} has no dtype"] * (DTYPE.search(text) is None)
    assert not faults


@pytest.mark.parametrize("package", PACKAGES)
def test_each_float_has_a_unit(package: str) -> None:
    faults = [
        f"{each} of {name} has no unit"
        for name, function, text in callables_of(package)
        for each in floats_of(function)
        if not each.endswith(("_s", "_share", "_size"))
        and not re.search(rf"`{each}`[^.]*\b(seconds|bytes|share)\b", text)
    ]
    assert not faults


@pytest.mark.parametrize("package", PACKAGES)
def test_who_raises_an_error_has_it_in_the_help(package: str) -> None:
    faults = [
        f"the help of {name} has no errors"
        for name, function, text in callables_of(package)
        if raises(function) and not re.search(r"\b[Rr]aises\b", text)
    ]
    assert not faults


@pytest.mark.parametrize("package", PACKAGES)
def test_each_class_with_a_life_names_its_threads(package: str) -> None:
    faults = [
        f"the help of {name} has no threads"
        for name, thing in public_of(package).items()
        if inspect.isclass(thing) and not is_record(thing) and not issubclass(thing, (enum.Enum, Exception))
        if not re.search(r"\bthreads?\b", (inspect.getdoc(thing) or "").lower())
    ]
    assert not faults


def test_the_help_of_a_lease_has_what_callers_do_with_it() -> None:
    assert [name for name, _ in members_of(kvpool_client.Lease)] == [
        "cost_s",
        "held",
        "ranges",
        "release",
        "ticket",
        "tiers",
    ]


def test_a_public_name_is_one_thing_in_all_packages() -> None:
    found: dict[str, Any] = dict.fromkeys(
        node.name
        for node in ast.parse(TRANSFORMERS.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    )
    assert "layout_of_model" in found
    for package in {*PACKAGES, "kvpool_client.torch"}:
        for name, thing in public_of(package).items():
            assert found.setdefault(name, thing) is thing, f"{name} is two things"
