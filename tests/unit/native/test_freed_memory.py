"""Freed memory that stays with its process: blocks of a request's size cause no new page faults."""

import subprocess
import sys

import pytest

import kvpool_native

# Allocates and frees as a large request does, repeatedly; prints the page faults of one round.
CHILD = """
import resource, sys
import kvpool_native
if sys.argv[1] == "kept":
    assert kvpool_native.keep_freed_memory(8 << 20, 2 << 20)
ROUNDS, BLOCKS = 50, 3
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def take():
    blocks = [bytes(1) * (600 << 10) for _ in range(BLOCKS)]
take()
before = faults()
for _ in range(ROUNDS):
    take()
print((faults() - before) / ROUNDS)
"""


def faults_of_a_round(how: str) -> float:
    done = subprocess.run([sys.executable, "-c", CHILD, how], capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)


def test_freed_blocks_are_reused_without_page_faults() -> None:
    assert faults_of_a_round("kept") < 10  # 270 where freed blocks go back to the kernel


def test_a_size_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="less than 2 GiB"):
        kvpool_native.keep_freed_memory(1 << 31, 1 << 20)
