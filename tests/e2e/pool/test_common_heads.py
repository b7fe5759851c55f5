"""Prompts of one batch that have a head in common: every chunk is stored once, in whatever order their saves are committed."""

from itertools import permutations

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.verbs.save import publish_each
from tests.rigs.daemon import Daemon, wait_connected

LAYOUT = kv.Layout(layers=2, kv_heads=2, head_dim=8, dtype="float32", chunk_tokens=16, head_groups=2)
HEAD, TAIL = 3, 2
SHARES: dict[str, list[kv.Share | None]] = {"whole": [None], "halves": [kv.Share(0, 2, 0, 1), kv.Share(0, 2, 1, 1)]}


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("shares", SHARES)
def test_a_common_head_is_stored_once_in_any_order_of_commits(
    daemon: Daemon, shares: str, order: tuple[int, ...]
) -> None:
    pools = [daemon.connect(LAYOUT, share=share) for share in SHARES[shares]]
    try:
        for pool in pools:
            wait_connected(pool)
        keys, results = _keys(pools[0]), []
        for pool in pools:
            saves = [_save(pool, one) for one in keys]
            results = [saves[number].commit() for number in order]
        head = ["present" if number > order.index(0) else "declined" for number in range(3)]
        for number, result in enumerate(results):
            first = "stored" if order[number] == 0 else head[number]
            assert result.states[:HEAD] == (first,) * HEAD
            assert result.states[HEAD:] == ("part" if first == "declined" else "stored",) * TAIL
        assert [pools[0].lookup(one).chunks for one in keys] == [HEAD + TAIL] * 3
    finally:
        for pool in pools:
            pool.close()


def test_saves_that_are_published_together_have_stored_everything(daemon: Daemon) -> None:
    with daemon.connect(LAYOUT) as pool:
        wait_connected(pool)
        keys = _keys(pool)
        first, *others = publish_each([_save(pool, one) for one in keys])
        assert first.states == ("stored",) * (HEAD + TAIL)
        assert [other.states for other in others] == [("present",) * HEAD + ("stored",) * TAIL] * 2
        assert [pool.lookup(one).chunks for one in keys] == [HEAD + TAIL] * 3


def test_a_head_whose_save_is_given_up_is_declined_and_can_be_saved_anew(daemon: Daemon) -> None:
    with daemon.connect(LAYOUT) as pool:
        wait_connected(pool)
        keys = _keys(pool)
        saves = [_save(pool, one) for one in keys]
        saves[0].abort()
        result = saves[1].commit()
        assert (result.reasons, result.present) == ({"pending": HEAD, "no-parent": TAIL}, 0)
        saves[2].abort()
        assert publish_each([_save(pool, one) for one in keys])[0].stored == HEAD + TAIL
        assert [pool.lookup(one).chunks for one in keys] == [HEAD + TAIL] * 3


def _keys(pool: kv.Pool) -> list[kv.KeyChain]:
    """Of three prompts with one head."""
    tokens = LAYOUT.chunk_tokens
    head = list(range(HEAD * tokens))
    return [pool.keys(head + list(range(1000 * number, 1000 * number + TAIL * tokens))) for number in range(1, 4)]


def _save(pool: kv.Pool, keys: kv.KeyChain) -> kv.Save:
    share = pool.shares[0].of_layout(LAYOUT)
    return pool.save(keys, from_=np.full((len(keys), share.chunk_bytes), 7, np.uint8))
