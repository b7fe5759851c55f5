"""An engine whose saves are by copy against the memory that it gets: it changes no byte that another can read.

The arena is the kernel's to guard; staging is the engine's own, and what it does there before, while or after the daemon copies
is found by the checksum of what was stored.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import Refused
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import staging as sm
from kvpool.states import SaveState
from tests.hostile.conftest import Campaign
from tests.hostile.memory.test_shared_memory import (
    FUTURE_WRITE,
    INDEX_ATTACKS,
    LIBC,
    MADV_REMOVE,
    MAP_FAILED,
    PAGE,
    PUNCH_HOLE,
    RESIZE,
    _fallocate,
    _reopened,
)
from tests.hostile.rigs.daemon_watch import assert_never_internal, fds_at_rest, open_fds
from tests.hostile.rigs.raw_clients import (
    checksums_of,
    engine,
    key_of,
    keys_of,
    mapped_arena,
    mapped_staging,
    next_answer,
    payload_of,
    raw_engine,
    read_back,
    reserve,
    stage_and_commit,
    staging_fd,
    store,
)
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.dropping import drop_leases

STAGING_BYTES = 256 << 10
HONEST = keys_of(1000, 4)
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE


@pytest.fixture(scope="module")
def by_copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the module, with the chunks of an honest engine."""
    options = {"server.write_mode": "copy", "server.staging": "256KiB"}
    with Daemon(tmp_path_factory.mktemp("by-copy"), **options) as daemon:
        with engine(daemon) as honest:
            store(honest, HONEST)
        yield daemon
        with engine(daemon) as honest:
            assert read_back(honest, HONEST) == [True] * 4
        assert daemon.problems() == []
        assert daemon.stats()["checksum_failures"] == 0
        assert_never_internal(daemon)


@pytest.fixture
def hostile(by_copy: Daemon) -> Iterator[BlockingConnection]:
    """A handshaken connection that keeps to nothing."""
    with engine(by_copy) as connection:
        yield connection


def _copied(connection: BlockingConnection, made: m.Reserved, number: int, payload: bytes, staging: mmap.mmap) -> None:
    staging[: len(payload)] = payload
    connection.call(sm.CopyStaged(made.reservation, number, 1, 0, SMALL.extents, 0), m.Done)


@pytest.mark.parametrize("name", INDEX_ATTACKS)
@pytest.mark.parametrize("is_reopened", [False, True], ids=["as received", "reopened"])
def test_the_arena_cannot_be_changed(hostile: BlockingConnection, name: str, is_reopened: bool) -> None:
    size = hostile.welcome.arena_bytes
    fd = _reopened(hostile.fds[0]) if is_reopened else os.dup(hostile.fds[0])
    try:
        with pytest.raises(OSError, match="Errno"):
            INDEX_ATTACKS[name](fd, size)
    finally:
        os.close(fd)
    assert read_back(hostile, HONEST) == [True] * 4


def test_a_read_only_mapping_of_the_arena_stays_read_only(hostile: BlockingConnection) -> None:
    fd, size = hostile.fds[0], hostile.welcome.arena_bytes
    address = LIBC.mmap(None, size, READ, mmap.MAP_SHARED, fd, 0)
    assert address != MAP_FAILED
    assert LIBC.mprotect(address, size, READ | WRITE) != 0
    assert LIBC.madvise(address, size, MADV_REMOVE) != 0
    assert LIBC.munmap(address, size) == 0
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE, READ | WRITE) as private:
        private[:] = bytes(size)
    assert read_back(hostile, HONEST) == [True] * 4


def test_the_seals_are_these_and_no_client_can_add_one(hostile: BlockingConnection) -> None:
    assert fcntl.fcntl(hostile.fds[0], fcntl.F_GET_SEALS) == RESIZE | fcntl.F_SEAL_SEAL | FUTURE_WRITE
    with staging_fd(hostile) as staging:
        assert fcntl.fcntl(staging, fcntl.F_GET_SEALS) == RESIZE | fcntl.F_SEAL_SEAL
        for fd in (hostile.fds[0], staging):
            for seal in (fcntl.F_SEAL_WRITE, FUTURE_WRITE, fcntl.F_SEAL_SEAL):
                with pytest.raises(PermissionError):
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
        for size in (0, STAGING_BYTES - PAGE, STAGING_BYTES + PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(staging, size)


def test_staging_is_each_connections_own(by_copy: Daemon, hostile: BlockingConnection) -> None:
    with engine(by_copy) as other, staging_fd(hostile) as fd, staging_fd(hostile) as again, staging_fd(other) as theirs:
        assert os.fstat(fd).st_ino == os.fstat(again).st_ino
        assert os.fstat(fd).st_ino != os.fstat(theirs).st_ino
        os.pwrite(fd, b"x" * PAGE, 0)
        assert os.pread(theirs, PAGE, 0) == bytes(PAGE)
        assert by_copy.stats()["staging_areas"] == 2


def test_writes_to_staging_after_the_commit_change_no_stored_byte(hostile: BlockingConnection) -> None:
    keys = keys_of(2000, 3)
    made = reserve(hostile, keys)
    with mapped_staging(hostile) as staging:
        assert set(stage_and_commit(hostile, keys, made)) == {SaveState.STORED}
        staging[:] = b"\xa5" * len(staging)
    with staging_fd(hostile) as fd:
        _fallocate(fd, PUNCH_HOLE, 0, STAGING_BYTES)
    assert read_back(hostile, keys) == [True] * 3


def test_chunks_not_copied_or_changed_before_the_copy_are_declined(hostile: BlockingConnection) -> None:
    keys = keys_of(2100, 4)
    made = reserve(hostile, keys)
    payloads = [payload_of(key_of(2100 + number)) for number in range(4)]
    with mapped_staging(hostile) as staging:
        _copied(hostile, made, 0, payloads[0], staging)
        _copied(hostile, made, 1, payloads[1][:-1] + bytes([payloads[1][-1] ^ 1]), staging)
        _copied(hostile, made, 2, payloads[2], staging)
    sums = b"".join(map(checksums_of, payloads))
    states = hostile.call(m.Commit(made.reservation, sums, b""), m.Committed).states
    assert list(states) == [SaveState.STORED, SaveState.CHECKSUM, SaveState.NO_PARENT, SaveState.NO_PARENT]
    assert read_back(hostile, keys) == [True]
    made = reserve(hostile, keys_of(2200, 1))
    answer = hostile.call(m.Commit(made.reservation, checksums_of(payload_of(key_of(2200))), b""), m.Committed)
    assert list(answer.states) == [SaveState.CHECKSUM]
    assert reserve(hostile, keys_of(2200, 1)).states == bytes([SaveState.RESERVED])


def test_an_extent_that_is_copied_again_must_be_good_again(hostile: BlockingConnection) -> None:
    made = reserve(hostile, keys_of(2300, 1))
    payload = payload_of(key_of(2300))
    with mapped_staging(hostile) as staging:
        _copied(hostile, made, 0, payload, staging)
        staging[: SMALL.extent_bytes] = bytes(SMALL.extent_bytes)
        hostile.call(sm.CopyStaged(made.reservation, 0, 1, 1, 1, 0), m.Done)
    states = hostile.call(m.Commit(made.reservation, checksums_of(payload), b""), m.Committed).states
    assert list(states) == [SaveState.CHECKSUM]


def test_a_chunk_that_is_published_is_not_written_again(by_copy: Daemon, hostile: BlockingConnection) -> None:
    keys = keys_of(2400, 2)
    made = reserve(hostile, keys)
    with mapped_staging(hostile) as staging:
        for number in range(2):
            _copied(hostile, made, number, payload_of(key_of(2400 + number)), staging)
        sums = checksums_of(payload_of(key_of(2400)))
        assert list(hostile.call(m.Commit(made.reservation, sums, b""), m.Committed).states) == [SaveState.STORED]
        staging[:] = bytes(len(staging))
        with pytest.raises(Refused, match="reserved and not published"):
            hostile.call(sm.CopyStaged(made.reservation, 0, 1, 0, SMALL.extents, 0), m.Done)
    with engine(by_copy) as other:
        assert read_back(other, keys[:32]) == [True]


ALL_EXTENTS = (0, SMALL.extents, 0)
OUTSIDE = {
    "beyond the end": (0, 1, 0, SMALL.extents, STAGING_BYTES),
    "over the end": (0, 1, 0, SMALL.extents, STAGING_BYTES - SMALL.chunk_bytes + 1),
    "wrapping": (0, 1, 0, SMALL.extents, (1 << 64) - PAGE),
    "negative": (0, 1, 0, SMALL.extents, -PAGE),
    "too many chunks": (0, 3, *ALL_EXTENTS),
    "no chunks": (0, 0, *ALL_EXTENTS),
    "negative chunks": (0, -1, *ALL_EXTENTS),
    "chunks without end": (0, 1 << 62, *ALL_EXTENTS),
    "chunk behind the last": (2, 1, *ALL_EXTENTS),
    "chunk before the first": (-1, 1, *ALL_EXTENTS),
    "extent behind the last": (0, 1, SMALL.extents, 1, 0),
    "extents over the last": (0, 1, 1, SMALL.extents, 0),
    "extent before the first": (0, 1, -1, 1, 0),
    "no extents": (0, 1, 0, 0, 0),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_copy_from_or_to_outside_ends_the_connection(by_copy: Daemon, name: str) -> None:
    with engine(by_copy) as hostile, staging_fd(hostile):
        made = reserve(hostile, keys_of(2500, 2))
        with pytest.raises(Refused) as refusal:
            hostile.call(sm.CopyStaged(made.reservation, *OUTSIDE[name]), m.Done)
        assert refusal.value.code == "protocol"
    with engine(by_copy) as other:
        assert read_back(other, HONEST) == [True] * 4


def test_a_copy_of_more_extents_than_one_request_may_name_ends_the_connection(by_copy: Daemon) -> None:
    """As many as bytes of staging, were they of a byte each: all others would wait for them."""
    tiny = kv.Layout(layers=1024, kv_heads=1, head_dim=1, dtype="uint8", planes=1, chunk_tokens=1)
    chunks = sm.COPIED_EXTENTS_MAX // tiny.extents + 1
    with engine(by_copy, tiny) as hostile, staging_fd(hostile):
        made = reserve(hostile, keys_of(2550, 1))
        with pytest.raises(Refused, match=f"at most {sm.COPIED_EXTENTS_MAX} in all"):
            hostile.call(sm.CopyStaged(made.reservation, 0, chunks, 0, tiny.extents, 0), m.Done)


def test_anothers_reservation_is_not_written(by_copy: Daemon, hostile: BlockingConnection) -> None:
    with engine(by_copy) as victim, mapped_staging(hostile) as garbage, mapped_staging(victim) as staging:
        made = reserve(victim, keys_of(2600, 2))
        garbage[:] = b"\xa5" * len(garbage)
        hostile.call(sm.CopyStaged(made.reservation, 1, 1, 0, SMALL.extents, 0), m.Done)
        _copied(victim, made, 0, payload_of(key_of(2600)), staging)
        hostile.call(sm.CopyStaged(made.reservation, 0, 2, 0, SMALL.extents, 0), m.Done)
        sums = b"".join(checksums_of(payload_of(key_of(2600 + number))) for number in range(2))
        assert hostile.call(m.Commit(made.reservation, sums, b""), m.Committed).states == b""
        states = victim.call(m.Commit(made.reservation, sums, b""), m.Committed).states
        assert list(states) == [SaveState.STORED, SaveState.CHECKSUM]
        assert read_back(victim, keys_of(2600, 1)) == [True]


def test_published_bytes_match_their_checksums_while_staging_is_written(by_copy: Daemon, campaign: Campaign) -> None:
    """One thread flips an extent between two contents without end; the other has it copied and commits either's checksum."""
    stored = declined = 0
    with engine(by_copy) as hostile, mapped_staging(hostile) as staging:
        contents = [payload_of(key_of(number)) for number in (2700, 2701)]
        is_over = threading.Event()

        def flip() -> None:
            array = np.frombuffer(staging, np.uint8)
            rows = [np.frombuffer(content, np.uint8) for content in contents]
            while not is_over.is_set():
                for row in rows:
                    array[: len(row)] = row

        writer = threading.Thread(target=flip)
        writer.start()
        try:
            for number in range(campaign.pick(100, 20_000)):
                made = reserve(hostile, key_of(3000 + number % 400))
                if made.states[0] == SaveState.PRESENT:
                    continue  # stored before
                hostile.call(sm.CopyStaged(made.reservation, 0, 1, 0, SMALL.extents, 0), m.Done)
                answer = hostile.call(m.Commit(made.reservation, checksums_of(contents[number % 2]), b""), m.Committed)
                if answer.states[0] == SaveState.STORED:
                    stored += 1
                    _assert_published(hostile, key_of(3000 + number % 400), contents[number % 2])
                else:
                    assert answer.states[0] == SaveState.CHECKSUM
                    declined += 1
        finally:
            is_over.set()
            writer.join()
    print(f"{stored} stored, {declined} declined")
    assert by_copy.problems(deep=True) == []


def _assert_published(connection: BlockingConnection, key: bytes, content: bytes) -> None:
    leased = connection.call(m.Acquire(key), m.Leased)
    offset = int.from_bytes(leased.offsets, "little")
    with mapped_arena(connection) as arena:
        assert arena[offset : offset + len(content)] == content
    drop_leases(connection, leased.lease)


def test_a_descriptor_is_sent_in_order_or_not_at_all(by_copy: Daemon) -> None:
    """Many requests at once: each answer in its place, and staging refused where it would overtake one."""
    with raw_engine(by_copy) as raw:
        requests = [m.encode(m.Renew(b""), 1), m.encode(mm.OpenMemory(b""), 2), m.encode(m.Renew(b""), 3)]
        raw.sendall(b"".join(requests))
        answers = [next_answer(raw) for _ in requests]
        assert [sequence for _, sequence, _ in answers] == [1, 2, 3]
        assert answers[1][0] in (mm.Memory.KIND, m.Failure.KIND)


def test_staging_memory_goes_with_its_connection(by_copy: Daemon) -> None:
    fds = fds_at_rest(by_copy)
    for _ in range(20):
        with engine(by_copy) as connection, mapped_staging(connection) as staging:
            staging[:] = b"x" * len(staging)
    wait_until(lambda: by_copy.stats()["connections"] == 1, "every connection but the asking one has ended")
    assert by_copy.stats()["staging_bytes"] == 0
    wait_until(lambda: open_fds(by_copy) <= fds, f"the daemon has no more than {fds} descriptors")


def test_a_layout_whose_extents_do_not_fit_is_refused_at_connect(by_copy: Daemon) -> None:
    wide = kv.Layout(layers=1, kv_heads=64, head_dim=128, dtype="float16", chunk_tokens=32)
    with pytest.raises(Refused, match=r"server\.staging is 256KiB") as refusal:
        engine(by_copy, wide)
    assert refusal.value.code == "layout"


def test_in_place_a_chunk_can_be_forged(daemon: Daemon) -> None:
    """The reason for the copy mode: a client with a writable arena can change bytes and keep their checksum."""
    forgery = (1 | _polynomial() << 1).to_bytes(5, "little")  # a multiple of the polynomial: the sum of it is nothing
    with engine(daemon) as victim, engine(daemon) as forger:
        store(victim, keys_of(0, 1))
        offset = int.from_bytes(victim.call(m.Acquire(keys_of(0, 1)), m.Leased).offsets, "little")
        with mapped_arena(forger) as arena:
            for at, byte in enumerate(forgery, offset + 100):
                arena[at] ^= byte
        assert read_back(victim, keys_of(0, 1)) == [False]
        assert daemon.problems(deep=True) == []


def _polynomial() -> int:
    """The polynomial of CRC-32C, reflected: the checksum of a single bit gives it."""
    return kvpool_native.crc32c(b"\x80") ^ kvpool_native.crc32c(b"\x00")


def test_in_place_there_is_no_staging(shared_daemon: Daemon) -> None:
    with engine(shared_daemon) as connection:
        for request, answer in ((mm.OpenMemory(b""), mm.Memory), (sm.CopyStaged(1, 0, 1, 0, 1, 0), m.Done)):
            with pytest.raises(Refused):
                connection.call(request, answer)
        assert connection.welcome.staging_bytes == 0


def test_checksums_are_the_daemons_own(hostile: BlockingConnection) -> None:
    keys = keys_of(2900, 2)
    store(hostile, keys)
    leased = hostile.call(m.Acquire(keys), m.Leased)
    index = kvpool_native.IndexView(
        kvpool_native.Mapping.attach(hostile.fds[1], hostile.welcome.index_bytes, writable=False)
    )
    for number, slot in enumerate(np.frombuffer(leased.slots, "<u8").tolist()):
        found = [index.checksum_at(slot, extent) for extent in range(SMALL.extents)]
        assert found == np.frombuffer(checksums_of(payload_of(key_of(2900 + number))), "<u4").tolist()
