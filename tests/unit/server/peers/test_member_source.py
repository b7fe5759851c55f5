"""Source of members that `peer.members` names: each kind of source, and what is wrong with it before anything is started."""

import importlib.util
import random
from dataclasses import replace

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.config.peer_options import PeerConfig
from kvpool.errors import ConfigError
from kvpool.peers.members.dns_members import DnsMembers
from kvpool.peers.members.etcd_members import EtcdMembers
from kvpool.peers.members.member import BookSettings, Member, Members
from kvpool.peers.members.static_members import StaticMembers
from kvpool.server.peers.member_source import check_source, make_members

OWN = Member("tcp://127.0.0.1:5600", b"", "here", bytes(16))


def config_of(members: str) -> PeerConfig:
    return replace(load_config().peer, members=members)


def made(members: str) -> Members:
    check_source(config_of(members))
    return make_members(
        config_of(members),
        OWN,
        lambda _: None,
        book=BookSettings(),
        clock=MonotonicClock(),
        random=random.Random(1),
    )


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ("", StaticMembers),
        ("127.0.0.1:1, 127.0.0.1:2", StaticMembers),
        ("dns:kvpool.example:9470", DnsMembers),
        ("etcd:http://127.0.0.1:2379", EtcdMembers),
        ("etcd:https://a:2379,https://b:2379/fleet/one", EtcdMembers),
    ],
)
def test_members_come_from_the_source_that_is_named(members: str, kind: type) -> None:
    assert isinstance(made(members), kind)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ("10.0.0.1", "is no address of a node, expected tcp://IP:PORT"),
        ("node-1:9470", "is no address of a node, expected tcp://IP:PORT"),
        ("10.0.0.1:0", "is no address of a node, expected tcp://IP:PORT"),
        ("10.0.0.1:9470 short", "is followed by what is no public key of 40 characters"),
        ("dns:name", "is no source of members, expected dns:NAME:PORT"),
        ("dns:na me:9470", "is no source of members, expected dns:NAME:PORT"),
        ("etcd:", "is no source of members, expected etcd:http://HOST:PORT"),
        ("etcd:ftp://a:1", "is no source of members, expected etcd:http://HOST:PORT"),
        ("etcd:http://name:secret@a:1", "has a password in its URL"),
    ],
)
def test_what_names_no_members_is_an_error_that_names_the_option(members: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"peer\.members") as raised:
        check_source(config_of(members))
    assert expected in str(raised.value)
    assert "secret" not in str(raised.value)


def test_etcd_without_its_client_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_source(config_of("127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"needs the package urllib3: install it with pip install 'kvpool\[etcd\]'"):
        check_source(config_of("etcd:http://127.0.0.1:2379"))
