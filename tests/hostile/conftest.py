"""The fixture of the hostile tests: how much to run."""

import os
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Campaign:
    """The number of frames. The full counts run with KVPOOL_CAMPAIGN=1, a small share without."""

    is_whole: bool

    def pick(self, quick: int, whole: int) -> int:
        """The count that is wanted."""
        return whole if self.is_whole else quick


@pytest.fixture(scope="session")
def campaign() -> Campaign:
    """The full or the quick campaign."""
    return Campaign(os.environ.get("KVPOOL_CAMPAIGN", "") not in ("", "0"))
