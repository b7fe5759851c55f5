"""Geometry plan: numbers from which the sizes of arena, index and records follow, as a later process can read them. Pure."""

from typing import NamedTuple

import kvpool_native


class GeometryPlan(NamedTuple):
    """Arguments of `DirectoryGeometry.plan`. `device`: capacity, segment bytes and chunks of a tier of copies, or none."""

    capacity: int
    segment_bytes: int
    max_chunks: int
    further_entries: int
    device: tuple[int, int, int] | None

    @classmethod
    def of(
        cls,
        capacity: int,
        segment_bytes: int,
        max_chunks: int,
        *,
        further_entries: int,
        upper: kvpool_native.DirectoryGeometry | None,
    ) -> "GeometryPlan":
        """See the class. `upper`: the geometry of the copies."""
        device = None if upper is None else (upper.capacity, upper.segment_bytes, upper.max_chunks)
        return cls(capacity, segment_bytes, max_chunks, further_entries, device)

    @classmethod
    def from_wire(cls, fields: object) -> "GeometryPlan":
        """What was a list of the fields. Raises ValueError on anything else."""
        if not isinstance(fields, list) or len(fields) != len(cls._fields):
            raise ValueError(f"{fields!r} is no plan of a geometry")
        capacity, segment_bytes, max_chunks, further_entries, device = fields
        numbers = (capacity, segment_bytes, max_chunks, further_entries)
        of_device = device if isinstance(device, list) else []
        if len(of_device) not in (0, 3) or not all(type(one) is int and one >= 0 for one in (*numbers, *of_device)):
            raise ValueError(f"{fields!r} is no plan of a geometry")
        copies = (of_device[0], of_device[1], of_device[2]) if of_device else None
        return cls(capacity, segment_bytes, max_chunks, further_entries, copies)

    def geometry(self) -> kvpool_native.DirectoryGeometry:
        """The sizes. Raises ValueError for numbers that are none of a plan."""
        planned = kvpool_native.DirectoryGeometry
        copies = None if self.device is None else planned.plan_device(*self.device)
        return planned.plan(self.capacity, self.segment_bytes, self.max_chunks, self.further_entries, copies)
