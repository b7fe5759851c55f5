"""Chunks pulled from another node or a shared store are published by the node that has them now, with those saved behind."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvpool.keys import salt_tag
from kvpool_client.connection.promise_line import PromiseLine, Question
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.events.publishing import CHUNK, connected, local_events, router_of
from tests.rigs.events.router import Router
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.payload import load_all, store, tokens_of
from tests.rigs.store.scripted_store import SharedDirectory
from tests.rigs.store.store_daemon import StoreDaemon

CHUNKS = 200  # more than one message names
SCOPES = [("", b""), ("sql-lora", b"a tenant's salt")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """Two nodes, of which the second one publishes and pulls over the stream."""
    directory = tmp_path_factory.mktemp("pair")
    events = {f"here__{name}": value for name, value in local_events(directory).items()}
    with two_daemons(directory, owner__peer__shm="false", here__peer__shm="false", **events) as daemons:
        yield daemons


def finds(router: Router, tokens: list[int], blocks: int, scope: tuple[str, bytes]) -> bool:
    router.receive(0.02)
    adapter, salt = scope
    return router.index.longest(tokens, CHUNK, adapter, salt_tag(salt).hex() if salt else "") == blocks


def is_answered(line: PromiseLine, question: Question) -> bool:
    line.receive(0.01)
    return question.answer is not None


@pytest.mark.parametrize("scope", SCOPES, ids=["plain", "adapter and salt"])
@pytest.mark.parametrize("is_promised", [False, True], ids=["leased", "promised"])
def test_a_router_finds_what_was_pulled_and_what_is_saved_behind_it(
    pair: tuple[Daemon, Daemon], is_promised: bool, scope: tuple[str, bytes]
) -> None:
    there, here = pair
    adapter, salt = scope
    tokens = tokens_of(1 + is_promised, CHUNKS * CHUNK)
    longer = [*map(int, tokens), *map(int, tokens_of(3, 2 * CHUNK))]
    with there.connect() as owner, here.connect() as pool, router_of(here) as router:
        connected(here, router, pool)
        keys = owner.keys(tokens, adapter=adapter, salt=salt)
        store(owner, keys)
        wait_until(
            lambda: pool.lookup(pool.keys(tokens, adapter=adapter, salt=salt)).chunks == CHUNKS, "they are known"
        )
        mine = pool.keys(tokens, adapter=adapter, salt=salt)
        if is_promised:
            with closing(pool.open_promise_line(1)) as line:
                question = line.ask_promise(pool.lookup(mine))
                wait_until(partial(is_answered, line, question), "it is promised")
                assert question.answer is not None
                assert question.answer.chunks == CHUNKS
                pool.claim(question.answer.tickets[0]).release()
        else:
            assert load_all(pool, mine)[0].chunks == CHUNKS
        wait_until(partial(finds, router, list(map(int, tokens)), CHUNKS, scope), "what was pulled is found")
        store(pool, pool.keys(longer, adapter=adapter, salt=salt))
        wait_until(partial(finds, router, longer, CHUNKS + 2, scope), "what is behind it is found")


def test_a_router_finds_what_came_from_a_shared_store(tmp_path: Path) -> None:
    shared = SharedDirectory(tmp_path)
    tokens = tokens_of(1, 8 * CHUNK)
    events = {"events.publish": f"ipc://{tmp_path}/events", "events.replay": f"ipc://{tmp_path}/replay"}
    with StoreDaemon(tmp_path / "there", shared, **{"store.publish": "all"}) as there, there.connect() as owner:
        store(owner, owner.keys(tokens))
        there.wait_published(8)
    with (
        StoreDaemon(tmp_path / "here", shared, **events) as here,
        here.connect(timeout_s=30.0) as pool,
        router_of(here) as router,
    ):
        connected(here, router, pool)
        keys = pool.keys(tokens)
        wait_until(lambda: pool.lookup(keys).chunks == 8, "the store is known to have them")
        assert load_all(pool, keys)[0].chunks == 8
        wait_until(partial(finds, router, list(map(int, tokens)), 8, SCOPES[0]), "what came from the store is found")
