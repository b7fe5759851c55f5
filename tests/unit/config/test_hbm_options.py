"""Options of the device tier: what they mean, and what is refused."""

import pytest

from kvpool.config.config import load_config
from kvpool.errors import ConfigError

UUID = "01234567-89ab-cdef-0123-456789abcdef"


def test_without_a_device_there_is_no_tier() -> None:
    assert not load_config().hbm.is_used
    found = load_config(None, ["hbm.device=cuda:0"]).hbm
    assert found.is_used
    assert (found.ordinal, found.uuid, found.capacity, found.driver) == (0, b"", 1 << 30, "libcuda.so.1")


@pytest.mark.parametrize("device", [f"GPU-{UUID}", f"gpu-{UUID.upper()}", f"MIG-{UUID}"])
def test_a_device_is_named_by_its_uuid_too(device: str) -> None:
    found = load_config(None, [f"hbm.device={device}"]).hbm
    assert found.ordinal is None
    assert found.uuid == bytes.fromhex(UUID.replace("-", ""))


@pytest.mark.parametrize(
    "option",
    [
        *("hbm.device=cuda", "hbm.device=cuda:", "hbm.device=cuda:-1", "hbm.device=cuda:01", "hbm.device=cuda:256"),
        *(f"hbm.device={UUID}", "hbm.device=GPU-0123", "hbm.device=on", "hbm.device=0", "hbm.device="),
        *("hbm.capacity=1MiB", "hbm.capacity=5TiB", "hbm.capacity=1"),
        *("hbm.driver=", "hbm.driver=../libcuda.so", f"hbm.driver=/{'x' * 5000}", "hbm.driver=a\0b"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option.partition('=')[0]} is .*, expected "):
        load_config(None, [option])


def test_no_more_is_copied_than_dram_has() -> None:
    options = ["dram.capacity=64MiB", "hbm.capacity=65MiB"]
    assert load_config(None, options).hbm.capacity == 65 << 20  # nothing is copied
    with pytest.raises(ConfigError, match=r"hbm.capacity is 65MiB, expected at most dram.capacity, 64MiB"):
        load_config(None, [*options, "hbm.device=cuda:0"])
    assert load_config(None, ["hbm.device=cuda:0", "dram.capacity=64MiB", "hbm.capacity=64MiB"]).hbm.is_used


def test_clients_that_may_not_write_the_arena_get_no_device_memory() -> None:
    with pytest.raises(ConfigError, match=r"hbm.device is cuda:1, expected off because server.write_mode is copy"):
        load_config(None, ["hbm.device=cuda:1", "server.write_mode=copy"])


@pytest.mark.parametrize("driver", ["libcuda.so", "/opt/a/libcuda.so.1"])
def test_a_driver_is_a_name_or_an_absolute_path(driver: str) -> None:
    assert load_config(None, [f"hbm.driver={driver}"]).hbm.driver == driver
