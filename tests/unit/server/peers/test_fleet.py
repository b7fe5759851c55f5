"""Tests of this node among others: what cannot be is refused before anything is served."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.config.curve_keys import make_key_pair, write_key_file
from kvpool.errors import ConfigError
from kvpool.server.descriptor_room import PeerRoom
from kvpool.server.peers.fleet import Fleet

PEERS = ("peer.listen=tcp://127.0.0.1:0", "peer.stream=tcp://127.0.0.1:0", "peer.encrypt=true")


def test_encryption_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"peer\.encrypt is true, expected peer\.keys and peer\.allow"):
        load_config(None, PEERS)


def test_encryption_is_refused_without_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = make_key_pair()
    write_key_file(str(tmp_path / "key"), pair)
    (tmp_path / "allow").write_text(pair.public.decode() + "\n")
    config = load_config(None, [*PEERS, f"peer.keys={tmp_path / 'key'}", f"peer.allow={tmp_path / 'allow'}"])
    Fleet(config.peer, bytes(32), PeerRoom(), MonotonicClock(), socket="/nowhere")
    monkeypatch.setattr(kvpool_native, "tls_library", lambda: "")
    with pytest.raises(ConfigError, match=r"there is no TLS.*libssl3.*libssl-dev"):
        Fleet(config.peer, bytes(32), PeerRoom(), MonotonicClock(), socket="/nowhere")


def test_a_node_that_says_hello_is_asked_without_waiting_longer() -> None:
    config = load_config(None, PEERS[:2])
    fleet = Fleet(config.peer, bytes(32), PeerRoom(), MonotonicClock(), socket="/nowhere")
    hurried: list[str] = []

    def link_of(name: str, *, is_ready: bool = False) -> Any:
        life = SimpleNamespace(node=name)
        return SimpleNamespace(life=life if is_ready else None, last_life=life, hurry=lambda: hurried.append(name))

    fleet._list_links = lambda: [link_of("gpu-1"), link_of("gpu-2"), link_of("gpu-1", is_ready=True)]
    fleet._note_hello("gpu-1")
    assert hurried == ["gpu-1"]
