"""Early ends of a daemon's lives, and the wait that follows from them."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from kvpool.server.lives import LASTING_S, WAIT_S_MAX, Life


def _begin(path: Path) -> Life:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return Life(fd, str(path))


def test_each_early_end_doubles_the_wait_up_to_five_minutes(tmp_path: Path) -> None:
    waits = []
    for _ in range(40):
        life = _begin(tmp_path / "lock")
        waits.append((life.early_ends, life.wait_s))
        life.end_life(is_clean=False)
    expected = [0.0, 0.0, *(float(min(WAIT_S_MAX, 1 << number)) for number in range(38))]
    assert waits == list(enumerate(expected))


@pytest.mark.parametrize(
    ("left", "early_ends"), [(b"", 0), (b"no record", 0), (b"-7", 0), (b"7", 8), (b"9" * 400, 10**16)]
)
def test_what_an_older_or_a_torn_life_has_left_is_read_as_far_as_it_can_be(
    tmp_path: Path, left: bytes, early_ends: int
) -> None:
    (tmp_path / "lock").write_bytes(left)
    assert _begin(tmp_path / "lock").early_ends == early_ends


@pytest.mark.parametrize("ago_s", [LASTING_S + 60.0, -3600.0])
def test_a_life_that_lasted_begins_the_count_again(tmp_path: Path, ago_s: float) -> None:
    """Also where the clock was set back meanwhile."""
    (tmp_path / "lock").write_text("7")
    os.utime(tmp_path / "lock", (time.time() - ago_s,) * 2)
    assert _begin(tmp_path / "lock").early_ends == 1
