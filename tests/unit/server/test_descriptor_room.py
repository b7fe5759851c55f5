"""Connections against the limit of file descriptors."""

import logging

import pytest

from kvpool.config.config import load_config
from kvpool.errors import ConfigError
from kvpool.server.descriptor_room import OWN_DESCRIPTORS, fit_connections

SSD = ("ssd.path=/disk", "ssd.capacity=1GiB", "ssd.segment=16MiB")


def test_with_room_for_all_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(None, ["server.max_connections=1000"])
    assert fit_connections(config, OWN_DESCRIPTORS + 1000) == 1000
    assert caplog.records == []


@pytest.mark.parametrize(("options", "fitting"), [((), 500), (SSD, 500 - 58), (("server.write_mode=copy",), 250)])
def test_with_room_for_some_these_are_served_and_it_is_logged(
    caplog: pytest.LogCaptureFixture, options: tuple[str, ...], fitting: int
) -> None:
    config = load_config(None, ["server.max_connections=1000", *options])
    with caplog.at_level(logging.WARNING):
        assert fit_connections(config, OWN_DESCRIPTORS + 500) == fitting
    assert "server.max_connections is 1000, which takes" in caplog.text
    assert f"the process may have {OWN_DESCRIPTORS + 500}" in caplog.text
    assert f"{fitting} connections are served at a time" in caplog.text


def test_without_room_for_a_few_the_start_is_refused() -> None:
    config = load_config(None, [*SSD])
    with pytest.raises(ConfigError, match=r"raise the limit, or ssd\.segment"):
        fit_connections(config, 256)
