"""Name of an engine's connection: engine, place and rank, within the bound."""

import pytest

from kvpool.protocol.records.messages import CONNECTION_NAME_BYTES_MAX
from kvpool_client.engines.connection_name import connection_name


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAME", raising=False)
    monkeypatch.setenv("HOSTNAME", "node-3")


@pytest.mark.parametrize(
    ("rank", "world", "name"),
    [
        (0, 1, "vllm node-3"),
        (3, 8, "vllm node-3 rank 3 of 8"),
        (None, 8, "vllm node-3 scheduler"),
        (None, 1, "vllm node-3 scheduler"),
    ],
)
def test_a_rank_is_named_where_there_are_several(rank: int | None, world: int, name: str) -> None:
    assert connection_name("vllm", rank, world) == name


def test_the_pods_name_comes_before_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "llama-0")
    assert connection_name("sglang", 0, 1) == "sglang llama-0"


def test_without_either_the_kernels_name_of_the_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTNAME")
    monkeypatch.setattr("socket.gethostname", lambda: "kernel")
    assert connection_name("sglang", 0, 1) == "sglang kernel"


@pytest.mark.parametrize("place", ["x" * 500, "é" * 500])
def test_a_long_place_is_cut(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("HOSTNAME", place)
    name = connection_name("vllm", 7, 8)
    assert CONNECTION_NAME_BYTES_MAX - 1 <= len(name.encode()) <= CONNECTION_NAME_BYTES_MAX
    assert name.endswith(" rank 7 of 8")
