"""Sets of chunks for tests: names, and bytes that derive from each."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
from tests.rigs.payload import Bytes, chunk_bytes_of

Names = npt.NDArray[np.uint8]


def names_of(*numbers: int) -> Names:
    """A name for each of these numbers."""
    return np.stack([np.frombuffer(number.to_bytes(8, "little") * 4, np.uint8) for number in numbers])


def rows_for(pool: kv.Pool, names: Names, group: int = 0) -> Bytes:
    """The bytes of the chunks with these names, of the Pool's share of each, [names, bytes]."""
    part, share = pool.layout.group_layouts[group], pool.shares[group]
    whole = np.stack([chunk_bytes_of(name.tobytes(), part.chunk_bytes) for name in names])
    extents = whole.reshape(len(names), part.kv_extents, part.payload_bytes)[:, list(share.extents(part))]
    return np.ascontiguousarray(extents.reshape(len(names), share.of_layout(part).chunk_bytes))


def store_set(pool: kv.Pool, names: Names, group: int = 0, parents: Names | None = None) -> kv.SaveResult:
    """A set is saved."""
    return pool.save_set(names, rows_for(pool, names, group), parents, group=group).commit()


def load_set(pool: kv.Pool, names: Names, group: int = 0) -> tuple[list[bool], kv.LoadResult]:
    """A set is leased and loaded: what was leased, and the result. Every row has its own bytes, or was not touched."""
    expected = rows_for(pool, names, group)
    into = np.full_like(expected, 0xA5)
    with pool.acquire_set(names, group) as lease:
        held: list[bool] = lease.held.tolist()
        result = pool.load_set(lease, into).wait()
    for number, state in enumerate(result.states):
        if state == "complete":
            assert np.array_equal(into[number], expected[number])
        if state == "absent":
            assert (into[number] == 0xA5).all()
    assert [state != "absent" for state in result.states] == held
    assert result.chunks == result.states.count("complete")
    return held, result


def found(pool: kv.Pool, names: Names, group: int = 0) -> list[int]:
    """The level of each."""
    levels: list[int] = pool.probe(names, group).tolist()
    return levels


def are_stored(pool: kv.Pool, numbers: Sequence[int]) -> list[bool]:
    """Which of these are found."""
    return [level > 0 for level in found(pool, names_of(*numbers))]
