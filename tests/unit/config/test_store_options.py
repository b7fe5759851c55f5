"""Options of the shared store: what they mean, and what is refused."""

import pytest

from kvpool.config.config import load_config
from kvpool.errors import ConfigError


def test_without_a_master_there_is_no_store() -> None:
    assert not load_config().store.is_used
    found = load_config(None, ["store.master=10.0.0.1:50051"]).store
    assert found.is_used
    assert found.own_host
    assert (found.publish, found.replicas, found.pin, found.segment) == ("reused", 1, "off", 0)


@pytest.mark.parametrize(
    "option",
    [
        *("store.master=nowhere", "store.master=host:0", "store.master=host:65536", "store.master=ho st:1"),
        *("store.host=a b", "store.protocol=udp", "store.metadata=localhost", "store.metadata=http://x/other"),
        *("store.publish=always", "store.replicas=0", "store.replicas=17", "store.pin=yes", "store.buffer=1KiB"),
        *("store.answer_timeout=1", "store.transfer_timeout=1ms", "store.miss_ttl=0s"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option.partition('=')[0]} is"):
        load_config(None, [option])


def test_a_segment_needs_a_store() -> None:
    with pytest.raises(ConfigError, match=r"store.segment is 1MiB, expected store.master beside it"):
        load_config(None, ["store.segment=1MiB"])


@pytest.mark.parametrize("address", ["10.0.0.1:50051", "[::1]:50051", "store.example:1"])
def test_a_master_is_a_host_and_a_port(address: str) -> None:
    assert load_config(None, [f"store.master={address}"]).store.master == address
