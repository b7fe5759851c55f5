"""Regions of tests, closed with them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.vllm_tier.region import Region
from tests.rigs.daemon import Daemon, wait_until


@pytest.fixture
def start_region(request: pytest.FixtureRequest) -> Iterator[Callable[..., Region]]:
    """Starts regions, each with the tier of an engine whose weights are the test's own."""
    regions: list[Region] = []

    def start(daemon: Daemon, **given: Any) -> Region:
        region = Region(daemon, **{"revision": str(request.node.nodeid), **given})
        regions.append(region)
        if daemon.is_running and "revision" not in given:
            wait_until(lambda: "connected" in repr(region.jobs), "the tier is connected")
        return region

    yield start
    for region in regions:
        region.jobs.close()
