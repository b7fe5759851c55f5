"""Available memory, as a machine and its control groups report it, in trees of files made for the test."""

import re
from pathlib import Path
from threading import Timer

import pytest

from kvpool.config.config import load_config
from kvpool.tiers.dram.memory_room import check_memory, find_room, free_huge_bytes
from kvpool.tiers.dram.tier import check_memory_fits

GIB = 1 << 30
MEMINFO = "MemTotal: 33554432 kB\nMemAvailable:   16777216 kB\nHugePages_Free:      24\nHugepagesize:       2048 kB\n"


def _write(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def _plain(capacity: int) -> int:
    return capacity


def _with_index(capacity: int) -> int:
    return capacity + GIB


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 16 GiB to be had and no control groups."""
    _write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def _limit_v2(root: Path, group: str, limit: object, used: int, cached: int = 0) -> None:
    folder = f"sys/fs/cgroup/{group}"
    _write(root, f"{folder}/memory.max", limit)
    _write(root, f"{folder}/memory.current", used)
    _write(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {cached}\nactive_file 0\nshmem 9999999999")


def test_without_any_information_no_capacity_is_refused(tmp_path: Path) -> None:
    assert find_room(tmp_path) is None
    check_memory(1 << 60, _plain, allow_overcommit=False, root=tmp_path)


def test_more_memory_than_the_machine_has_is_refused_with_the_numbers(root: Path) -> None:
    check_memory(15 * GIB, _with_index, allow_overcommit=False, root=root, patience_s=0.0)
    with pytest.raises(MemoryError) as refusal:
        check_memory(16 * GIB, _with_index, allow_overcommit=False, root=root, patience_s=0.0)
    assert str(refusal.value) == (
        "dram.capacity 16.0 GiB takes 17.0 GiB of memory with the index of all tiers, and 16.0 GiB can be had by MemAvailable "
        "in /proc/meminfo: set dram.capacity to 15360MiB at most, free memory, or set dram.allow_overcommit = true"
    )
    check_memory(16 * GIB, _with_index, allow_overcommit=True, root=root)


def test_the_limit_of_a_parent_control_group_counts_too(root: Path) -> None:
    _write(root, "proc/self/cgroup", "0::/system.slice/kvpoold.service")
    _limit_v2(root, "system.slice/kvpoold.service", "max", 0)
    _limit_v2(root, "system.slice", 8 * GIB, 5 * GIB, cached=GIB)
    room = find_room(root)
    assert room is not None
    assert (room.size, room.source) == (4 * GIB, "memory.max of /sys/fs/cgroup/system.slice")


def test_a_path_of_the_host_is_looked_for_from_the_mount_on(root: Path) -> None:
    _write(root, "proc/self/cgroup", "12:cpu,cpuacct:/a\n4:memory:/docker/0123\n0::/docker/0123")
    _write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * GIB)
    _write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    _write(root, "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {GIB // 2}\ntotal_active_file 0")
    room = find_room(root)
    assert room is not None
    assert (room.size, room.source) == (GIB * 3 // 2, "memory.limit_in_bytes of /sys/fs/cgroup/memory")


def test_unlimited_groups_and_missing_files_are_no_limits(root: Path) -> None:
    _write(root, "proc/self/cgroup", "4:memory:/a\n0::/a\nnonsense\n7:")
    _write(root, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", 9223372036854771712)
    _write(root, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", GIB)
    _write(root, "sys/fs/cgroup/a/memory.max", "much")
    _write(root, "sys/fs/cgroup/a/memory.current", 0)
    room = find_room(root)
    assert room is not None
    assert room.size == 16 * GIB


def test_a_full_group_has_no_room(root: Path) -> None:
    _write(root, "proc/self/cgroup", "0::/")
    _limit_v2(root, ".", GIB, 2 * GIB)
    with pytest.raises(MemoryError, match=r"memory\.max of /sys/fs/cgroup: free memory, or"):
        check_memory(GIB // 2, _plain, allow_overcommit=False, root=root, patience_s=0.0)


def test_an_index_that_does_not_fit_is_named_with_what_it_is_for(root: Path) -> None:
    with pytest.raises(MemoryError, match="lower max_chunks or capacity of the other tiers, free memory"):
        check_memory_fits(load_config(None, ["dram.capacity=1GiB"]).dram, 250_000_000, root)


def test_free_huge_pages_are_counted_in_bytes(root: Path, tmp_path: Path) -> None:
    assert free_huge_bytes(root) == 48 << 20
    assert free_huge_bytes(tmp_path / "nowhere") == 0


def test_memory_that_others_are_releasing_is_waited_for(root: Path) -> None:
    freed = MEMINFO.replace("16777216", "33000000")
    Timer(0.1, lambda: _write(root, "proc/meminfo", freed)).start()
    check_memory(19 * GIB, _with_index, allow_overcommit=False, root=root, patience_s=20.0)


def test_more_memory_than_the_machine_can_have_is_refused_at_once(root: Path) -> None:
    with pytest.raises(MemoryError, match="can be had by MemAvailable"):
        check_memory(32 * GIB, _with_index, allow_overcommit=False, root=root, patience_s=1e9)


@pytest.mark.parametrize("segment", ["1MiB", "64MiB", "1GiB"])
@pytest.mark.parametrize("max_chunks", ["0", "2000000"])
def test_the_advised_capacity_fits_and_one_more_segment_does_not(root: Path, segment: str, max_chunks: str) -> None:
    sets = [f"dram.segment={segment}", f"dram.max_chunks={max_chunks}"]

    def check(mib: int) -> None:
        config = load_config(None, [*sets, f"dram.capacity={mib}MiB"])
        check_memory_fits(config.dram, 1_000_000, root)

    # Memory that the machine can never have is refused at once.
    _write(root, "proc/meminfo", MEMINFO.replace("33554432", "16777216"))
    with pytest.raises(MemoryError) as refusal:
        check(24 << 10)
    found = re.search(r"set dram\.capacity to (\d+)MiB at most", str(refusal.value))
    assert found is not None
    advised = int(found.group(1))
    assert advised >= 14 << 10  # index and a segment more take little
    check(advised)
    with pytest.raises(MemoryError, match=f"set dram.capacity to {advised}MiB at most"):
        check(advised + 1)
