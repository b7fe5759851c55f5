"""Settings of every adapter: what is wrong is named with its value and what was expected, all faults at once."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvpool.errors import ConfigError
from kvpool_client.lmcache.settings import Settings as LmcacheSettings
from kvpool_client.sglang.settings import HICACHE, LINKER
from kvpool_client.sglang.settings import Settings as SglangSettings
from kvpool_client.trtllm.settings import Settings as TrtllmSettings
from kvpool_client.vllm.settings import Settings as VllmSettings
from kvpool_client.vllm.tier.settings import Settings as TierSettings

ARGUMENTS = SimpleNamespace(model="m", kv_cache_config=SimpleNamespace(tokens_per_block=32))
LONG = "m" * 301
NAME = "a name of 1 to 300 bytes, or none"
TIME = "a number of seconds 0.001..3600"


class Adapter(NamedTuple):
    """How an adapter reads what is given, where that stands, and how its names are spelled there."""

    read: Callable[[Mapping[str, object]], Any]
    where: str = ""
    spelled: Callable[[str], str] = str


ADAPTERS = {
    "lmcache": Adapter(LmcacheSettings.read, "l2-adapter adapter_params: "),
    "hicache": Adapter(lambda given: SglangSettings.read({"interface_v1": 1, **given}, "m"), f"{HICACHE}: "),
    "linker": Adapter(lambda given: SglangSettings.read(given, "m", LINKER), f"{LINKER}: "),
    "vllm": Adapter(VllmSettings.of, "", lambda name: f"kvpool.{name}"),
    "tier": Adapter(TierSettings.of, "secondary_tiers, kvpool's: "),
    "trtllm": Adapter(
        lambda given: TrtllmSettings.read(ARGUMENTS, {name: str(value) for name, value in given.items()}, "1"),
        "",
        lambda name: f"TLLM_KVPOOL_{name.upper()}",
    ),
}
ALL = tuple(ADAPTERS)
OF_JSON = tuple(name for name in ALL if name != "trtllm")
SHARING = tuple(name for name in ALL if name != "vllm")  # those that have a revision and a salt
WITH_PRIORITY = ("lmcache", "hicache", "linker", "tier")
RIGHT: dict[str, dict[str, object]] = {
    "lmcache": {"task_timeout_s": 120, "lock_timeout_s": 0.001, "priority": 0},
    "hicache": {"batch_timeout_s": 3600, "model": "served", "priority": 100},
    "linker": {"promise_s": 0.1, "scheduler_timeout_s": 1, "updates_are_named": True},
    "vllm": {"wait_s": 0, "load": "sync", "chunk_tokens": 0, "head_groups": 1024, "announce": False},
    "tier": {"queue_jobs": 65536, "reset": "node", "locality": "REMOTE"},
    "trtllm": {"retention_s": 4_000_000, "claim_timeout_s": 0.001},
}


def _faults(adapter: str, given: dict[str, object]) -> list[str]:
    """What is named, without where it stands."""
    read, where, spelled = ADAPTERS[adapter]
    with pytest.raises(ConfigError) as caught:
        read({spelled(name): value for name, value in given.items()})
    assert all(fault.startswith(where) for fault in caught.value.faults)
    assert str(caught.value) == "\n".join(caught.value.faults)
    return [fault.removeprefix(where) for fault in caught.value.faults]


WRONG = [
    (ALL, "socket", "", "a path of 1 to 107 bytes"),
    (ALL, "socket", "a\0b", "a path of 1 to 107 bytes"),
    (ALL, "socket", "kvpool.sock", "an absolute path"),
    (ALL, "socket", "unix:///x", "a path without a scheme, such as /run/kvpool/kvpool.sock"),
    (OF_JSON, "socket", b"/run/kvpool.sock", "a path of 1 to 107 bytes"),
    (OF_JSON, "socket", "\ud800", "a path of 1 to 107 bytes"),
    (ALL, "timeout_s", 0, TIME),
    (ALL, "timeout_s", 3601, TIME),
    (ALL, "timeout_s", float("nan"), TIME),
    (OF_JSON, "timeout_s", True, TIME),
    (OF_JSON, "timeout_s", "1", TIME),
    (OF_JSON, "timeout_s", None, TIME),
    (ALL, "copy_threads", 0, "an integer 1..64"),
    (ALL, "copy_threads", 65, "an integer 1..64"),
    (ALL, "copy_threads", 1.5, "an integer 1..64"),
    (OF_JSON, "copy_threads", True, "an integer 1..64"),
    (SHARING, "revision", " \t", "a name, or none"),
    (SHARING, "salt", "\udc80", "a string"),
    (WITH_PRIORITY, "revision", 1, "a name, or none"),
    (WITH_PRIORITY, "salt", 3, "a string"),
    (WITH_PRIORITY, "priority", 101, "an integer 0..100"),
    (WITH_PRIORITY, "priority", 5.5, "an integer 0..100"),
    (("hicache", "linker", "vllm", "tier", "trtllm"), "model", LONG, NAME),
    (("hicache", "linker", "vllm", "tier", "trtllm"), "model", "é" * 151, NAME),
    (("hicache", "linker", "vllm", "tier", "trtllm"), "model", "a\nb", NAME),
    (("hicache", "linker", "vllm", "tier", "trtllm"), "model", "  ", NAME),
    (("hicache", "linker", "vllm", "tier"), "model", 7, NAME),
    (("lmcache",), "task_timeout_s", 121, "a number of seconds 0.001..120"),  # LMCache frees after 300 s
    (("linker",), "promise_s", 0, "a number of seconds 0.1..3600"),
    (("linker",), "updates_are_named", 1, "true or false"),
    (("vllm",), "wait_s", -1, "a number of seconds 0..3600"),
    (("vllm",), "always_load", 1, "true or false"),
    (("vllm",), "events", None, "true or false"),
    (("vllm",), "load", "eager", "'async' or 'sync'"),
    (("vllm",), "chunk_tokens", 1.5, "an integer 0..1048576"),
    (("vllm", "tier"), "reset", "all", "'engine' or 'node'"),
    (("tier",), "locality", 1, "'LOCAL' or 'REMOTE'"),
    (("tier",), "queue_jobs", True, "an integer 1..65536"),
    (("trtllm",), "timeout_s", "soon", TIME),
    (("trtllm",), "staging_mib", 0, "an integer 1..1048576"),
    (("trtllm",), "retention_s", 0, "a number of seconds 0.001..4000000"),
]


@pytest.mark.parametrize(
    ("adapter", "name", "value", "expected"),
    [(adapter, *case) for adapters, *case in WRONG for adapter in adapters],
)
def test_a_wrong_value_is_named_with_what_was_expected(adapter: str, name: str, value: object, expected: str) -> None:
    shown = str(value) if adapter == "trtllm" and name in ("socket", "revision", "salt", "model") else value
    spelled = ADAPTERS[adapter].spelled(name)
    assert _faults(adapter, {name: value}) == [f"{spelled} is {shown!r:.80}, expected {expected}"]


@pytest.mark.parametrize("adapter", ALL)
def test_all_faults_are_named_at_once(adapter: str) -> None:
    faults = _faults(adapter, {"sokcet": "/x", "timeout_s": 0, "copy_threads": 65})
    named = [fault.partition(" is ")[0] for fault in faults]
    assert named == [ADAPTERS[adapter].spelled(name) for name in ("sokcet", "timeout_s", "copy_threads")]


@pytest.mark.parametrize("adapter", ALL)
def test_an_unknown_name_brings_the_nearest_one(adapter: str) -> None:
    spelled = ADAPTERS[adapter].spelled
    assert _faults(adapter, {"sokcet": "/x"}) == [
        f"{spelled('sokcet')} is no setting, did you mean {spelled('socket')}?"
    ]


def test_where_none_is_near_all_are_named() -> None:
    known = "socket, revision, salt, timeout_s, copy_threads, priority, task_timeout_s, lock_timeout_s"
    assert _faults("lmcache", {"Q": 1}) == [f"Q is no setting, expected one of {known}"]


@pytest.mark.parametrize(
    ("adapter", "given", "fault"),
    [
        ("lmcache", {"timeout_s": 11}, "timeout_s is 11, expected no more than task_timeout_s, 10.0 by default"),
        ("lmcache", {"task_timeout_s": 0.5}, "timeout_s is 1.0 by default, expected no more than task_timeout_s, 0.5"),
        ("hicache", {"timeout_s": 11}, "timeout_s is 11, expected no more than batch_timeout_s, 10.0 by default"),
        ("tier", {"batch_timeout_s": 0.9}, "timeout_s is 1.0 by default, expected no more than batch_timeout_s, 0.9"),
        (
            "linker",
            {"timeout_s": 0.04},
            "scheduler_timeout_s is 0.05 by default, expected no more than timeout_s, 0.04",
        ),
    ],
)
def test_a_time_within_another_is_no_longer(adapter: str, given: dict[str, object], fault: str) -> None:
    assert _faults(adapter, given) == [fault]
    assert _faults(adapter, {**given, "copy_threads": 0})[1:] == [fault], "beside a fault elsewhere"


def test_variables_are_in_the_same_order() -> None:
    fault = "TLLM_KVPOOL_CLAIM_TIMEOUT_S is 0.6, expected no more than TLLM_KVPOOL_TIMEOUT_S, 0.5 by default"
    assert _faults("trtllm", {"claim_timeout_s": 0.6}) == [fault]


@pytest.mark.parametrize("adapter", ALL)
def test_what_is_right_is_taken_and_the_rest_has_defaults(adapter: str) -> None:
    read, _, spelled = ADAPTERS[adapter]
    given = {"socket": "/run/x.sock", "timeout_s": 1, "copy_threads": 64, **RIGHT[adapter]}
    settings, plain = read({spelled(name): value for name, value in given.items()}), read({})
    assert all(getattr(settings, name) == value for name, value in given.items())
    assert plain.copy_threads < 64
    assert settings.copy_threads == 64


@pytest.mark.parametrize("adapter", ALL)
def test_the_socket_of_the_environment_is_checked_too(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_SOCKET", "kvpool.sock")
    assert _faults(adapter, {}) == ["KVPOOL_SOCKET is 'kvpool.sock', expected an absolute path"]
    assert ADAPTERS[adapter].read({ADAPTERS[adapter].spelled("socket"): "/x.sock"}).socket == "/x.sock"


def test_an_empty_name_is_none() -> None:
    assert SglangSettings.read({"interface_v1": 1, "model": ""}, "tiny").model == "tiny"
    assert TierSettings.of({"model": "", "revision": ""}) == TierSettings()
    assert TrtllmSettings.read(ARGUMENTS, {"TLLM_KVPOOL_MODEL": ""}, "1").model == "m"
    with pytest.raises(ConfigError, match="model is empty and SGLang names none"):
        SglangSettings.read({"interface_v1": 1}, None)


def test_without_its_interface_hicache_is_refused() -> None:
    with pytest.raises(ConfigError, match="interface_v1 is not set, expected 1"):
        SglangSettings.read({}, "tiny")
    with pytest.raises(ConfigError, match="interface_v1 is no setting"):
        SglangSettings.read({"interface_v1": 1}, "tiny", LINKER)


def test_sizes_are_given_in_mib_and_variables_in_capitals() -> None:
    read = ADAPTERS["trtllm"].read
    settings = read({"TLLM_KVPOOL_STAGING_MIB": "3", "TLLM_KVPOOL_WINDOW_MIB": "2", "PATH": "/bin"})
    assert (settings.staging_bytes, settings.window_bytes) == (3 << 20, 2 << 20)
    assert read({"TLLM_KVPOOL_STAGING_MIB": "1e3", "TLLM_KVPOOL_COPY_THREADS": "2.0"}).staging_bytes == 1000 << 20
    with pytest.raises(ConfigError, match="TLLM_KVPOOL_salt is no setting, did you mean TLLM_KVPOOL_SALT"):
        read({"TLLM_KVPOOL_salt": "x"})


def test_other_keys_of_vllms_are_not_looked_at() -> None:
    assert VllmSettings.of({"other.key": 1, 7: 1}) == VllmSettings()  # type: ignore[dict-item]  # as in a file of YAML
