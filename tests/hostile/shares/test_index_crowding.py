"""A client that reads the index's seed and fills one bucket of it: nobody else is denied room for a chunk."""

import mmap
import struct
from collections.abc import Callable, Iterator

from kvpool.protocol.blocking import BlockingConnection
from tests.hostile.rigs.raw_clients import engine, store
from tests.rigs.daemon import Daemon
from tests.rigs.payload import assert_right_bytes, load_all, tokens_of
from tests.rigs.payload import store as store_chain

MASK = (1 << 64) - 1
# As chunk_table.h says: magic, version, a word, slots, arena bytes, epoch, seed.
HEADER = struct.Struct("<8sIIQQ16sQQ")
PROBE_SLOTS = 256
CHUNKS = 400


def _folded_product(a: int, b: int) -> int:
    product = a * b
    return (product ^ product >> 64) & MASK


def _home(key: bytes, slots: int, seed: tuple[int, int]) -> int:
    words = struct.unpack("<4Q", key)
    front = _folded_product(words[0] ^ seed[0], words[1] ^ seed[1])
    back = _folded_product(words[2] ^ seed[0] ^ MASK, words[3] ^ seed[1] ^ MASK)
    return ((front + back & MASK) * slots) >> 64


def _crowding(connection: BlockingConnection, target: bytes) -> Iterator[bytes]:
    """Keys for which the daemon looks where it looks for `target`."""
    with mmap.mmap(connection.fds[1], connection.welcome.index_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as index:
        header = HEADER.unpack_from(index)
    slots, seed = header[3], header[6:8]
    home = _home(target, slots, seed)
    number = 0
    while True:
        key = struct.pack("<4Q", number, 0, 0, 0)
        number += 1
        if _home(key, slots, seed) == home:
            yield key


def test_a_client_that_fills_one_bucket_of_the_index_denies_it_to_nobody(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__max_chunks=str(CHUNKS))
    with daemon.connect() as pool, engine(daemon) as hostile:
        keys = pool.keys(tokens_of(1, 4 * 32))
        crowd = _crowding(hostile, keys[0])
        for _ in range(PROBE_SLOTS):
            store(hostile, next(crowd))
        assert daemon.stats()["dram.chunks"] == PROBE_SLOTS
        assert store_chain(pool, keys).stored == 4
        for _ in range(PROBE_SLOTS // 16):
            store(hostile, next(crowd))
        result, into = load_all(pool, keys)
        assert result.chunks == 4
        assert_right_bytes(keys, pool.layout, result, into)
    assert daemon.problems() == []
