"""Options of peers: ranges and messages of each, and what has to stand together."""

import os
from pathlib import Path

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.config import Config, load_config, read_config
from kvpool.config.curve_keys import make_key_pair, write_key_file
from kvpool.config.peer_options import PEER_OPTIONS
from kvpool.errors import ConfigError
from kvpool.server.descriptor_room import PeerRoom
from kvpool.server.peers.fleet import Fleet

LOCAL = ["peer.listen=tcp://127.0.0.1:9470", "peer.stream=tcp://127.0.0.1:9471"]
PUBLIC = ["peer.listen=tcp://192.0.2.7:9470", "peer.stream=tcp://192.0.2.7:9471"]
WRONG = {
    "peer.transport": ["udp", "", "TCP", "both"],
    "peer.listen": [
        "127.0.0.1:9470",
        "tcp://localhost:1",
        "tcp://0.0.0.0:1",
        "tcp://[::]:1",
        "ipc:///run/a",
        "tcp://1.2.3.4:99999",
        "tcp://224.0.0.1:1",
        "tcp://1.2.3.4",
        "tcp://2001:db8::7:9470",
    ],
    "peer.stream": ["tcp://", "http://127.0.0.1:1", "tcp://127.0.0.1", "on"],
    "peer.name": ["x" * 257, "a\nb", "\x00", "\ud800"],
    "peer.members": ["x" * (1 << 17) + "y"],
    "peer.members_refresh": ["99ms", "2h", "5", "-1s", "often"],
    "peer.etcd_ca": ["/nonexistent/ca.pem", "/tmp"],
    "peer.etcd_certificate": ["/nonexistent/cert.pem"],
    "peer.etcd_key": ["/nonexistent/key.pem"],
    "peer.keys": ["/nonexistent/key", "/tmp"],
    "peer.allow": ["/nonexistent/allow", "/tmp"],
    "peer.index": ["1023KiB", "2TiB", "much", "-1MiB"],
    "peer.threads": ["0", "65", "1.5", "four"],
    "peer.connections": ["0", "17", ""],
    "peer.rate": ["2TiB", "-1B", "fast", "1B", "63KiB", "true"],
    "peer.encrypt": ["yes", "1", ""],
    "peer.shm": ["auto", "", "0"],
    "peer.rdma_protocol": ["roce", "", "auto"],
    "peer.rdma_devices": ["mlx5 0", "mlx5_0,", "/dev/x", "x" * 257],
    "peer.rdma_ports": ["15000", "1023-2000", "15000-15014", "65530-65600", "2000-1000", "a-b", "-"],
    "peer.rdma_buffer": ["7MiB", "65GiB"],
    "peer.offered": ["1023KiB", "17TiB"],
    "peer.promoted": ["1023KiB", "17TiB"],
    "peer.leased_quota": ["1.5", "-0.1", "half"],
    "peer.answer_timeout": ["9ms", "61s", "soon"],
    "peer.stall_timeout": ["9ms", "61s"],
    "peer.pull_timeout": ["99ms", "11m"],
}
RIGHT = {
    "peer.members_refresh": ["100ms", "1h"],
    "peer.index": ["1MiB", "1TiB"],
    "peer.threads": ["1", "64"],
    "peer.connections": ["1", "16"],
    "peer.rate": ["0B", "64KiB", "1TiB"],
    "peer.offered": ["0B", "1MiB", "16TiB"],
    "peer.rdma_protocol": ["rdma", "tcp"],
    "peer.rdma_devices": ["", "mlx5_0", "mlx5_0,rxe0"],
    "peer.rdma_ports": ["1024-1039", "65520-65535"],
    "peer.rdma_buffer": ["8MiB", "64GiB"],
    "peer.answer_timeout": ["10ms", "1m"],
    "peer.stall_timeout": ["10ms", "1m"],
    "peer.pull_timeout": ["100ms", "10m"],
    "peer.transport": ["auto", "tcp", "off"],
    "peer.name": ["", "gpu-7", "é" * 128],
}


def config(*overrides: str) -> Config:
    return load_config(overrides=overrides)


def faults_of(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        config(*overrides)
    return tuple(raised.value.faults)


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """The options of keys, with files that can be used."""
    pair = make_key_pair()
    write_key_file(str(tmp_path / "key"), pair)
    (tmp_path / "allow").write_text(pair.public.decode() + " this node\n")
    return [f"peer.keys={tmp_path / 'key'}", f"peer.allow={tmp_path / 'allow'}"]


def test_every_option_is_tried_with_wrong_values() -> None:
    assert WRONG.keys() == PEER_OPTIONS.keys()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named_with_what_was_expected(name: str, value: str) -> None:
    (fault,) = faults_of(f"{name}={value}")
    assert fault.startswith(f"{name} is {value!r}")
    assert PEER_OPTIONS[name].expected in fault


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values])
def test_the_ends_of_each_range_are_accepted(name: str, value: str) -> None:
    # With the transport of its own: named devices choose the one that needs keys.
    config("peer.transport=tcp", f"{name}={value}")


@pytest.mark.parametrize("wanted", [LOCAL, PUBLIC], ids=["loopback", "beyond"])
def test_loopback_needs_no_keys_and_anything_beyond_does(wanted: list[str], keys: list[str]) -> None:
    assert config(*wanted, *keys).peer.is_used
    if wanted is LOCAL:
        assert config(*wanted).peer.is_used
        return
    assert faults_of(*wanted) == tuple(
        f"peer.{name} is tcp://192.0.2.7:{port}, expected a loopback address because peer.keys and peer.allow are empty"
        for name, port in (("listen", 9470), ("stream", 9471))
    )


def test_options_that_belong_together_are_asked_for_together(keys: list[str], tmp_path: Path) -> None:
    assert faults_of(*LOCAL, keys[0]) == ("peer.keys and peer.allow: expected both or none",)
    assert faults_of(*LOCAL, keys[1]) == ("peer.keys and peer.allow: expected both or none",)
    assert faults_of(LOCAL[0]) == ("peer.listen and peer.stream: expected both or none",)
    assert faults_of(LOCAL[0], "peer.stream=tcp://127.0.0.1:9470") == (
        "peer.stream is tcp://127.0.0.1:9470, expected another port than that of peer.listen",
    )
    assert config("peer.listen=tcp://127.0.0.1:0", "peer.stream=tcp://127.0.0.1:0").peer.is_used
    assert faults_of("peer.members=127.0.0.1:1") == (
        "peer.members is '127.0.0.1:1', expected peer.listen and peer.stream beside it",
    )
    certificate = tmp_path / "certificate.pem"
    certificate.write_text("")
    named = f"peer.etcd_certificate={certificate}"
    assert faults_of(*LOCAL, "peer.members=etcd:https://a:1", named) == (
        "peer.etcd_certificate and peer.etcd_key: expected both or none",
    )
    assert faults_of(*LOCAL, f"peer.etcd_ca={certificate}") == (
        f"peer.etcd_ca is '{certificate}', expected peer.members to name etcd:URL beside it",
    )


def test_transfer_engine_needs_keys_and_no_encryption(keys: list[str]) -> None:
    rdma = "peer.transport=rdma"
    made = config(*PUBLIC, *keys, rdma).peer
    assert (made.rdma_protocol, made.rdma_ports) == ("rdma", (15000, 15999))
    for transport, library in ((rdma, "TransferEngine"), ("peer.transport=nixl", "NIXL")):
        (fault,) = faults_of(*PUBLIC, *keys, transport, "peer.encrypt=true")
        chosen = f"peer.transport is {transport.partition('=')[2]!r}"
        assert fault == f"{chosen} and peer.encrypt is true, expected one of both: {library} sends bytes in clear"
    (fault,) = faults_of(*LOCAL, "peer.transport=nixl")
    assert fault.endswith("NIXL listens on every address of this host")
    for wanted in ([*LOCAL, rdma], [rdma], [*keys, rdma]):
        (fault,) = faults_of(*wanted)
        assert fault.startswith("peer.transport is 'rdma', expected peer.listen, peer.keys and peer.allow beside it")


def test_a_library_that_is_not_installed_is_named_with_what_installs_it(
    keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*PUBLIC, *keys, "peer.transport=nixl", "peer.rdma_protocol=tcp"]
    nixl = config(*options)
    assert nixl.peer.uses_rdma
    assert nixl.peer.uses_shared_memory
    assert not read_config(None, options).idle, "the options of TransferEngine are NIXL's, too"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    missing = "chunks of other nodes come by TCP: nixl_cu12 or nixl_cu13 is not installed: install kvpool[nixl]"
    assert nixl.peer.lack == missing
    assert "mooncake-transfer-engine is not installed" in config(*PUBLIC, *keys, "peer.transport=rdma").peer.lack
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "nixl_cu13" or None)
    assert nixl.peer.lack == ""


def test_auto_uses_transfer_engine_where_devices_are_named(keys: list[str]) -> None:
    devices = "peer.rdma_devices=mlx5_0"
    assert not config(*PUBLIC, *keys).peer.uses_rdma
    assert config(*PUBLIC, *keys, devices).peer.uses_rdma
    assert config(*PUBLIC, *keys, "peer.transport=rdma").peer.uses_rdma
    assert not config(*PUBLIC, *keys, devices, "peer.transport=tcp").peer.uses_rdma
    (fault,) = faults_of(*LOCAL, devices)
    assert fault.startswith(
        "peer.rdma_devices is 'mlx5_0' and peer.transport is 'auto', expected peer.listen, peer.keys"
    )


def test_a_transport_that_is_off_leaves_the_rest_unused() -> None:
    assert not config("peer.transport=off", *PUBLIC, "peer.members=127.0.0.1:1").peer.is_used
    assert not config().peer.is_used


def test_a_key_file_that_others_can_read_is_refused(keys: list[str]) -> None:
    path = keys[0].partition("=")[2]
    os.chmod(path, 0o644)
    (fault,) = faults_of(*LOCAL, *keys)
    assert fault == f"peer.keys is {path!r}, which has rights 0644; expected {PEER_OPTIONS['peer.keys'].expected}"


def test_a_file_that_cannot_be_used_is_named_with_the_reason(keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "key")
    for path, reason in (("nothing", "cannot be used: No such file or directory"), ("link", "is no regular file")):
        (fault,) = faults_of(*LOCAL, f"peer.keys={tmp_path / path}", keys[1])
        assert f"peer.keys is {str(tmp_path / path)!r}, which {reason}; expected" in fault
    (fault,) = faults_of(*LOCAL, keys[0], f"peer.allow={tmp_path}")
    assert fault.startswith(
        f"peer.allow is {str(tmp_path)!r}, which is no regular file; expected a file of public keys"
    )


@pytest.mark.parametrize(("name", "content"), [("key", ""), ("key", "no keys"), ("allow", "short\n"), ("allow", "")])
def test_files_without_keys_end_the_start_with_the_options_name(
    keys: list[str], tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    peer = config(*LOCAL, *keys).peer
    with pytest.raises(ConfigError, match=r"^peer\.(keys|allow)") as raised:
        Fleet(peer, bytes(32), PeerRoom(), MonotonicClock(), socket="/nowhere")
    assert str(tmp_path / name) in str(raised.value)


@pytest.mark.parametrize("name", [" ", "  ", " a", "a ", "\u2003"])
def test_a_name_of_spaces_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "kvpool.toml").write_text(f'[peer]\nname = "{name}"\n')
    with pytest.raises(ConfigError) as raised:
        load_config(str(tmp_path / "kvpool.toml"))
    (fault,) = raised.value.faults
    assert fault.startswith(
        f"peer.name is {name!r}, expected printable text of at most 256 bytes without spaces at its ends"
    )


@pytest.mark.parametrize(
    "members", ["10.0.0.1", "dns:name", "etcd:nothing", "127.0.0.1:1 KEY", "127.0.0.1:1,,:2", ",,"]
)
def test_members_that_are_none_end_the_start_with_the_options_name(members: str) -> None:
    with pytest.raises(ConfigError, match=r"^peer\.members(,|:)"):
        Fleet(
            config(*LOCAL, f"peer.members={members}").peer, bytes(32), PeerRoom(), MonotonicClock(), socket="/nowhere"
        )


def test_an_ipv6_address_without_brackets_is_answered_with_their_form() -> None:
    with pytest.raises(ConfigError) as refused:
        config("peer.listen=tcp://2001:db8::7:9470", "peer.stream=tcp://2001:db8::7:9471")
    assert [text.split(", expected")[0] for text in refused.value.faults] == [
        "peer.listen is 'tcp://2001:db8::7:9470'",
        "peer.stream is 'tcp://2001:db8::7:9471'",
    ]
    assert all('"tcp://[2001:db8::7]:9470"' in text for text in refused.value.faults)


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], True), (["peer.transport=tcp"], False), (["peer.transport=off"], False), (["peer.shm=false"], False)],
)
def test_shared_memory_of_this_host_is_used_unless_the_stream_was_chosen(options: list[str], expected: bool) -> None:
    assert config(*LOCAL, *options).peer.uses_shared_memory is expected
