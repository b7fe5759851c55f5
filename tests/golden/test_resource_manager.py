"""TensorRT-LLM's resource manager: what kvpool's takes of the recorded methods, and what a wheel at hand has of them.

The file has the methods that `kvpool_blocks.executor` serves, of all that TensorRT-LLM's class has.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest

from tests.rigs.engine_interfaces import INTERFACES, Interface, source_of

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_blocks import executor  # noqa: E402

pytestmark = pytest.mark.torch

GOLDEN = Path(__file__).parent / "trtllm_resource_manager.txt"
MODULE = "_torch/pyexecutor/resource_manager.py"
LINE = re.compile(r"(\w+)\.(\w+)(\(.*?\))(  \(abstract\))?")


def _recorded() -> list[tuple[str, str, ast.arguments, bool]]:
    """Class, method, parameters, and whether it is abstract."""
    found = []
    for line in GOLDEN.read_text().splitlines()[1:]:
        match = LINE.fullmatch(line)
        assert match, line
        function = ast.parse(f"def f{match[3]}: ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        found.append((match[1], match[2], function.args, match[4] is not None))
    return found


@pytest.mark.parametrize(("class_name", "method", "arguments", "is_abstract"), _recorded())
def test_ours_takes_what_tensorrt_llm_gives(
    class_name: str, method: str, arguments: ast.arguments, is_abstract: bool
) -> None:
    """The parameters given by place have the same order; every other name is taken, or refused by name at the call."""
    ours = getattr(getattr(executor, class_name), method)
    taken = inspect.signature(ours).parameters
    is_open = any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken.values())
    by_place = [name for name, parameter in taken.items() if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    wanted = [argument.arg for argument in arguments.args]
    assert by_place == wanted[: len(by_place)]
    missing = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)} - set(taken)
    assert is_open or not missing, missing
    assert is_open or arguments.kwarg is None
    assert not is_abstract or getattr(ours, "__isabstractmethod__", False)


def test_a_wheel_at_hand_has_the_recorded_methods() -> None:
    package = INTERFACES["tensorrt_llm"]
    source = source_of(Interface(package.package, package.wheel, {}), MODULE)
    if not source:
        pytest.skip(f"tensorrt_llm is neither installed here nor a wheel named by {package.wheel}")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for class_name, method, arguments, _ in _recorded():
        now = {node.name: node.args for node in classes[class_name].body if isinstance(node, ast.FunctionDef)}
        names = [argument.arg for argument in (*now[method].args, *now[method].kwonlyargs)]
        assert {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)} <= set(names), (
            class_name,
            method,
        )
