"""The interfaces of engines that the adapters are written for: recorded, compared with an installed engine, and implemented.

An engine is at hand in its own environment (`make test-engines`, `make test-engines-latest`) or as a wheel (`make
test-sglang`). What has changed there is read, the adapter follows, and `tests/rigs/engine_interfaces.py` writes the file anew.
"""

import ast
import inspect

import pytest

from kvpool_client.vllm.connector import ConnectorCalls
from tests.engines.trtllm import interface as trtllm_interface
from tests.rigs.engine_interfaces import INTERFACES, methods_of, recorded, recorded_version, signatures


@pytest.mark.parametrize("engine", INTERFACES)
def test_an_engine_at_hand_has_the_recorded_interface(engine: str) -> None:
    now = signatures(engine)
    if not now:
        pytest.skip(f"{engine} is neither installed here nor a wheel named by {INTERFACES[engine].wheel}")
    known = recorded(engine)
    gone, new = sorted(set(known) - set(now)), sorted(set(now) - set(known))
    assert now == known, f"gone: {gone}, new: {new}"


@pytest.mark.parametrize("engine", INTERFACES)
def test_the_recorded_interface_names_its_version(engine: str) -> None:
    assert recorded_version(engine)
    assert len(recorded(engine)) > 20


@pytest.mark.parametrize(
    ("class_name", "own"),
    [("KvCacheConnectorScheduler", "KVPoolScheduler"), ("KvCacheConnectorWorker", "KVPoolWorker")],
)
def test_the_connector_and_the_tests_stand_in_take_what_tensorrt_llm_gives(class_name: str, own: str) -> None:
    """Arguments are given by place, so their number and order count."""
    methods = methods_of(recorded("tensorrt_llm"), class_name)
    abstract = {line.split(".")[1].partition("(")[0] for line in recorded("tensorrt_llm") if "(abstract)" in line}
    with trtllm_interface.installed():
        import kvpool_client.trtllm as adapter

        served = getattr(adapter, own)
        for kind in (served, getattr(trtllm_interface, class_name)):
            taken = {
                name: method for name, method in vars(kind).items() if inspect.isfunction(method) and name in methods
            }
            assert abstract & methods.keys() <= taken.keys(), kind
            for name, method in taken.items():
                assert list(inspect.signature(method).parameters) == _names(methods[name]), (kind, name)


def _names(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in arguments.args]


def test_the_connector_takes_what_vllm_gives() -> None:
    methods = methods_of(recorded("vllm"), "KVConnectorBase_V1")
    overridden = 0
    for name, method in vars(ConnectorCalls).items():
        function = getattr(method, "__func__", method)
        if name in methods and callable(function) and not name.startswith("__"):
            taken = function.__code__.co_varnames[: function.__code__.co_argcount]
            assert [argument.arg for argument in methods[name].args] == list(taken), name
            overridden += 1
    assert overridden > 15
