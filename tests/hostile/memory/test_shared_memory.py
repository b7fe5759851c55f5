"""Attacks on the memory that the daemon shares: no effect on the index, no lasting one on the arena."""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from tests.hostile.rigs.raw_clients import engine, keys_of, mapped_arena, read_back, store
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.payload import assert_right_bytes, load_all, tokens_of
from tests.rigs.payload import store as store_chain

PAGE = mmap.PAGESIZE
PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
ZERO_RANGE = 0x10
COLLAPSE_RANGE = 0x08
MADV_REMOVE = 9
FUTURE_WRITE = 0x10
RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
MAP_FAILED = ctypes.c_void_p(-1).value


@pytest.fixture
def hostile(shared_daemon: Daemon) -> Iterator[BlockingConnection]:
    """A handshaken connection whose descriptors are played with."""
    with engine(shared_daemon) as connection:
        yield connection


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if LIBC.fallocate(fd, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def _reopened(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)


INDEX_ATTACKS: dict[str, Callable[[int, int], object]] = {
    "map writable": lambda fd, size: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
    "write": lambda fd, size: os.pwrite(fd, b"x", 0),
    "write vector": lambda fd, size: os.pwritev(fd, [b"x"], 4096),
    "truncate": lambda fd, size: os.ftruncate(fd, 0),
    "shrink": lambda fd, size: os.ftruncate(fd, size - PAGE),
    "grow": lambda fd, size: os.ftruncate(fd, size + PAGE),
    "punch hole": lambda fd, size: _fallocate(fd, PUNCH_HOLE, 0, PAGE),
    "zero range": lambda fd, size: _fallocate(fd, ZERO_RANGE, 0, PAGE),
    "collapse range": lambda fd, size: _fallocate(fd, COLLAPSE_RANGE, 0, PAGE),
    "allocate more": lambda fd, size: _fallocate(fd, 0, size, PAGE),
    "seal": lambda fd, size: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    "copy into": lambda fd, size: os.sendfile(fd, fd, 4096, 64),
}


@pytest.mark.parametrize("name", INDEX_ATTACKS)
@pytest.mark.parametrize("is_reopened", [False, True], ids=["as received", "reopened"])
def test_the_index_cannot_be_changed(hostile: BlockingConnection, name: str, is_reopened: bool) -> None:
    fd, size = hostile.fds[1], hostile.welcome.index_bytes
    before = os.pread(fd, size, 0)
    fd = _reopened(fd) if is_reopened else os.dup(fd)
    try:
        with pytest.raises(OSError, match="Errno"):
            INDEX_ATTACKS[name](fd, size)
    finally:
        os.close(fd)
    assert os.pread(hostile.fds[1], size, 0) == before


def test_a_read_only_mapping_of_the_index_stays_read_only(hostile: BlockingConnection) -> None:
    fd, size = hostile.fds[1], hostile.welcome.index_bytes
    before = os.pread(fd, size, 0)
    address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    assert address not in (None, MAP_FAILED)
    for protection in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
        assert LIBC.mprotect(address, size, protection) == -1
    assert LIBC.madvise(address, size, MADV_REMOVE) == -1
    LIBC.munmap(address, size)
    assert os.pread(fd, size, 0) == before


def test_a_private_copy_of_the_index_is_the_clients_own(hostile: BlockingConnection) -> None:
    fd, size = hostile.fds[1], hostile.welcome.index_bytes
    before = os.pread(fd, size, 0)
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private:
        private[:] = bytes(size)
    assert os.pread(fd, size, 0) == before


def test_the_seals_are_these_and_no_client_can_add_one(hostile: BlockingConnection) -> None:
    arena, index = hostile.fds
    assert fcntl.fcntl(index, fcntl.F_GET_SEALS) == RESIZE | fcntl.F_SEAL_SEAL | FUTURE_WRITE
    assert fcntl.fcntl(arena, fcntl.F_GET_SEALS) == RESIZE | fcntl.F_SEAL_SEAL
    for fd in hostile.fds:
        for seal in (fcntl.F_SEAL_WRITE, FUTURE_WRITE, fcntl.F_SEAL_SEAL):
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)


@pytest.mark.parametrize("change", [-PAGE, PAGE, -(1 << 20)])
def test_the_arena_cannot_be_resized(hostile: BlockingConnection, change: int) -> None:
    fd, size = hostile.fds[0], hostile.welcome.arena_bytes
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size + change)
    with pytest.raises(PermissionError):
        _fallocate(fd, 0, size, PAGE)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", size)
    assert os.fstat(fd).st_size == size


def test_the_daemon_works_after_a_client_removes_rights_on_the_arena(
    shared_daemon: Daemon, hostile: BlockingConnection
) -> None:
    """The mode of a memfd is its owner's to change; descriptors that are passed keep the rights they have."""
    for fd in hostile.fds:
        os.fchmod(fd, 0)
    with shared_daemon.connect() as pool:
        keys = pool.keys(tokens_of(11, 3 * 32))
        assert store_chain(pool, keys).stored == 3
        result, into = load_all(pool, keys)
        assert result.chunks == 3
        assert_right_bytes(keys, SMALL, result, into)


def _garbage(arena: mmap.mmap, fd: int, offset: int) -> None:
    arena[offset + 5 : offset + 105] = bytes(reversed(arena[offset + 5 : offset + 105]))


def _hole(arena: mmap.mmap, fd: int, offset: int) -> None:
    _fallocate(fd, PUNCH_HOLE, offset, PAGE)


def _removed(arena: mmap.mmap, fd: int, offset: int) -> None:
    start = np.frombuffer(arena, np.uint8).ctypes.data
    assert LIBC.madvise(start + offset, PAGE, MADV_REMOVE) == 0


@pytest.mark.parametrize("attack", [_garbage, _hole, _removed], ids=lambda attack: attack.__name__[1:])
def test_damage_by_a_client_in_others_slots_is_found_at_the_next_load(
    daemon: Daemon, attack: Callable[[mmap.mmap, int, int], None]
) -> None:
    with daemon.connect() as pool, engine(daemon) as hostile:
        keys = pool.keys(tokens_of(1, 6 * 32))
        store_chain(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        offsets = [int(offset) for offset in lease.hold.rows.offsets]
        arena = mmap.mmap(hostile.fds[0], hostile.welcome.arena_bytes)
        attack(arena, hostile.fds[0], offsets[3])
        lease.release()
        result, into = load_all(pool, keys)
        assert (result.chunks, result.reason) == (3, "checksum")
        assert_right_bytes(keys, SMALL, result, into)
        assert daemon.stats()["checksum_failures"] == 1
        assert store_chain(pool, keys).stored == 3
        assert load_all(pool, keys)[0].chunks == 6
    assert daemon.problems() == []


def test_garbage_over_the_whole_arena_is_never_loaded_as_good(daemon: Daemon) -> None:
    with daemon.connect() as pool, engine(daemon) as hostile:
        keys = pool.keys(tokens_of(1, 300 * 32))
        stored = store_chain(pool, keys).stored
        assert stored == 300
        with mapped_arena(hostile) as arena:
            arena[:] = b"\xa5" * len(arena)
            result, _ = load_all(pool, keys)
            assert (result.chunks, result.reason) == (0, "checksum")
            assert pool.lookup(keys).chunks == 0
            assert daemon.stats()["dram.chunks"] == 0
            assert store_chain(pool, keys).stored == stored
            arena[:] = b"\xa5" * len(arena)
        assert daemon.problems(deep=True)[0].endswith(f"bad checksum, dropped with {stored - 1} that follow it")
        assert pool.lookup(keys).chunks == 0
        assert daemon.stats()["dram.chunks"] == 0
    assert daemon.problems() == []


def test_false_checksums_affect_only_the_chunks_of_their_writer(daemon: Daemon) -> None:
    with daemon.connect() as pool, engine(daemon) as hostile:
        store(hostile, keys_of(0, 2))
        keys = pool.keys(tokens_of(1, 2 * 32))
        column = b"".join(keys[number] for number in range(2))
        made = hostile.call(reserve_chain(b"", column), m.Reserved)
        hostile.call(m.Commit(made.reservation, bytes(2 * 4 * SMALL.layers), b""), m.Committed)
        assert load_all(pool, keys)[0] == kv.LoadResult(0, 0, "checksum")
        assert read_back(hostile, keys_of(0, 2)) == [True, True]
        assert store_chain(pool, keys).stored == 2
    assert daemon.problems() == []
