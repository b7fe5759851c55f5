"""Source of members that `peer.members` names: each kind of source, and what is wrong with it before anything is started."""

import importlib.util
import random
from dataclasses import replace

import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.config.peer_options import PeerConfig
from kvpool.peers.members.dns_members import DnsMembers
from kvpool.peers.members.etcd_members import EtcdMembers
from kvpool.peers.members.member import BookSettings, Member, Members
from kvpool.peers.members.static_members import StaticMembers
from kvpool.server.peers.member_source import make_members, source_faults

OWN = Member("tcp://127.0.0.1:5600", b"", "here", bytes(16))


def config_of(members: str) -> PeerConfig:
    return replace(load_config().peer, members=members)


def made(members: str) -> Members:
    assert source_faults(config_of(members)) == []
    return make_members(
        config_of(members), OWN, lambda _: None, book=BookSettings(), clock=MonotonicClock(), random=random.Random(1)
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
        ("10.0.0.1", "entry 1: '10.0.0.1' is no address of a node, expected IP:PORT"),
        ("node-1:9470", "found otherwise: dns:NAME:PORT"),
        ("10.0.0.1:0", "is no address of a node, expected IP:PORT"),
        (",,", "entry 1 is empty, expected IP:PORT"),
        ("10.0.0.1:1, 10.0.0.1:1", "entry 2: 10.0.0.1:1 is listed twice"),
        ("10.0.0.1:9470 short", "is followed by what is no public key of 40 characters"),
        ("dns:name", "is no source of members, expected dns:NAME:PORT"),
        ("dns:na me:9470", "is no source of members, expected dns:NAME:PORT"),
        ("etcd:", "is no source of members, expected etcd:http://HOST:PORT"),
        ("etcd:ftp://a:1", "is no source of members, expected etcd:http://HOST:PORT"),
        ("etcd:http://name:secret@a:1", "has a password in its URL"),
    ],
)
def test_what_names_no_members_is_an_error_that_names_the_option(members: str, expected: str) -> None:
    fault = source_faults(config_of(members))[0]
    assert fault.startswith("peer.members")
    assert expected in fault
    assert "secret" not in fault


def test_a_list_of_many_faults_shows_the_first() -> None:
    assert len(source_faults(config_of("node, " * 1000))) == 10


def test_etcd_without_its_client_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert source_faults(config_of("127.0.0.1:1")) == []
    (fault,) = source_faults(config_of("etcd:http://127.0.0.1:2379"))
    assert "needs the package urllib3: install it with pip install 'kvpool[etcd]'" in fault


def test_certificates_without_a_server_that_uses_them_are_an_error() -> None:
    config = replace(config_of("etcd:http://a:1,http://b:1"), etcd_ca="/ca.pem")
    assert source_faults(config) == [
        "peer.etcd_ca is '/ca.pem', expected peer.members to name https:// servers: http://a:1, http://b:1 would not use it"
    ]
    assert source_faults(replace(config, members="etcd:http://a:1,https://b:1")) == []
