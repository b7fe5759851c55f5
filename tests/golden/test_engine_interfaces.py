"""The interfaces of engines that the adapters are written for: recorded, compared where an engine is at hand, and kept to.

An engine is at hand in its own environment (`make test-engines`, `make test-engines-latest`) or as a wheel (`make
test-sglang`). What has changed there is read, the adapter follows, and `tests/engine_interfaces.py` writes the file anew.
"""

import pytest

from kvpool_client.vllm.connector import ConnectorCalls
from tests.engine_interfaces import INTERFACES, methods_of, recorded, signatures


@pytest.mark.parametrize("engine", INTERFACES)
def test_an_engine_at_hand_has_the_recorded_interface(engine: str) -> None:
    now = signatures(engine)
    if not now:
        pytest.skip(f"{engine} is neither installed here nor a wheel named by {INTERFACES[engine].wheel}")
    known = recorded(engine)
    gone, new = sorted(set(known) - set(now)), sorted(set(now) - set(known))
    assert now == known, f"gone: {gone}, new: {new}"


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
