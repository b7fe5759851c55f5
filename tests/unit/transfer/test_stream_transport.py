"""The stream as a transport: connections that are made while an offer is on its way."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.peers.control.identity import PeerLife
from kvpool.transfer.stream_transport import StreamTransport
from tests.rigs.transfer.stream_node import HOST, Node


def link_to(stream: str, *, member: str = f"tcp://{HOST}:9") -> Any:
    return SimpleNamespace(life=PeerLife("node", b"1" * 16, stream, False), member=SimpleNamespace(endpoint=member))


@pytest.mark.asyncio
async def test_as_many_connections_are_made_ahead_as_an_offer_of_these_chunks_has() -> None:
    store = Node(2, is_owner=False).store
    transport = StreamTransport(store.arena, store.index, threads=1, jobs_max=1, connections=3)
    transport.start(lambda: None)
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        loop, address = asyncio.get_running_loop(), f"tcp://{HOST}:{listener.getsockname()[1]}"
        for chunks, made in ((2, 2), (2, 0), (5, 1)):
            assert transport.expect("node", link_to(address), chunks)
            for _ in range(made):
                (await asyncio.wait_for(loop.sock_accept(listener), 20.0))[0].close()
            with pytest.raises(BlockingIOError):
                listener.accept()
    assert await transport.close()


@pytest.mark.asyncio
async def test_no_other_host_than_the_members_is_connected_ahead() -> None:
    store = Node(2, is_owner=False).store
    transport = StreamTransport(store.arena, store.index, threads=1, jobs_max=1, connections=1)
    transport.start(lambda: None)
    with socket.create_server((HOST, 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        for link in (link_to(f"tcp://{HOST}:{port}", member="tcp://127.0.0.2:9"), link_to("")):
            assert transport.expect("node", link, 1)
        link = link_to(f"tcp://{HOST}:{port}")
        link.life = None
        assert transport.expect("node", link, 1)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert await transport.close()
