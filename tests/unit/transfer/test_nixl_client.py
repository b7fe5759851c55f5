"""NIXL's agents of other nodes, with a library that keeps a record: whose they are, how many, and what is given back."""

import ipaddress
import mmap
import threading
from typing import Any

import pytest

from kvpool.transfer.engine import nixl
from kvpool.transfer.engine.nixl import NixlClient, connect_nixl, device_of, ports_without
from kvpool.transfer.engine.nixl_form import HEAD, Form, name_in

HOST = "192.0.2.1"
BASE, SIZE, PORT = 1 << 40, 1 << 20, 15000


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
    return NixlClient(library, (Failed, ValueError), 0, facts={"met_max": 1000}, form=None)


def described(name: str | bytes, more: bytes = b"") -> bytes:
    """As NIXL describes an agent of this name."""
    raw = name if isinstance(name, bytes) else name.encode()
    return HEAD + len(raw).to_bytes(8, "little") + raw + b"|Conns" + more


def submit(client: NixlClient, node: str, agent: bytes, peer: str = "") -> int:
    return client.submit([peer or f"key of {node}", node, HOST, agent], 0, 1, 1)


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
        HEAD,
        b"",
        bytes(300),
        HEAD + b"\xff" * 8 + b"hostile/1",
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


def test_no_more_are_met_than_twice_what_the_daemon_ends_the_process_for(library: Library) -> None:
    """The library keeps the descriptors of those that it has forgotten."""
    client = NixlClient(library, (Failed, ValueError), 0, facts={"met_max": 3}, form=None)
    numbers = [submit(client, f"n{other}", described(f"n{other}/1")) for other in range(8)]
    assert [number > 0 for number in numbers] == [True] * 6 + [False] * 2
    assert client.met == 6
    assert submit(client, "n0", described("n0/1")) > 0, "it is known"


def test_who_takes_a_nodes_name_takes_none_of_its_agents(client: NixlClient, library: Library) -> None:
    library.state = "DONE"
    assert submit(client, "victim", described("victim/0")) > 0
    for life in range(1, 20):
        submit(client, "victim", described(f"victim/{life}"), "key of another")
    assert "victim/0" in library.loaded
    assert submit(client, "victim", described("victim/20")) > 0, "its own bound counts its own agents"
    assert submit(client, "victim", described("victim/0"), "key of another") == -1


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


def placed(
    name: str, *, host: str = HOST, port: int = PORT, identity: bytes = b"identity", base: int = BASE, size: int = SIZE
) -> bytes:
    """As NIXL describes an agent whose UCX has one device."""
    ucx = (
        b"\x20"
        + identity
        + b"\0\6\0\2"
        + ipaddress.ip_address(host).packed
        + bytes(18)
        + port.to_bytes(2, "big")
        + b"\x87\x80"
    )
    memory = base.to_bytes(8, "little") + size.to_bytes(8, "little")
    more = b"|t\3\0\0\0\0\0\0\0UCX|c" + len(ucx).to_bytes(8, "little") + ucx + b"|MemSection" + memory + bytes(16)
    return described(name, more)


@pytest.fixture
def guarded(library: Library) -> NixlClient:
    """A client of 192.0.2.1, over TCP."""
    form = Form(placed("own/1"), host=HOST, port=PORT, base=BASE, size=SIZE)
    return NixlClient(library, (Failed, ValueError), 0, facts={"met_max": 1000}, form=form)


def ask(client: NixlClient, agent: bytes, *, host: str, peer: str = "key", address: int = BASE, size: int = 8) -> int:
    return client.submit([peer, "node", host, agent], 0, address, size)


OTHER: dict[str, Any] = {"host": "192.0.2.2", "identity": b"another!"}


def test_an_agent_is_written_to_at_the_host_that_asks(guarded: NixlClient, library: Library) -> None:
    for number, host in enumerate(("192.0.2.2", "::ffff:192.0.2.2")):
        agent = placed(f"node/{number}", **OTHER)
        assert ask(guarded, agent, host=host) > 0
    assert ask(guarded, placed("node/9", **OTHER), host="192.0.2.2", address=BASE + SIZE - 8) > 0
    assert len(library.loaded) == 3


@pytest.mark.parametrize("host", ["192.0.2.1", "192.0.2.3", "2001:db8::1", "127.0.0.1", "", "none"])
def test_an_agent_at_another_host_is_never_loaded(guarded: NixlClient, library: Library, host: str) -> None:
    assert ask(guarded, placed("node/1", **OTHER), host=host) == -1
    assert library.loaded == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"host": HOST, "identity": b"another!"},  # this process's own port
        {"host": "192.0.2.2", "identity": b"identity"},  # its own identity
        {"port": 80},
        {"base": BASE + 1},
        {"base": 0},
        {"size": 0},
        {"size": 1 << 63},
        {"base": 1 << 47},
    ],
    ids=str,
)
def test_a_place_that_no_other_agent_can_have_is_never_loaded(
    guarded: NixlClient, library: Library, changed: dict[str, Any]
) -> None:
    described_so: dict[str, Any] = {**OTHER, **changed}
    agent = placed("node/1", **described_so)
    assert ask(guarded, agent, host=described_so["host"], address=described_so.get("base", BASE)) == -1
    assert library.loaded == {}


@pytest.mark.parametrize(
    ("address", "size"), [(BASE - 1, 8), (BASE + SIZE - 7, 8), (0, 8), (1 << 63, 8), (BASE, SIZE + 1)]
)
def test_bytes_outside_of_an_agents_memory_are_never_written(
    guarded: NixlClient, library: Library, address: int, size: int
) -> None:
    assert ask(guarded, placed("node/1", **OTHER), host="192.0.2.2", address=address, size=size) == -1
    assert library.written == []


def test_every_byte_that_is_not_looked_at_is_as_in_the_own_description(guarded: NixlClient, library: Library) -> None:
    """What the library reads beside has been chosen by nobody."""
    good = placed("node/1", **OTHER)
    own = placed("node/1")
    begin = len(HEAD) + 8 + len("node/1")
    accepted = []
    for at in range(begin, len(good)):
        other = good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :]
        try:
            assert guarded._form is not None
            guarded._form.place_in(other)
        except ValueError:
            continue
        accepted.append(at)
    varies = 8 + 4 + 2 + 16  # identity, host, port, memory
    assert len(accepted) <= varies
    assert ask(guarded, good + bytes(1), host="192.0.2.2") == ask(guarded, good[:-1], host="192.0.2.2") == -1
    assert len(own) == len(good)
    assert library.loaded == {}


@pytest.mark.parametrize("changed", [{"port": 16000}, {"identity": b"a third!"}], ids=str)
def test_a_place_of_another_node_is_not_written_for_a_while(
    guarded: NixlClient, library: Library, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """Nodes of one host have its address alike."""
    described_so: dict[str, Any] = {**OTHER, **changed}
    library.state = "DONE"
    assert ask(guarded, placed("node/1", **OTHER), host="192.0.2.2", peer="victim") > 0
    assert ask(guarded, placed("node/2", **described_so), host="192.0.2.2", peer="other") == -1
    assert ask(guarded, placed("node/3", **described_so), host="192.0.2.2", peer="victim") > 0, "a new life of its own"
    monkeypatch.setattr(nixl, "PLACE_S", 0.0)
    free: dict[str, Any] = {**OTHER, "port": 17000, "identity": b"a fourth"}
    assert ask(guarded, placed("node/4", **free), host="192.0.2.2", peer="victim") > 0
    assert ask(guarded, placed("node/5", **free), host="192.0.2.2", peer="other") > 0, "it was free again"


def test_a_description_of_another_form_is_named() -> None:
    for wrong in (described("own/1"), placed("own/1", port=PORT + 1), placed("own/1", host="192.0.2.2")):
        with pytest.raises(ValueError, match=r"there is no address of UCX|it does not say"):
            Form(wrong, host=HOST, port=PORT, base=BASE, size=SIZE)


@pytest.mark.parametrize(
    ("former", "expected"),
    [
        ([], (15000, 15999)),
        ([15000], (15001, 15999)),
        ([15999, 15100], (15101, 15998)),
        ([15800, 15800, 9], (15000, 15799)),
    ],
)
def test_ports_of_former_lives_are_avoided(former: list[int], expected: tuple[int, int]) -> None:
    assert ports_without(15000, 15999, former) == expected


def test_where_every_port_was_a_former_lifes_all_are_used() -> None:
    assert ports_without(15000, 15001, [15000, 15001]) == (15000, 15001)


def test_the_device_is_that_of_the_nodes_address() -> None:
    assert device_of("127.0.0.1") == device_of("::1") == "lo"
    assert device_of("192.0.2.77") == device_of("2001:db8::77") == ""
    settings = {"protocol": "tcp", "devices": "", "ports": [15000, 15999], "host": "192.0.2.77", "node": "n"}
    with (
        mmap.mmap(-1, 4096) as memory,
        pytest.raises(ConnectionError, match=r"first address is 192\.0\.2\.77, which none"),
    ):
        connect_nixl(settings, memory)


def test_devices_that_this_machine_has_not_are_named() -> None:
    settings = {"protocol": "tcp", "devices": "lo,eth-none,mlx5_0", "ports": [15000, 15999], "host": "::1", "node": "n"}
    with mmap.mmap(-1, 4096) as memory, pytest.raises(ConnectionError) as refused:
        connect_nixl(settings, memory)
    assert "peer.rdma_devices names eth-none, mlx5_0, expected devices of this machine for tcp: " in str(refused.value)
    assert "LimitMEMLOCK" not in str(refused.value)
