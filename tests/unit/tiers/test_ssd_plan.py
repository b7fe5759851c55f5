"""The division of a capacity into segment files, up to the largest that the core takes."""

from dataclasses import replace
from typing import Any

import pytest

import kvpool_native
from kvpool.config.config import SsdConfig, load_config
from kvpool.errors import ConfigError
from kvpool.tiers.ssd.plan import SEGMENTS_MAX_LARGE, plan_ssd

TIB = 1 << 40
DESCRIPTORS = 20_000


def _config(capacity: int, **changes: Any) -> SsdConfig:
    return replace(load_config(None, ["ssd.path=/disk", f"ssd.capacity={capacity}"]).ssd, **changes)


@pytest.mark.parametrize("capacity", [TIB, 4 * TIB, 5 * TIB, 16 * TIB, kvpool_native.FILES_BYTES_MAX])
def test_every_capacity_that_a_config_takes_has_a_plan_that_the_core_takes(capacity: int) -> None:
    plan = plan_ssd(_config(capacity))
    assert plan.segments * plan.segment_bytes + 2 * plan.catalogue_bytes <= capacity
    assert plan.segments * plan.segment_bytes > 0.98 * capacity
    assert plan.segments <= SEGMENTS_MAX_LARGE < DESCRIPTORS
    geometry = kvpool_native.DirectoryGeometry.plan_files(plan.segment_bytes, plan.segments, plan.max_chunks)
    directory = kvpool_native.Directory.of_files(geometry)
    directory.mark_segment_ready(plan.segments - 1)
    size_class, namespace = directory.add_class((1 << 20) + 4096, 32), directory.add_namespace()
    reserved = directory.reserve(namespace, size_class, b"", bytes(range(32)), 1)
    assert reserved.states == b"\1"
    assert int.from_bytes(reserved.offsets, "little") == (plan.segments - 1) * plan.segment_bytes
    assert directory.end_reservation(reserved.id, 2)


def test_a_capacity_beyond_the_cores_limit_is_refused_by_name_value_and_range() -> None:
    with pytest.raises(ConfigError, match=r"ssd\.capacity is .*, expected a size from 0B to 64TiB"):
        _config(kvpool_native.FILES_BYTES_MAX + 1)


def test_more_files_than_have_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ssd\.segment is 64KiB, expected at least 4276KiB for ssd\.capacity 4TiB"):
        plan_ssd(_config(4 * TIB, segment=64 << 10))
