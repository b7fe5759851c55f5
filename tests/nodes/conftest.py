"""Tests here need network namespaces."""

import pytest

from tests.rigs.nodes.namespaces import reason_to_skip


@pytest.fixture(scope="session", autouse=True)
def _can_make_hosts() -> None:
    """Skips all of them where there are none."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
