"""Fixtures that every test may use."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon import Daemon


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long campaigns to their own targets."""
    if os.environ.get("KVPOOL_CAMPAIGN", "") not in ("", "0"):
        return
    left_out = [item for item in items if item.get_closest_marker("campaign")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons that end with the test. Options are `section__key="value"`."""
    with ExitStack() as stack:

        def start(**options: str) -> Daemon:
            directory = tmp_path / f"daemon-{len(list(tmp_path.iterdir()))}"
            directory.mkdir()
            named = {name.replace("__", "."): value for name, value in options.items()}
            return stack.enter_context(Daemon(directory, **named))

        yield start


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon with 16 MiB of DRAM."""
    return start_daemon()


@pytest.fixture
def seed() -> int:
    """A seed, printed; KVPOOL_SEED replays it."""
    value = int(os.environ.get("KVPOOL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVPOOL_SEED={value}")
    return value
