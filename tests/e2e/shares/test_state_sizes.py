"""Recurrent states whose ranks store parts of the same chunks: a state's bytes divided by head groups, of any length."""

from collections.abc import Callable, Sequence

import numpy as np

import kvpool_client as kv
from kvpool.layouts.groups import GROUPS_MAX
from tests.e2e.shares.test_joint_saves import ends_of, in_alternate_modes
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.groups.hybrid import CHUNK, assert_served, key_of, store, whole_result
from tests.rigs.module_daemons import module_daemon, module_daemons
from tests.rigs.payload import Bytes, chunk_bytes_of, tokens_of

__all__ = ["module_daemon", "module_daemons"]  # fixtures

FULL, STATE = 0, 1
PART = 1001  # bytes of a head group of a state: no whole words, and no multiple of a chunk's tokens
LAYERS, GROUPS = 3, 4
LAYOUT = kv.Layout(
    chunk_tokens=CHUNK,
    groups=(
        kv.Group(layers=1, kv_heads=GROUPS, head_dim=16, planes=1, dtype="uint8", head_groups=GROUPS),
        kv.Group(kind="state", layers=LAYERS, state_bytes=GROUPS * PART, head_groups=GROUPS),
    ),
)
CHUNKS, BLOCKS = 5, 7
BLOCK_OF = {2: 5, 4: 1}  # of each chunk with a state
SIZES = (1, 2, 4, 8)


def shares_of(size: int) -> list[list[kv.Share]]:
    return [[kv.Share.of_rank(part, rank, size) for part in LAYOUT.group_layouts] for rank in range(size)]


class RankStates:
    """A rank's memory: KV of a block a chunk, and states that begin at an odd byte of a padded block."""

    def __init__(self, daemon: Daemon, shares: Sequence[kv.Share], seed: int) -> None:
        self.pool = kv.connect(daemon.socket, model="test-model", layout=LAYOUT, share=shares, timeout_s=60.0)
        self.keys = self.pool.keys(tokens_of(seed, CHUNKS * CHUNK + 1))
        self.share = shares[STATE]
        self.kv = np.zeros((CHUNKS, CHUNK, shares[FULL].groups, 16), np.uint8)
        size = self.share.groups * PART
        self.blocks = [np.full((BLOCKS, 3 + size + 5), 7, np.uint8) for _ in range(LAYERS)]
        self.states = [whole[:, 3 : 3 + size].reshape(BLOCKS, -1, PART) for whole in self.blocks]
        assert all(np.shares_memory(*pair) for pair in zip(self.states, self.blocks, strict=True))
        self.caches = [
            self.pool.register([self.kv], block_tokens=CHUNK, group=FULL),
            self.pool.register(self.states, block_tokens=CHUNK, group=STATE),
        ]

    def expected_kv(self) -> Bytes:
        part, share = LAYOUT.of_group(FULL), self.pool.shares[FULL]
        rows = [chunk_bytes_of(key_of(self.keys, FULL, chunk), part.chunk_bytes) for chunk in range(CHUNKS)]
        by_group = np.stack(rows).reshape(CHUNKS, GROUPS, CHUNK, 16)
        return by_group[:, share.first_group : share.first_group + share.groups].transpose(0, 2, 1, 3)

    def expected_states(self, chunk: int) -> Bytes:
        row = chunk_bytes_of(key_of(self.keys, STATE, chunk), LAYOUT.of_group(STATE).chunk_bytes)
        whole = row.reshape(LAYERS, GROUPS, PART)
        return whole[:, self.share.first_group : self.share.first_group + self.share.groups]

    def save(self) -> kv.SaveResult:
        self.kv[...] = self.expected_kv()
        for chunk, block in BLOCK_OF.items():
            for states, right in zip(self.states, self.expected_states(chunk), strict=True):
                states[block] = right
        ids = [list(range(CHUNKS)), list(BLOCK_OF.values())]
        return self.pool.save(self.keys, self.caches, ids, chosen=(range(CHUNKS), tuple(BLOCK_OF))).commit()

    def assert_loads(self) -> None:
        before = [states[:6].copy() for states in self.states]
        hit = self.pool.lookup(self.keys)
        assert hit.chunks == CHUNKS
        with self.pool.acquire(hit) as lease:
            load = self.pool.load(lease, self.caches, [list(range(CHUNKS)), [6]])
            assert load.wait() == whole_result(self.pool.layout, CHUNKS)
        assert np.array_equal(self.kv, self.expected_kv())
        for states, right, others in zip(self.states, self.expected_states(CHUNKS - 1), before, strict=True):
            assert np.array_equal(states[6], right)
            assert np.array_equal(states[:6], others)
        assert all((whole[:, :3] == 7).all() and (whole[:, -5:] == 7).all() for whole in self.blocks)


@in_alternate_modes(SIZES)
def test_every_size_loads_the_states_that_the_ranks_of_another_stored(module_daemon: Daemon, written: int) -> None:
    writers = [RankStates(module_daemon, shares, 100 + written) for shares in shares_of(written)]
    results = [writer.save() for writer in writers]
    assert [result.declined for result in results] == [0] * written
    assert sum(result.groups[STATE].stored for result in results) == len(BLOCK_OF)
    for size in SIZES:
        for shares in ends_of(shares_of(size)):
            RankStates(module_daemon, shares, 100 + written).assert_loads()
    with kv.connect(module_daemon.socket, model="test-model", layout=LAYOUT) as whole:
        assert_served(whole, whole.keys(tokens_of(100 + written, CHUNKS * CHUNK + 1)), CHUNKS)
    assert module_daemon.problems() == []


def test_as_many_groups_with_as_long_formats_as_there_may_be_are_served(module_daemon: Daemon) -> None:
    full = kv.Group(layers=1, kv_heads=1, head_dim=8, planes=1, dtype="uint8")
    states = [
        kv.Group(kind="state", layers=1, state_bytes=8, format=f"{number:02}" * 128) for number in range(GROUPS_MAX - 1)
    ]
    layout = kv.Layout(chunk_tokens=CHUNK, groups=(full, *states))
    with kv.connect(module_daemon.socket, model="m" * 200, layout=layout) as pool:
        keys = pool.keys(tokens_of(4, 2 * CHUNK + 1))
        store(pool, keys)
        assert_served(pool, keys, 2)


def test_a_state_of_which_a_rank_lacks_its_part_is_a_miss(module_daemon: Daemon) -> None:
    left, right = (RankStates(module_daemon, shares, 2) for shares in shares_of(2))
    assert left.save().groups[STATE].part == len(BLOCK_OF)
    assert right.pool.lookup(right.keys).chunks == 0
    assert right.save().groups[STATE].stored == len(BLOCK_OF)
    left.assert_loads()


def test_states_in_parts_are_served_from_disk(start_daemon: Callable[..., Daemon], tmp_path: object) -> None:
    daemon = start_daemon(ssd__path=f"{tmp_path}/ssd", ssd__capacity="64MiB", ssd__write_through="true")
    for shares in shares_of(4):
        RankStates(daemon, shares, 3).save()
    wait_until(lambda: daemon.stats()["ssd.chunks"] == CHUNKS + len(BLOCK_OF), "all chunks are on disk")
    daemon.stop()
    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    for shares in shares_of(2):
        RankStates(daemon, shares, 3).assert_loads()
    assert daemon.problems() == []
