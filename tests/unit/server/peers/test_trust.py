"""Trust of a node: every fault at once, and this node's own address in a list."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.config.config import load_config
from kvpool.config.curve_keys import KeyPair, make_key_pair, write_key_file
from kvpool.config.peer_options import PeerConfig
from kvpool.errors import ConfigError
from kvpool.server.peers.trust import read_trust

LOCAL = ["peer.listen=tcp://127.0.0.1:9470", "peer.stream=tcp://127.0.0.1:9471"]


def faults_of(config: PeerConfig) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read_trust(config)
    return list(raised.value.faults)


@pytest.fixture
def pair() -> KeyPair:
    """This node's keys."""
    return make_key_pair()


@pytest.fixture
def config(tmp_path: Path, pair: KeyPair) -> PeerConfig:
    """A node with keys and an empty list."""
    write_key_file(str(tmp_path / "key"), pair)
    (tmp_path / "allow").write_text(pair.public.decode() + "\n")
    keys = [f"peer.keys={tmp_path / 'key'}", f"peer.allow={tmp_path / 'allow'}"]
    return load_config(None, [*LOCAL, *keys]).peer


def test_keys_and_allowed_keys_are_read(config: PeerConfig, pair: KeyPair) -> None:
    trust = read_trust(config)
    assert trust.keys == pair
    assert trust.allowed == frozenset({pair.public_bytes})


def test_every_fault_is_named_at_once(config: PeerConfig, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("nothing")
    (tmp_path / "allow").write_text("nothing\n")
    found = faults_of(replace(config, members="node:1, 10.0.0.1"))
    assert [fault.split()[0] for fault in found] == ["peer.members,", "peer.members,", "peer.keys", "peer.allow"]


def test_the_own_address_may_be_listed_as_it_is(config: PeerConfig, pair: KeyPair) -> None:
    for own in ("127.0.0.1:9470", f"127.0.0.1:9470 {pair.public.decode()}"):
        read_trust(replace(config, members=f"{own}, 127.0.0.1:1"))
    other = make_key_pair().public.decode()
    assert faults_of(replace(config, members=f"127.0.0.1:9470 {other}")) == [
        "peer.members has this node's own address 127.0.0.1:9470 with another public key than that of peer.keys, "
        f"expected {pair.public.decode()}"
    ]


def test_the_address_of_the_stream_is_no_members(config: PeerConfig) -> None:
    assert faults_of(replace(config, members="127.0.0.1:9471")) == [
        "peer.members has 127.0.0.1:9471, the address of peer.stream here, expected that of peer.listen"
    ]


def test_public_keys_in_a_list_need_keys_here(pair: KeyPair) -> None:
    config = load_config(None, [*LOCAL, f"peer.members=127.0.0.1:1 {pair.public.decode()}"]).peer
    assert faults_of(config) == [
        "peer.members has a public key after 127.0.0.1:1, expected peer.keys and peer.allow beside it"
    ]
