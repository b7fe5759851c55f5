"""Random lives of sparse sequences against an exact model: appends, forks, flushes, lost connections, a daemon killed
and started again.

Oracle: attention is that of a slow model over the tokens that the recall has chosen, merged with its estimate; blocks
come back bit for bit. A sequence may be lost after its chunks were flushed or its daemon was killed, and then says
so; it is never wrong.
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpool_client as kv
from kvpool_sparse import SequenceLost, SparseConfig, SparseSequence
from kvpool_sparse.results import Floats
from tests.rigs.daemon import Daemon, wait_until

if TYPE_CHECKING:
    from kvpool_sparse.device import DeviceSequence  # imports torch

LAYOUT = kv.Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=64, summaries="clusters7")
HEADS = 4
BLOCK = 32  # other than that of the pool's summaries in some lives
STEPS = 300
LONGEST = 1200
Items = npt.NDArray[np.float16]


@dataclass
class Life:
    """A sequence and what was appended to it, for each layer."""

    sequence: "SparseSequence | DeviceSequence"
    keys: list[Items]
    values: list[Items]
    ids: list[int] | None

    def fork(self) -> "Life":
        return Life(
            self.sequence.fork(), list(self.keys), list(self.values), None if self.ids is None else list(self.ids)
        )


def array_of(found: object) -> npt.NDArray[Any]:
    """An array, or a tensor of any device, as an array."""
    return np.asarray(found.cpu() if hasattr(found, "cpu") else found)


class World:
    """One daemon, one pool, some sequences."""

    def __init__(self, daemon: Daemon, pool: kv.Pool, seed: int) -> None:
        self.daemon, self.pool = daemon, pool
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.lives: list[Life] = []
        self.may_lose = False
        self.checked = self.lost = self.in_arena = 0

    def step(self) -> None:
        act = self.random.choices(
            [
                self.begin,
                self.append,
                self.check,
                self.fork,
                self.settle,
                self.close,
                self.flush,
                self.cut,
                self.restart,
            ],
            [2, 10, 8, 2, 3, 1, 0.5, 0.7, 0.4],
        )[0]
        try:
            act()
        except SequenceLost:
            assert self.may_lose, "nothing was taken from it"
            self.lost += 1
            self.lives = [each for each in self.lives if not self.is_closed(each)]

    def begin(self) -> None:
        if len(self.lives) < 5:
            share = self.random.choice([0.0, 0.2, 0.5, 1.0])
            block = self.random.choice([BLOCK, 64])
            config = SparseConfig(
                64, self.random.choice([0, 50, 128]), share, block, 128, self.random.choice([128, 512])
            )
            ids = self.numbers.integers(0, 3, 1).tolist() * 700 if self.random.random() < 0.5 else None
            sequence = SparseSequence(self.pool, config, tokens=ids, threads=self.random.choice([1, 2]))
            life = Life(sequence, [self.empty(), self.empty()], [self.empty(), self.empty()], ids)
            self.lives.append(life)
            if sequence.prefix_tokens and ids is not None:
                self.grow_model(life, sequence.prefix_tokens)

    def append(self) -> None:
        life = self.pick()
        if life is None or life.sequence.tokens > 900:
            return
        first, count = life.sequence.tokens, self.random.choice([1, 1, 7, 64, 150])
        self.grow_model(life, first + count)
        for layer in self.random.sample(range(2), 2):
            life.sequence.append(layer, life.keys[layer][first:], life.values[layer][first:])

    def grow_model(self, life: Life, tokens: int) -> None:
        """Draw KV up to so many tokens: from the text, where several sequences may have the same, else anew."""
        for layer in range(LAYOUT.layers):
            have = len(life.keys[layer])
            shape = (2, LONGEST, LAYOUT.kv_heads, LAYOUT.head_dim)
            if life.ids is None:
                drawn = self.numbers.standard_normal((2, tokens - have, *shape[2:]))
            else:
                drawn = np.random.default_rng([life.ids[0], layer]).standard_normal(shape)[:, have:tokens]
            life.keys[layer] = np.concatenate([life.keys[layer], drawn[0].astype(np.float16)])
            life.values[layer] = np.concatenate([life.values[layer], drawn[1].astype(np.float16)])

    def check(self) -> None:
        life = self.pick()
        if life is None or not life.sequence.tokens:
            return
        layer = self.random.randrange(2)
        query = self.numbers.standard_normal((HEADS, LAYOUT.head_dim)).astype(np.float32) * np.float32(1.5)
        recall = life.sequence.recall(layer, query)
        keys, values = life.sequence.fetch(layer, recall.blocks)
        found = array_of(life.sequence.attend(layer, query))
        config, tokens = life.sequence.config, len(life.keys[layer])
        blocks = config.middle_blocks(tokens)
        wanted = np.ones((LAYOUT.kv_heads, tokens), np.bool_)
        for head in range(LAYOUT.kv_heads):
            for block in range(blocks):
                span = slice(
                    config.init_tokens + block * config.block_tokens,
                    config.init_tokens + (block + 1) * config.block_tokens,
                )
                wanted[head, span] = block in recall.blocks[head] or recall.is_dense[head]
            chosen = [
                config.init_tokens + b * config.block_tokens + t
                for b in recall.blocks[head]
                for t in range(config.block_tokens)
            ]
            assert np.array_equal(array_of(keys)[head], life.keys[layer][chosen, head])
            assert np.array_equal(array_of(values)[head], life.values[layer][chosen, head])
        exact = self.attended(life, layer, query, wanted)
        if recall.is_doubtful.any():
            return  # it may have read everything
        if recall.tail is not None and not recall.is_dense.any():
            share = 1 / (1 + np.exp(recall.tail[0] - exact[0]))[:, None]
            exact = exact[0], share * exact[1] + (1 - share) * recall.tail[1]
        np.testing.assert_allclose(found, exact[1], atol=3e-4)
        self.checked += 1
        self.in_arena += life.sequence.stats()["chunks_in_arena"] > 0

    def attended(self, life: Life, layer: int, query: Floats, wanted: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        logit, value = [], []
        for head in range(HEADS):
            group = head // (HEADS // LAYOUT.kv_heads)
            keys = life.keys[layer][wanted[group], group].astype(np.float64)
            logits = keys @ query[head].astype(np.float64) / np.sqrt(LAYOUT.head_dim)
            if not len(logits):
                logit.append(-np.inf)
                value.append(np.zeros(LAYOUT.head_dim))
                continue
            weights = np.exp(logits - logits.max())
            logit.append(logits.max() + np.log(weights.sum()))
            value.append(weights @ life.values[layer][wanted[group], group].astype(np.float64) / weights.sum())
        return np.array(logit, np.float32), np.array(value, np.float32)

    def fork(self) -> None:
        life = self.pick()
        if life is not None and len(self.lives) < 6:
            self.lives.append(life.fork())

    def settle(self) -> None:
        life = self.pick()
        if life is not None:
            life.sequence.settle()

    def close(self) -> None:
        life = self.pick()
        if life is not None and len(self.lives) > 2:
            life.sequence.close()
            self.lives = [each for each in self.lives if each is not life]

    def flush(self) -> None:
        with self.daemon.admin() as admin:
            admin.flush(None, None)
        self.may_lose = True

    def cut(self) -> None:
        session = self.pool._link.session
        if session is not None:
            session.end_session("ended by the test")
            self.pool._link.lost()
            wait_until(lambda: self.pool.connected, "the pool has connected again")
            self.may_lose = True

    def restart(self) -> None:
        self.daemon.kill()
        self.daemon.start()
        wait_until(lambda: self.pool.connected, "the pool has connected again")

    def pick(self) -> Life | None:
        return self.random.choice(self.lives) if self.lives else None

    @staticmethod
    def is_closed(life: Life) -> bool:
        return "closed" in repr(life.sequence)

    @staticmethod
    def empty() -> Items:
        return np.empty((0, LAYOUT.kv_heads, LAYOUT.head_dim), np.float16)


@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.slow) for case in (1, 2, 3))])
def test_random_lives_are_right_or_lost(daemon: Daemon, case: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30) if case else 20
    print(f"seed {seed}")
    with daemon.connect(layout=LAYOUT) as pool:
        world = World(daemon, pool, seed)
        for _ in range(STEPS):
            world.step()
        for life in world.lives:
            life.sequence.close()
    assert world.checked > 5, "the seed has made hardly any checks"
    wait_until(lambda: daemon.stats()["leases"] == 0, "every lease has ended")
    assert daemon.problems() == []
