"""Tests of where the bytes of an offer come from."""

import pytest

from kvpool.transfer.stream_address import StreamAddress, stream_of

OWN = "tcp://192.0.2.7:9470"


def test_a_port_of_the_members_own_host_is_used() -> None:
    assert stream_of(OWN, "tcp://192.0.2.7:9471") == StreamAddress("192.0.2.7", 9471)
    assert stream_of("tcp://[2001:db8::7]:1", "tcp://[2001:DB8:0::7]:2") == StreamAddress("2001:db8::7", 2)


@pytest.mark.parametrize(
    "offered",
    [
        "tcp://192.0.2.8:9471",
        "tcp://127.0.0.1:80",
        "tcp://169.254.169.254:80",
        "tcp://0.0.0.0:9471",
        "tcp://[::ffff:192.0.2.7]:9471",
        "tcp://192.0.2.7:0",
        "tcp://192.0.2.7:65536",
        "tcp://localhost:9471",
        "",
    ],
)
def test_another_host_is_not_connected_to(offered: str) -> None:
    assert stream_of(OWN, offered) is None
