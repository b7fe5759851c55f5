"""Fixture of the hostile tests: how much to run."""

import os
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Campaign:
    """How much is sent. The whole counts run with KVPOOL_CAMPAIGN=1, a quick share without."""

    is_whole: bool

    def pick(self, quick: int, whole: int) -> int:
        """The count that is wanted."""
        return whole if self.is_whole else quick


@pytest.fixture(scope="session")
def campaign() -> Campaign:
    """Whole or quick."""
    return Campaign(os.environ.get("KVPOOL_CAMPAIGN", "") not in ("", "0"))
