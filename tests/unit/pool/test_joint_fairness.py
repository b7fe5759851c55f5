"""Joint saves of one client beside others': what is left to them, and what they see while it is being served, or has gone."""

import pytest

import kvpool_client as kv
from kvpool.pool.writers import joint_saves
from kvpool.protocol.records import messages as m
from kvpool.states import SaveState
from tests.rigs.joint_pool import LAYOUT, WHOLE, JointPool, chain_of, in_joint_pool
from tests.rigs.parts import served
from tests.rigs.reserve_requests import reserve_share

LEFT, RIGHT = (kv.Share.of_rank(LAYOUT, rank, 2) for rank in range(2))
PART, STORED, RESERVED = SaveState.PART, SaveState.STORED, SaveState.RESERVED
SHARE, PRESENT = SaveState.QUOTA, SaveState.PRESENT
HALVES = {"dram.connection_quota": "0.5"}
ROOM = (2 << 20) // LAYOUT.stored_bytes // 2  # chunks that may be incomplete together
# Of two extents in a slot of a page.
TINY = kv.Layout(layers=2, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=1)
LARGE = {"dram.capacity": "64MiB"}


def path_of(chunks: int, first: int = 0x100) -> str:
    return "".join(chr(first + number) for number in range(chunks))


@in_joint_pool(**LARGE)
def test_a_check_between_the_parts_of_a_long_request_finds_nothing(pool: JointPool) -> None:
    one = pool.connect()
    asked = reserve_share(0, 2, 0, 4, b"", chain_of(path_of(300)).packed, b"", b"")
    request = pool.pool.chains.reserve(one, asked)
    next(request)
    assert pool.counts()["joint_chunks"] > 0
    assert pool.problems() == []
    request.close()
    assert pool.counts()["joint_chunks"] == 0


@in_joint_pool(**HALVES)
def test_a_connection_leaves_room_for_the_incomplete_chunks_of_others(pool: JointPool) -> None:
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    assert pool.store(one, LEFT, path_of(ROOM)).count(PART) == ROOM // 2
    for number in range(4):  # further prompts have no more
        assert pool.reserve(one, LEFT, path_of(2, 0x1000 + 16 * number)).states[0] == SHARE
    assert pool.store(two, LEFT, path_of(ROOM, 0x2000)).count(PART) == ROOM // 4
    assert pool.store(three, RIGHT, path_of(ROOM // 2)) == [STORED] * (ROOM // 2)
    assert pool.store(one, LEFT, path_of(2, 0x3000)) == [PART] * 2


@in_joint_pool(**HALVES)
def test_who_extends_the_chain_of_another_one_leaves_it_room(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    assert pool.store(one, LEFT, path_of(1)) == [PART]
    assert pool.reserve(two, LEFT, path_of(2 * ROOM)).states.count(RESERVED) == (ROOM - 1) // 2
    assert pool.store(one, LEFT, path_of(2, 0x1000)) == [PART] * 2
    assert pool.store(one, WHOLE, path_of(2, 0x2000)) == [STORED] * 2


@in_joint_pool()
def test_small_incomplete_chunks_take_half_of_the_memory_at_most(pool: JointPool) -> None:
    capacity = 2 << 20
    for number in range(8):
        one = pool.connect(TINY)
        keys = chain_of(path_of(600, 0x1000 * (number + 1)))
        served(pool.pool.chains.reserve(one, reserve_share(0, 1, 0, 1, b"", keys.packed, b"", b"")))
    held = sum(row.get("reserved_bytes", 0) for row in pool.pool.held_by_connection().values())
    index = pool.pool.measure({}).index
    assert TINY.stored_bytes * index["joint_chunks"] < index["joint_bytes"]
    assert held == index["joint_bytes"] == capacity // 2


@in_joint_pool()
def test_chunks_that_are_there_need_no_room(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    assert pool.store(one, WHOLE, "abcd") == [STORED] * 4
    left = ROOM - 1
    pool.reserve(one, LEFT, path_of(left))
    assert pool.store(two, RIGHT, "abcdef") == [PRESENT] * 4 + [PART, SHARE]
    assert pool.store(two, LEFT, "abcd") == [PRESENT] * 4
    assert pool.store(two, LEFT, "xy") == [SHARE, SaveState.NO_PARENT]


@in_joint_pool(**LARGE)
def test_what_is_complete_is_published_though_its_last_writer_has_gone(
    pool: JointPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_saves, "PUBLISHED_AT_ONCE", 16)
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    path = path_of(100)
    pool.store(one, LEFT, path)
    first, behind = pool.reserve(two, RIGHT, path[:1]), pool.reserve(three, RIGHT, path, first=1)
    pool.commit(behind)
    sums = pool.write(first, first.written[0])
    request = pool.pool.chains.commit(two, m.Commit(first.answer.reservation, sums, b""))
    next(request)
    request.close()  # as its connection does when it ends
    pool.drop(two)
    assert pool.visible(one, path) == 100
    assert pool.counts() == dict.fromkeys(pool.counts(), 0)
