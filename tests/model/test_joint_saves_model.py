"""Random saves of ranks of several sizes against a dict: which extents of which chunk are stored, and who may write a slot.

The model has no chains and no masks. It knows, for each key, the extents that were committed since the chunk was last begun,
and for each writer the slots into which it may still write: nobody else may get them for another chunk. Whatever can be leased
has the bytes of its key, though late writers write garbage for as long as they may.
"""

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.index.sessions import EngineSession
from kvpool.states import SaveState
from tests.rigs.joint_pool import LAYOUT, TTL_NS, WHOLE, JointPool, PartSave, chain_of, in_joint_pool

SHARES = [kv.Share.of_rank(LAYOUT, rank, size) for size in (1, 2, 4, 8) for rank in range(size)]
SHARES += [kv.Share(stage, 1, 0, 8) for stage in range(2)]
PATHS = ["abcdef", "abcxyz", "abq", "mnop", "mnrstu"]
STEPS = 100
SAVES_MAX = 6
DECLINED = (SaveState.PENDING, SaveState.NO_PARENT, SaveState.FULL, SaveState.QUOTA)


class Player:
    """Plays random steps on a pool, and keeps the model."""

    def __init__(self, pool: JointPool, seed: int) -> None:
        self.pool = pool
        self.random = np.random.default_rng(seed)
        self.sessions: list[EngineSession] = [pool.connect() for _ in range(4)]
        self.saves: list[PartSave] = []
        self.extents: dict[bytes, set[int]] = {}  # committed of a chunk, by key
        self.slots: dict[bytes, int] = {}  # the generation of the slot that they are in
        self.seen: set[SaveState] = set()
        self.complete = 0

    def any(self, of: int) -> int:
        return int(self.random.integers(of))

    def step(self) -> None:
        steps = [self.begin] * 4 + [self.commit] * 4 + [self.store] * 3
        steps += [
            self.abort,
            self.pool.settle,
            self.kill,
            self.write_late,
            self.pass_time,
            self.pass_time,
            self.discard,
            self.flush,
        ]
        steps[self.any(len(steps))]()
        assert self.pool.problems() == []
        for path in PATHS:
            self.complete += self.pool.visible(self.sessions[0], path)

    def begin(self) -> PartSave | None:
        if len(self.saves) >= SAVES_MAX:
            return None
        path = PATHS[self.any(len(PATHS))]
        path = path[: 1 + self.any(len(path))]
        share = SHARES[self.any(len(SHARES))]
        session = self.sessions[self.any(len(self.sessions))]
        save = self.pool.reserve(session, share, path, self.any(2) * self.any(len(path)))
        mine = set(share.extents(LAYOUT))
        for state, key in zip(save.states, save.keys, strict=True):
            self.seen.add(state)
            if state == SaveState.PART:
                assert mine <= self.extents.get(key, set()), "a part is answered that is not stored"
            elif state not in (SaveState.RESERVED, SaveState.PRESENT):
                assert state in DECLINED
        for key, offset, generation in save.written:
            self.check_reserved(save, key, offset, generation)
        if save.written:
            self.saves.append(save)
        return save

    def check_reserved(self, save: PartSave, key: bytes, offset: int, generation: int) -> None:
        """Nobody else may write these extents, and nobody at all the slot for another chunk."""
        mine = set(save.share.extents(LAYOUT))
        for other in self.saves:
            for theirs in other.left:
                if theirs[1] == offset:
                    assert (theirs[0], theirs[2]) == (key, generation), "a slot is reused while somebody may write it"
                    assert not mine & set(other.share.extents(LAYOUT)), "two writers have an extent"
        if self.slots.get(key) != generation:
            self.slots[key], self.extents[key] = generation, set()
        assert not mine & self.extents[key], "a stored extent is written again"

    def commit(self) -> None:
        if not self.saves:
            return
        save = self.saves[self.any(len(self.saves))]
        chosen = save.left[: 1 + self.any(len(save.left))]
        states = self.pool.commit(save, len(chosen))
        for (key, _, generation), state in zip(chosen, states, strict=True):
            self.seen.add(state)
            if state in (SaveState.STORED, SaveState.PART):
                assert self.slots[key] == generation
                self.extents[key] |= set(save.share.extents(LAYOUT))
            if state == SaveState.STORED:
                assert len(self.extents[key]) == LAYOUT.extents, "a chunk is stored that lacks extents"
            else:
                assert state in (SaveState.PART, SaveState.EXPIRED, SaveState.NO_PARENT)
        if SaveState.EXPIRED in states:
            self.pool.end(save)  # as a client does
        if SaveState.EXPIRED in states or not save.left:
            self.saves.remove(save)

    def store(self) -> None:
        """All ranks of an engine, one after the other, save the same chunks."""
        path, size = PATHS[self.any(len(PATHS))], (2, 4, 8)[self.any(3)]
        for rank in range(size):
            save = self.pool.reserve(self.sessions[rank % 4], kv.Share.of_rank(LAYOUT, rank, size), path)
            for key, offset, generation in save.written:
                self.check_reserved(save, key, offset, generation)
            if save.written:
                self.saves.append(save)
                before = self.saves.index(save)
                states = self.pool.commit(save)
                self.seen.update(states)
                for (key, _, _), state in zip(save.written, states, strict=True):
                    if state in (SaveState.STORED, SaveState.PART):
                        self.extents[key] |= set(save.share.extents(LAYOUT))
                del self.saves[before]

    def abort(self) -> None:
        if self.saves:
            self.pool.end(self.saves.pop(self.any(len(self.saves))))

    def kill(self) -> None:
        number = self.any(len(self.sessions))
        killed = self.sessions[number]
        self.pool.drop(killed, is_settled=bool(self.any(2)))
        self.saves = [save for save in self.saves if save.session is not killed]
        self.sessions[number] = self.pool.connect()

    def write_late(self) -> None:
        """Garbage, by whoever may still write."""
        for save in self.saves:
            for chunk in save.left:
                self.pool.write(save, chunk, garbage=True)

    def pass_time(self) -> None:
        self.pool.pass_time(self.any(TTL_NS))

    def discard(self) -> None:
        keys = chain_of(PATHS[self.any(len(PATHS))])
        self.pool.pool.discard(keys[self.any(len(keys))])

    def flush(self) -> None:
        assert not any(self.pool.pool.flush(None, None))

    def end(self) -> None:
        """When all writers have ended and time has passed, everything can be stored."""
        while self.saves:
            self.abort()
        self.pool.pass_time(TTL_NS)
        self.pool.settle()
        assert self.pool.counts() | {"expired": 0} == dict.fromkeys(self.pool.counts(), 0)
        for path in PATHS:
            states = self.pool.store(self.sessions[0], WHOLE, path)
            assert set(states) <= {SaveState.STORED, SaveState.PRESENT}
            assert self.pool.visible(self.sessions[1], path) == len(path)


@pytest.mark.parametrize(
    ("seed", "capacity"),
    [
        (0, "1MiB"),
        (1, "4MiB"),
        *(pytest.param(seed, capacity, marks=pytest.mark.slow) for capacity in ("1MiB", "4MiB") for seed in (2, 3, 4)),
    ],
)
def test_random_parts_store_whole_chunks_or_none(seed: int, capacity: str) -> None:
    def check(pool: JointPool) -> None:
        player = Player(pool, seed)
        for _ in range(STEPS):
            player.step()
        assert player.complete
        assert {SaveState.PART, SaveState.STORED, SaveState.RESERVED} <= player.seen
        player.end()

    in_joint_pool(**{"dram.capacity": capacity})(check)()
