"""NIXL's agents of other nodes, with a library that keeps a record: whose they are, how many, and what is given back."""

import mmap
import threading
from typing import Any

import pytest

from kvpool.transfer.engine import nixl
from kvpool.transfer.engine.nixl import NixlClient, connect_nixl, name_in


class Failed(Exception):
    """An error of the library."""


class Library:
    """In an agent's place. `loaded`: names, each with its description. `state`: of every write. `fails`: to begin one."""

    def __init__(self) -> None:
        self.loaded: dict[str, bytes] = {}
        self.removed: list[str] = []
        self.written: list[str] = []
        self.released: list[int] = []
        self.state = "PROC"
        self.fails = False

    def add_remote_agent(self, described: bytes) -> bytes:
        name = name_in(described)
        self.loaded[name] = described
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        if self.loaded.pop(name, None) is None:
            raise Failed(name)
        self.removed.append(name)

    def get_xfer_descs(self, described: list[tuple[int, int, int]], kind: str) -> Any:
        assert kind == "DRAM"
        return described

    def initialize_xfer(self, operation: str, here: Any, there: Any, name: str) -> int:
        assert operation == "WRITE", (here, there)
        assert name in self.loaded
        self.written.append(name)
        return len(self.written)

    def transfer(self, handle: int) -> str:
        assert handle
        return "ERR" if self.fails else "PROC"

    def check_xfer_state(self, handle: int) -> str:
        assert handle
        return self.state

    def release_xfer_handle(self, handle: int) -> None:
        self.released.append(handle)


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def client(library: Library) -> NixlClient:
    return NixlClient(library, (Failed, ValueError), 0, {})


def described(name: str | bytes, more: bytes = b"") -> bytes:
    """As NIXL describes an agent of this name."""
    raw = name if isinstance(name, bytes) else name.encode()
    return nixl.HEAD + len(raw).to_bytes(8, "little") + raw + b"|Conns" + more


def submit(client: NixlClient, node: str, agent: bytes) -> int:
    return client.submit([node, agent], 0, 1, 1)


def test_a_nodes_agent_is_written_to_by_its_own_requests_alone(client: NixlClient, library: Library) -> None:
    """Its description went to every owner that it asked, and any of those may show it."""
    agent = described("victim/1")
    assert submit(client, "victim", agent) > 0
    for other in (agent, agent + agent, agent + bytes(8), described("victim/1", b"|elsewhere")):
        assert submit(client, "hostile", other) == -1
    assert library.written == ["victim/1"]
    assert library.removed == []
    assert library.loaded == {"victim/1": agent}
    assert submit(client, "victim", agent)


def test_what_is_another_nodes_or_none_is_never_loaded(client: NixlClient, library: Library) -> None:
    for agent in (
        described("victim/1"),
        described("hostile"),
        described("hostile/x/1"),
        described(b"hostile/\xff"),
        described("hostile/1")[:20],
        nixl.HEAD,
        b"",
        bytes(300),
        nixl.HEAD + b"\xff" * 8 + b"hostile/1",
    ):
        assert submit(client, "hostile", agent) == -1
    assert library.loaded == {}
    assert submit(client, "victim", described("victim/1")) > 0, "nothing was in its place"


def test_another_description_of_a_known_agent_takes_nothing_from_it(client: NixlClient, library: Library) -> None:
    agent = described("node/1")
    assert submit(client, "node", agent)
    assert submit(client, "node", described("node/1", b"|elsewhere")) == -1
    assert library.loaded == {"node/1": agent}
    assert library.removed == []


def test_a_node_has_a_few_agents_and_loses_the_one_that_it_used_longest_ago(
    client: NixlClient, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "NODE_AGENTS_S", 0.0)
    library.state = "DONE"
    assert submit(client, "other", described("other/0")) > 0
    for life in range(20):
        number = submit(client, "node", described(f"node/{life}"))
        assert client.look(number) == 1
    assert list(library.loaded) == ["other/0", *(f"node/{life}" for life in range(20 - nixl.NODE_AGENTS_MAX, 20))]


def test_a_node_has_no_further_agent_for_a_while(client: NixlClient, library: Library) -> None:
    """Each that was met takes descriptors."""
    library.state = "DONE"
    numbers = [submit(client, "node", described(f"node/{life}")) for life in range(20)]
    assert [number > 0 for number in numbers] == [life < nixl.NODE_AGENTS_MAX for life in range(20)]
    assert submit(client, "other", described("other/0")) > 0
    assert submit(client, "node", described("node/0")) > 0, "it is known"


def _in_time(call: Any) -> None:
    """Run what could be an endless loop on a thread, where it holds up nothing but this test."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("fault", ["transfer", "initialize_xfer", "add_remote_agent"])
def test_a_node_whose_writes_fail_is_met_again_a_few_times_alone(
    client: NixlClient, library: Library, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    met: list[bytes] = []

    def fail(*_: object) -> None:
        raise Failed(fault)

    def add(agent: bytes) -> None:
        met.append(agent)
        library.loaded[name_in(agent)] = agent
        if fault == "add_remote_agent":
            raise Failed(fault)

    monkeypatch.setattr(library, fault, fail)
    monkeypatch.setattr(library, "add_remote_agent", add)
    for _ in range(20):
        assert submit(client, "node", described("node/1")) <= 0
    assert len(met) == nixl.NODE_AGENTS_MAX
    assert submit(client, "other", described("other/1")) <= 0
    assert len(met) == nixl.NODE_AGENTS_MAX + 1


def test_a_process_that_has_met_too_many_ends_once_nothing_is_written(
    client: NixlClient, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps the descriptors of those that it has forgotten."""
    monkeypatch.setattr(client, "_met_max", 5)
    numbers = [submit(client, f"n{other}", described(f"n{other}/1")) for other in range(6)]
    assert min(numbers) > 0, "there are writes under way"
    library.state = "DONE"
    for number in numbers:
        assert client.look(number) == 1
    assert submit(client, "n0", described("n0/1")) > 0, "it is known"
    client.look(7)
    with pytest.raises(RuntimeError, match="6 agents were met"):
        submit(client, "n6", described("n6/1"))


def test_agents_that_are_written_to_stay_and_further_ones_are_refused(
    client: NixlClient, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "AGENTS_MAX", 6)

    def meet_many() -> None:
        numbers = [submit(client, "stuck", described(f"stuck/{life}")) for life in range(20)]
        assert [number > 0 for number in numbers] == [life < nixl.NODE_AGENTS_MAX for life in range(20)]
        for other in range(10):
            number = submit(client, f"n{other}", described(f"n{other}/1"))
            library.state = "DONE"
            assert client.look(number) == 1
            library.state = "PROC"

    _in_time(meet_many)
    assert list(library.loaded) == [*(f"stuck/{life}" for life in range(nixl.NODE_AGENTS_MAX)), "n8/1", "n9/1"]


@pytest.mark.parametrize("state", ["DONE", "ERR"])
def test_a_write_that_has_ended_is_given_back(client: NixlClient, library: Library, state: str) -> None:
    number = submit(client, "node", described("node/1"))
    assert client.look(number) == 0
    assert library.released == []
    library.state = state
    assert client.look(number) == (1 if state == "DONE" else -1)
    assert library.released == [1]
    assert library.removed == ([] if state == "DONE" else ["node/1"])


def test_a_write_that_does_not_begin_is_given_back(client: NixlClient, library: Library) -> None:
    library.fails = True
    assert submit(client, "node", described("node/1")) == 0, "some of it may have moved"
    assert library.released == [1]
    assert library.removed == ["node/1"]


def test_devices_that_this_machine_has_not_are_named() -> None:
    settings = {"protocol": "tcp", "devices": "lo,eth-none,mlx5_0", "ports": [15000, 15999], "host": "::1", "node": "n"}
    with mmap.mmap(-1, 4096) as memory, pytest.raises(ConnectionError) as refused:
        connect_nixl(settings, memory)
    assert "peer.rdma_devices names eth-none, mlx5_0, expected devices of this machine for tcp: " in str(refused.value)
    assert "LimitMEMLOCK" not in str(refused.value)
