"""The interfaces of engines that the adapters are written for: recorded, compared with an installed engine, and implemented.

An engine is at hand in its own environment (`make test-engines`, `make test-engines-latest`) or as a wheel (`make
test-sglang`, `make test-lmcache`). What has changed there is read, the adapter follows, and `tests/rigs/engine_interfaces.py`
writes the file anew.
Of an engine whose adapter serves several versions each is recorded.
"""

import ast
import inspect
from dataclasses import field as dataclass_field
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool.events import Event, EventKind
from kvpool.layout import Layout
from kvpool.router_events.vllm_format import EventForm
from kvpool.states import Level
from kvpool_client.vllm import tier
from kvpool_client.vllm.connector import ConnectorCalls
from kvpool_client.vllm.event_feed import _maker_of
from tests.engines.lmcache import standin as lmcache_standin
from tests.engines.trtllm import interface as trtllm_interface
from tests.rigs.engine_interfaces import INTERFACES, methods_of, recorded, signatures, version_at_hand

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=16, chunk_tokens=16)


@pytest.mark.parametrize("engine", INTERFACES)
def test_an_engine_at_hand_has_the_recorded_interface(engine: str) -> None:
    now = signatures(engine)
    if not now:
        pytest.skip(f"{engine} is neither installed here nor a wheel named by {INTERFACES[engine].wheel}")
    version, versions = version_at_hand(engine), recorded(engine)
    assert version in versions, f"{engine} {version} is not recorded, but {list(versions)}"
    known = versions[version]
    gone, new = sorted(set(known) - set(now)), sorted(set(now) - set(known))
    assert now == known, f"gone: {gone}, new: {new}"


@pytest.mark.parametrize("engine", INTERFACES)
def test_the_recorded_interface_names_its_versions(engine: str) -> None:
    versions = recorded(engine)
    assert versions
    assert all(version and len(lines) > 20 for version, lines in versions.items())


@pytest.mark.parametrize(
    ("class_name", "own"),
    [("KvCacheConnectorScheduler", "KVPoolScheduler"), ("KvCacheConnectorWorker", "KVPoolWorker")],
)
def test_the_connector_and_the_tests_stand_in_take_what_tensorrt_llm_gives(class_name: str, own: str) -> None:
    """Arguments are given by place, so their number and order count."""
    (lines,) = recorded("tensorrt_llm").values()
    methods = methods_of(lines, class_name)
    abstract = {line.split(".")[1].partition("(")[0] for line in lines if "(abstract)" in line}
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


@pytest.mark.parametrize("version", recorded("lmcache"))
def test_the_adapter_and_the_tests_stand_in_take_what_lmcache_gives(version: str) -> None:
    lines = [line for line in recorded("lmcache")[version] if line.startswith("lmcache L2AdapterInterface.")]
    methods = methods_of(lines, "L2AdapterInterface")
    abstract = {line.split(".")[1].partition("(")[0] for line in lines if "(abstract)" in line}
    with lmcache_standin.installed():
        from kvpool_client.lmcache import KVPoolAdapter

        for kind in (KVPoolAdapter, lmcache_standin.L2AdapterInterface):
            taken = {name: method for name, method in vars(kind).items() if name in methods and name != "__init__"}
            assert abstract <= taken.keys(), kind
            for name, method in taken.items():
                assert list(inspect.signature(method).parameters) == _names(methods[name]), (kind, name)


def _names(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in arguments.args]


@pytest.mark.parametrize("version", recorded("vllm"))
def test_the_connector_takes_what_vllm_gives(version: str) -> None:
    methods = methods_of(recorded("vllm")[version], "KVConnectorBase_V1")
    overridden = 0
    for name, method in _methods_of_the_connector().items():
        function = getattr(method, "__func__", method)
        if name in methods and inspect.isfunction(function):
            taken = function.__code__.co_varnames[: function.__code__.co_argcount]
            assert [argument.arg for argument in methods[name].args] == list(taken), name
            overridden += 1
    assert overridden > 30


@pytest.mark.parametrize("version", recorded("vllm"))
def test_the_tier_takes_what_vllm_gives_and_gives_what_vllm_takes(version: str) -> None:
    """Its class, whose base is vLLM's, is read and not made."""
    lines = recorded("vllm")[version]
    methods = methods_of(lines, "SecondaryTierManager")
    abstract = {
        line.split(".")[1].partition("(")[0]
        for line in lines
        if "SecondaryTierManager." in line and "(abstract)" in line
    }
    source = ast.parse((Path(tier.__file__).parent / "tier.py").read_text())
    (own,) = (node for node in source.body if isinstance(node, ast.ClassDef))
    taken = {node.name: _names(node.args) for node in own.body if isinstance(node, ast.FunctionDef)}
    assert abstract <= taken.keys()
    known = taken.keys() & methods.keys()
    assert {name: taken[name] for name in known} == {name: _names(methods[name]) for name in known}
    assert {name for name in taken if not name.startswith("_")} <= methods.keys()
    fields = {line.removeprefix("vllm ").partition(":")[0] for line in lines}
    assert {f"TransferJob.{name}" for name in ("job_id", "keys", "chunk_ids", "req_context")} <= fields
    assert [line for line in lines if line.startswith("vllm JobResult.")][:4] == [
        "vllm JobResult.job_id: JobId",
        "vllm JobResult.success: bool",
        "vllm JobResult.successful_keys: Collection[OffloadKey] | None = None",
        "vllm JobResult.transfer_time: float | None = None",
    ], "three are given by place, the fourth by name"
    asked = _names(methods_of(lines, "ReqContext")["get_offload_key_position"])
    assert asked == ["self", "key"]
    assert _names(methods_of(lines, "EngineCore")["collective_rpc"])[:2] == ["self", "method"]


def test_the_connector_has_what_vllm_asks_of_one_before_its_memory_goes() -> None:
    """Each of them is in some release, so that a misspelled one is noticed."""
    asked = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
    assert asked <= _methods_of_the_connector().keys()
    versions = recorded("vllm").values()
    assert [asked & methods_of(lines, "KVConnectorBase_V1").keys() for lines in versions] == [set(), asked]


def _methods_of_the_connector() -> dict[str, object]:
    own = [kind for kind in ConnectorCalls.__mro__ if kind.__module__.startswith("kvpool_client.")]
    return {name: method for kind in reversed(own) for name, method in vars(kind).items() if not name.startswith("__")}


def _event_record(lines: list[str], name: str) -> type:
    """vLLM's record of an event as the golden file has it, which refuses fields that it has not."""
    fields = [
        line.removeprefix(f"vllm {name}.") for line in lines if line.startswith(f"vllm {name}.") and "(" not in line
    ]
    parsed = [ast.parse(field).body[0] for field in fields]
    known = [
        (str(ast.unparse(node.target)), node.value is not None) for node in parsed if isinstance(node, ast.AnnAssign)
    ]
    made = make_dataclass(
        name,
        [
            (field, object, dataclass_field(default=None)) if is_optional else (field, object)
            for field, is_optional in known
        ],
    )
    made.__struct_fields__ = tuple(field for field, _ in known)  # type: ignore[attr-defined]  # as vLLM's structs have them
    return made


@pytest.mark.parametrize("version", recorded("vllm"))
def test_the_pools_events_have_every_field_that_vllms_need(version: str) -> None:
    lines = recorded("vllm")[version]
    names = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
    make = _maker_of(SimpleNamespace(**{name: _event_record(lines, name) for name in names}), group=3)
    tokens = np.arange(LAYOUT.chunk_tokens, dtype="<i4").tobytes()
    stored = Event(1, EventKind.STORED, keys=bytes(32), parent=b"p" * 32, tokens=tokens, tiers=1 << Level.DRAM)
    stored = stored._replace(adapter="tuned", salt_tag=b"salt")
    removed = Event(2, EventKind.REMOVED, keys=bytes(32), tiers_before=1 << Level.DRAM)
    form = EventForm(block_tokens=LAYOUT.chunk_tokens)
    made = []
    for event in (stored, removed):
        for wire in form.events_of(event, "m", LAYOUT):
            assert isinstance(wire, dict)
            made.append(make(wire.pop("type"), wire))
    made.append(make("AllBlocksCleared", {}))
    assert [type(event).__name__ for event in made] == list(names)
    first = vars(made[0])
    assert (first["lora_name"], first["medium"], first["group_idx"]) == ("tuned", "CPU", 3)
    assert first.get("lookahead_token_ids") is None, "a block's name covers its own tokens alone"
