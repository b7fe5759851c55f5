"""Joint saves: ranks that fill the same chunks, each its part."""

import pytest

import kvpool_client as kv
from kvpool.errors import InvalidArgument, ProtocolError
from kvpool.pool.writers.joint_saves import LIFE_TTLS
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.states import SaveState
from tests.rigs.joint_pool import LAYOUT, TTL_NS, WHOLE, JointPool, chain_of, in_joint_pool
from tests.rigs.parts import served
from tests.rigs.reserve_requests import reserve_share

LEFT, RIGHT = (kv.Share.of_rank(LAYOUT, rank, 2) for rank in range(2))
FIRST_STAGE = kv.Share(0, 1, 0, 8)
RESERVED, STORED, PART, PENDING = SaveState.RESERVED, SaveState.STORED, SaveState.PART, SaveState.PENDING
PRESENT, NO_PARENT, EXPIRED = SaveState.PRESENT, SaveState.NO_PARENT, SaveState.EXPIRED


@in_joint_pool()
def test_a_chunk_is_there_when_all_its_parts_are(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    assert pool.store(one, LEFT, "abc") == [PART] * 3
    assert pool.visible(one, "abc") == 0
    assert pool.counts()["joint_chunks"] == 3
    assert pool.store(two, RIGHT, "abc") == [STORED] * 3
    assert pool.visible(one, "abc") == 3
    assert pool.counts() == {"reservations": 0, "joint_chunks": 0, "expired": 0, "writing": 0, "zombies": 0}
    assert pool.store(one, LEFT, "abc") == [PRESENT] * 3


@in_joint_pool()
def test_sizes_and_stages_mix_where_they_do_not_overlap(pool: JointPool) -> None:
    shares = [
        LEFT,
        kv.Share.of_rank(LAYOUT, 2, 4),
        kv.Share(0, 1, 6, 2),
        kv.Share(1, 1, 6, 1),
        kv.Share(1, 1, 7, 1),
    ]
    states = [pool.store(pool.connect(), share, "ab") for share in shares]
    assert states == [[PART] * 2] * 4 + [[STORED] * 2]
    assert pool.visible(pool.connect(), "ab") == 2


@in_joint_pool()
def test_a_part_that_is_stored_is_not_written_again(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, LEFT, "ab")
    again = pool.reserve(two, kv.Share.of_rank(LAYOUT, 1, 4), "ab")
    assert (again.states, again.answer.reservation) == ([PART] * 2, 0)


@in_joint_pool()
def test_extents_that_another_one_writes_are_pending_and_others_go_on(pool: JointPool) -> None:
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    first = pool.reserve(one, LEFT, "a")
    assert pool.reserve(two, LEFT, "ab").states == [PENDING, RESERVED]
    assert pool.reserve(three, FIRST_STAGE, "a").states == [PENDING]  # a half of it is being written
    assert pool.reserve(three, WHOLE, "a").states == [PENDING]
    pool.commit(first)
    assert pool.reserve(three, FIRST_STAGE, "a").states == [PENDING]  # a half of it is stored
    assert pool.reserve(three, RIGHT, "a").states == [RESERVED]


@in_joint_pool()
def test_a_complete_chunk_waits_for_its_parent_and_comes_with_it(pool: JointPool) -> None:
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    pool.store(one, LEFT, "abcd")
    late = pool.reserve(two, RIGHT, "ab")
    later = pool.reserve(three, RIGHT, "abcd", first=2)
    assert pool.commit(later) == [PART] * 2
    assert pool.visible(one, "abcd") == 0
    assert pool.commit(late, 1) == [STORED]
    assert pool.visible(one, "abcd") == 1
    before = pool.pool._usage.models()["model"].stored_chunks
    assert pool.commit(late) == [STORED]
    assert pool.visible(one, "abcd") == 4
    assert pool.pool._usage.models()["model"].stored_chunks == before + 3


@in_joint_pool()
def test_a_longer_save_extends_the_chain_and_another_branch_is_a_chain_behind_it(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, LEFT, "ab")
    assert pool.store(two, RIGHT, "a") == [STORED]
    assert pool.store(one, LEFT, "abcd") == [PRESENT, PART, PART, PART]
    assert pool.store(one, LEFT, "abx") == [PRESENT, PART, PART]
    assert pool.reserve(one, LEFT, "ax").states == [PRESENT, RESERVED]  # behind what is there
    assert pool.commit(pool.reserve(two, RIGHT, "abx", first=2)) == [PART]
    assert pool.visible(one, "abx") == 1
    assert pool.store(two, RIGHT, "abcd") == [PRESENT, STORED, STORED, STORED]
    assert pool.visible(one, "abx") == 3
    assert pool.counts()["joint_chunks"] == 1


@in_joint_pool()
def test_parts_and_whole_saves_follow_each_other(pool: JointPool) -> None:
    """What is saved behind another one's save comes with it, whichever of the two is of parts; or is lost with it."""
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    whole = pool.reserve(one, WHOLE, "ab")
    assert pool.store(two, LEFT, "abc") == [PENDING, PENDING, PART]
    assert pool.store(three, RIGHT, "abc") == [PENDING, PENDING, PART]
    assert pool.store(three, WHOLE, "abcd") == [PENDING, PENDING, PENDING, PART]
    assert pool.visible(one, "abcd") == 0
    assert pool.commit(whole) == [STORED] * 2
    assert pool.visible(one, "abcd") == 4
    parts = pool.reserve(one, LEFT, "x")
    assert pool.store(two, WHOLE, "xy") == [PENDING, PART]
    assert pool.store(three, LEFT, "xz") == [PENDING, PART]
    pool.end(parts)
    assert pool.store(three, LEFT, "xz") == [PART, PART]
    assert pool.store(two, RIGHT, "xz") == [STORED, STORED]
    assert pool.visible(one, "xy") == 2  # x was given up by one of three


@in_joint_pool()
def test_a_run_of_parts_has_no_gap(pool: JointPool) -> None:
    """A whole save went on behind the chain: further parts join behind that, in a chain of their own."""
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    pool.store(one, LEFT, "a")
    whole = pool.reserve(two, WHOLE, "ab")
    assert whole.states == [PENDING, RESERVED]
    assert pool.store(one, LEFT, "abcd") == [PART, PENDING, PART, PART]
    assert pool.commit(whole) == [PART]
    assert pool.store(three, RIGHT, "abcd") == [STORED, PENDING, STORED, STORED]
    assert pool.visible(one, "abcd") == 4


@in_joint_pool()
def test_an_aborted_part_opens_again_and_the_others_stay(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, LEFT, "abc")
    aborted = pool.reserve(two, RIGHT, "abc")
    assert pool.commit(aborted, 1) == [STORED]
    pool.end(aborted)
    assert pool.store(pool.connect(), RIGHT, "abc") == [PRESENT, STORED, STORED]


@in_joint_pool()
def test_a_chain_without_stored_parts_ends_with_its_last_writer(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    first, second = pool.reserve(one, LEFT, "abc"), pool.reserve(two, RIGHT, "abc")
    pool.end(first)
    assert pool.counts()["writing"] == 3
    pool.drop(two)
    assert second.states == [RESERVED] * 3
    assert pool.counts() == {"reservations": 0, "joint_chunks": 0, "expired": 0, "writing": 0, "zombies": 0}


@in_joint_pool()
def test_a_part_of_an_ended_connection_opens_again(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, LEFT, "ab")
    pool.drop(one)  # what it has stored stays
    lost = pool.reserve(two, RIGHT, "ab")
    pool.write(lost, lost.written[0], garbage=True)
    pool.drop(two)
    assert pool.store(pool.connect(), RIGHT, "ab") == [STORED] * 2
    assert pool.visible(pool.connect(), "ab") == 2


@in_joint_pool()
def test_an_incomplete_chunk_expires_and_a_whole_save_can_store_it(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, LEFT, "ab")
    pool.pass_time(TTL_NS - 1)
    assert pool.reserve(two, WHOLE, "ab").states == [PENDING] * 2
    pool.pass_time(1)
    assert pool.counts() == {"reservations": 0, "joint_chunks": 0, "expired": 2, "writing": 0, "zombies": 0}
    assert pool.store(two, WHOLE, "ab") == [STORED] * 2
    assert pool.store(one, RIGHT, "ab") == [PRESENT] * 2


@in_joint_pool()
def test_a_writer_that_is_late_keeps_its_slots_from_others_until_it_has_ended(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, LEFT, "a")
    late = pool.reserve(two, RIGHT, "a")
    pool.pass_time(TTL_NS)
    assert pool.commit(late) == [EXPIRED]
    assert pool.counts()["zombies"] == 1
    again = pool.reserve(one, WHOLE, "a")
    assert again.states == [RESERVED]
    assert again.written[0][1] != late.written[0][1]
    pool.write(late, late.written[0], garbage=True)
    assert pool.commit(again) == [STORED]
    pool.end(late)
    assert pool.counts()["zombies"] == 0
    assert pool.visible(one, "a") == 1


@in_joint_pool()
def test_who_goes_on_reserving_keeps_no_chain_for_ever(pool: JointPool) -> None:
    one = pool.connect()
    pool.store(one, LEFT, "a")
    begun = pool.clock.ns
    while pool.counts()["joint_chunks"]:
        pool.pass_time(TTL_NS // 2)
        if pool.counts()["joint_chunks"]:
            pool.end(pool.reserve(one, RIGHT, "a"))
    assert pool.clock.ns - begun == LIFE_TTLS * TTL_NS


@in_joint_pool()
def test_an_expired_part_is_pending_until_its_writer_has_ended(pool: JointPool) -> None:
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    late = pool.reserve(one, LEFT, "a")
    pool.pass_time(TTL_NS // 2)
    pool.store(two, RIGHT, "a")  # the chain lives on
    pool.pass_time(TTL_NS // 2)
    assert pool.commit(late) == [EXPIRED]
    assert pool.reserve(three, LEFT, "a").states == [PENDING]
    pool.end(late)
    assert pool.store(three, LEFT, "a") == [STORED]
    assert pool.visible(three, "a") == 1


@in_joint_pool()
def test_incomplete_chunks_take_half_of_dram_at_most(pool: JointPool) -> None:
    room = (2 << 20) // LAYOUT.stored_bytes // 2
    one, two = pool.connect(), pool.connect()
    states = pool.store(one, LEFT, "k" * (room + 3))
    assert states == [PART] * room + [SaveState.QUOTA, NO_PARENT, NO_PARENT]
    assert pool.reserve(two, RIGHT, "x").states == [SaveState.QUOTA]
    assert pool.store(two, WHOLE, "x") == [STORED]
    assert pool.store(two, RIGHT, "k" * 2) == [STORED] * 2
    assert pool.store(two, LEFT, "x") == [PRESENT]
    pool.pass_time(TTL_NS)
    assert pool.store(two, RIGHT, "yz") == [PART] * 2


@in_joint_pool()
def test_a_full_pool_declines_a_part(pool: JointPool) -> None:
    room = (2 << 20) // LAYOUT.stored_bytes
    one, two = pool.connect(), pool.connect()
    held = pool.reserve(one, WHOLE, "k" * room)
    assert held.states == [RESERVED] * room
    assert pool.reserve(two, LEFT, "xy").states == [SaveState.FULL, NO_PARENT]
    pool.end(held)
    assert pool.store(two, LEFT, "xy") == [PART] * 2


@in_joint_pool()
def test_a_chain_that_is_dropped_with_its_parent_is_saved_anew(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, WHOLE, "a")
    pool.store(one, LEFT, "abc")
    pool.pool.discard(chain_of("a")[0])
    assert pool.store(two, RIGHT, "abc") == [PART] * 3
    assert pool.counts()["expired"] == 2
    assert pool.store(one, LEFT, "abc") == [STORED] * 3
    assert pool.visible(one, "abc") == 3


@in_joint_pool()
def test_a_chain_that_went_with_a_save_that_was_given_up_is_joined_by_nobody(pool: JointPool) -> None:
    one, two, three = pool.connect(), pool.connect(), pool.connect()
    whole = pool.reserve(one, WHOLE, "a")
    assert pool.store(two, LEFT, "abc") == [PENDING, PART, PART]
    pool.end(whole)
    assert pool.store(one, WHOLE, "a") == [STORED]
    assert pool.store(three, RIGHT, "abc") == [PRESENT, PART, PART]
    assert pool.store(two, LEFT, "abc") == [PRESENT, STORED, STORED]
    assert pool.visible(one, "abc") == 3
    whole = pool.reserve(one, WHOLE, "x")
    assert pool.store(two, LEFT, "xy") == [PENDING, PART]
    pool.end(whole)
    assert pool.store(one, WHOLE, "xy") == [STORED] * 2
    assert pool.store(three, RIGHT, "xy") == [PRESENT] * 2


@in_joint_pool()
def test_a_part_of_a_chain_that_was_dropped_is_not_stored(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    pool.store(one, WHOLE, "a")
    pool.store(one, LEFT, "abc")
    late = pool.reserve(two, RIGHT, "abc")
    pool.pool.discard(chain_of("a")[0])
    assert pool.commit(late, 1) == [EXPIRED]
    pool.end(late)
    assert pool.counts() == {"reservations": 0, "joint_chunks": 0, "expired": 2, "writing": 0, "zombies": 0}


@pytest.mark.parametrize(
    "part", [(0, 3, 0, 8), (2, 1, 0, 8), (0, 2, 7, 2), (0, 0, 0, 1), (0, 1, 0, 0), ((1 << 32) - 1, 1, 0, 1)]
)
@in_joint_pool()
def test_a_share_that_chunks_do_not_have_is_refused(pool: JointPool, part: tuple[int, int, int, int]) -> None:
    request = reserve_share(*part, b"", chain_of("a").packed, b"", b"")
    with pytest.raises(InvalidArgument, match="share"):
        served(pool.pool.chains.reserve(pool.connect(), request))
    assert pool.counts()["joint_chunks"] == 0


@in_joint_pool()
def test_a_commit_has_a_checksum_for_each_reserved_extent(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    save = pool.reserve(one, LEFT, "ab")
    row = 4 * len(LEFT.extents(LAYOUT))
    commits = pool.pool.chains.commit
    for wrong in (b"", bytes(row - 4), bytes(row + 4), bytes(3 * row)):
        with pytest.raises(ProtocolError):
            served(commits(one, m.Commit(save.answer.reservation, wrong, b"")))
    whole = bytes(4 * LAYOUT.extents)
    for foreign in (save.answer.reservation, save.answer.reservation + 1, 1 << 62):
        states = served(commits(two, m.Commit(foreign, whole, b""))).states
        assert not states, "it has ended, or is another's"
    served(pool.pool.chains.end_reservation(two, save.answer.reservation))
    served(pool.pool.chains.land_saved(one, one_way.LandSaved(save.answer.reservation, 0, bytes(8))))
    assert pool.commit(save) == [PART] * 2


@in_joint_pool()
def test_namespaces_are_not_mixed(pool: JointPool) -> None:
    one, other = pool.connect(), pool.connect(model="another")
    pool.store(one, LEFT, "a")
    assert pool.reserve(other, RIGHT, "a").states == [SaveState.FOREIGN]
    plain = pool.connect(kv.Layout(layers=2, kv_heads=8, head_dim=16, dtype="float16", chunk_tokens=32, summaries=""))
    assert pool.reserve(plain, kv.Share(0, 1), "a").states == [SaveState.FOREIGN]


@in_joint_pool()
def test_the_last_part_that_asks_for_retention_sets_it(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()

    def retained(path: str) -> int:
        found = pool.pool._directory.retention(chain_of(path)[-1])
        assert found is not None
        return int(found[0])

    first = pool.reserve(one, LEFT, "a", retention=(bytes([70]), bytes(4)))
    assert retained("a") == 70
    pool.commit(first)
    second = pool.reserve(two, RIGHT, "a", retention=(bytes([60]), bytes(4)))
    assert list(second.answer.retained) == [0]
    pool.commit(second)
    assert retained("a") == 60
    assert list(pool.reserve(one, LEFT, "a").answer.retained) == []


@in_joint_pool()
def test_a_stopping_pool_declines_parts(pool: JointPool) -> None:
    one = pool.connect()
    save = pool.reserve(one, LEFT, "a")
    pool.pool.chains.is_stopping = True
    assert pool.reserve(one, RIGHT, "ab").states == [SaveState.STOPPING, NO_PARENT]
    assert pool.pool.is_busy
    assert pool.commit(save) == [PART]
    assert not pool.pool.is_busy


@in_joint_pool(**{"dram.capacity": "64MiB"})
def test_a_save_of_more_chunks_than_a_part_is_joined_in_parts(pool: JointPool) -> None:
    one, two = pool.connect(), pool.connect()
    path = "".join(chr(0x100 + number) for number in range(300))
    assert pool.store(one, LEFT, path) == [PART] * 300
    assert pool.store(two, RIGHT, path) == [STORED] * 300
    assert pool.visible(one, path) == 300
