"""Adapters on two nodes: what one engine has saved is loaded by one on the other node, alone and behind chunks of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.engines.sglang.standin import HostPool, page_keys
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.nodes.two_nodes import pulled_chunks, two_nodes, wait_known

PAGES = 60
OWN_PAGES = 10
PROMPT = np.random.default_rng(7).integers(0, 900, 30).tolist()
BLOCKS = 7


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    options = {"dram.capacity": "64MiB"}
    with two_nodes(tmp_path_factory.mktemp("nodes"), may_have_spaces=False, **options) as daemons:
        yield daemons
        assert [daemon.problems() for daemon in daemons] == [[], []]


@pytest.mark.parametrize("own", [0, OWN_PAGES])
def test_sglang_fetches_pages_that_another_node_has(
    nodes: tuple[Daemon, Daemon], start_sglang: Callable[..., Any], own: int
) -> None:
    there, here = nodes
    keys = page_keys(own + 1, PAGES)
    owner, fetcher = (start_sglang(daemon, HostPool(pages=PAGES)) for daemon in (there, here))
    for number, key in enumerate(keys):
        owner.pool.fill(number, key)
    fetcher.pool.kv_buffer[...] = owner.pool.kv_buffer
    assert fetcher.backup(keys[:own], range(own)) == own
    fetcher.pool.kv_buffer[...] = 0
    known, pulled = int(here.stats()["peer.known_chunks"]), pulled_chunks(here)
    assert owner.backup(keys, range(PAGES)) == PAGES
    wait_known(here, known + PAGES)
    assert fetcher.prefetch(keys, range(PAGES)) == PAGES, here.log()[-3000:]
    assert all(fetcher.pool.holds(number, key) for number, key in enumerate(keys))
    assert pulled_chunks(here) - pulled == PAGES - own
    wait_until(lambda: here.stats()["leases"] == there.stats()["leases"] == 0, "the leases have ended")


@pytest.mark.parametrize("own", [0, OWN_PAGES])
def test_lmcache_loads_objects_that_another_node_has(
    nodes: tuple[Daemon, Daemon], start_lmcache: Callable[..., Any], own: int
) -> None:
    there, here = nodes
    owner, loader = start_lmcache(there), start_lmcache(here)
    keys = owner.keys(*range(PAGES))
    assert loader.store(keys[:own]) >= 0
    known, pulled = int(here.stats()["peer.known_chunks"]), pulled_chunks(here)
    assert owner.store(keys) > 0
    wait_known(here, known + PAGES)
    assert loader.lookup(keys) == [True] * PAGES
    assert loader.load(keys) == [True] * PAGES
    assert pulled_chunks(here) - pulled == PAGES - own
    loader.adapter.submit_unlock(keys)
    wait_until(lambda: here.stats()["leases"] == there.stats()["leases"] == 0, "the leases have ended")


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensorrt_llm_claims_what_another_node_has_once_it_is_here(
    nodes: tuple[Daemon, Daemon], start_trtllm: Callable[..., Any], ranks: int
) -> None:
    """A claim is of chunks in DRAM alone: what another node has is pulled behind the first request, and claimed by the next."""
    there, here = nodes
    prompt = [ranks, *PROMPT[1:]]
    owner, engine = start_trtllm(there, ranks=ranks), start_trtllm(here, ranks=ranks)
    known, pulled = int(here.stats()["peer.known_chunks"]), pulled_chunks(here)
    cold = owner.answer(prompt, 6)[1]
    wait_known(here, known + ranks * BLOCKS)
    first = engine.ask(prompt, 6)  # the pull begins with the question; what is computed before it would not be pulled
    wait_until(lambda: pulled_chunks(here) - pulled >= ranks * BLOCKS, "the chunks have come")
    engine.run()
    assert (first.claimed, first.tokens[len(prompt) :]) == (0, cold)
    assert engine.answer(prompt, 6) == (4 * BLOCKS, cold)
