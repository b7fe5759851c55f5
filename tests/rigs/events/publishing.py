"""A publishing daemon and its routers: connecting them, and what a router must know."""

from pathlib import Path

import kvpool_client as kv
from kvpool.router_events.columns import unpack_chunks
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.events.router import Router
from tests.rigs.payload import store, tokens_of

CHUNK = SMALL.chunk_tokens
MEDIA = {"CPU": kv.Level.DRAM, "STORAGE": kv.Level.SSD}


def local_events(directory: Path) -> dict[str, str]:
    """Options of a daemon that publishes at sockets in a directory."""
    return {"events__publish": f"ipc://{directory}/events", "events__replay": f"ipc://{directory}/events-replay"}


def router_of(daemon: Daemon, topic: str = "", **arguments: object) -> Router:
    """A router of a daemon, subscribed before anything else happens."""
    with daemon.admin() as admin:
        info = admin.info()
    replay = "" if info["events_replay"] == "off" else info["events_replay"]
    return Router(info["events"], replay, topic, **arguments)  # type: ignore[arg-type]


def connected(daemon: Daemon, router: Router, pool: kv.Pool) -> None:
    """Until the router's subscription has arrived: a chunk is stored again and again until it hears of one."""
    number = 0

    def is_heard() -> bool:
        nonlocal number
        number += 1
        store(pool, pool.keys(tokens_of(10_000 + number, CHUNK)))
        return router.receive(0.02)

    wait_until(is_heard, "the router is subscribed")
    router.begin_anew()
    router.catch_up(next(iter(router.topics)))


def expected(daemon: Daemon, model: str = "test-model") -> dict[str, set[int]]:
    """Blocks by medium that a router must know, as the daemon's snapshot has them; one for each chunk."""
    blocks: dict[str, set[int]] = {medium: set() for medium in MEDIA}
    with daemon.admin() as admin:
        names, cursor = admin.namespaces(), 0
        while cursor >= 0:
            page = admin.snapshot(cursor)
            for chunk in unpack_chunks(page.chunks):
                for medium, level in MEDIA.items():
                    if chunk.tiers >> level & 1 and names[chunk.namespace][0] == model:
                        blocks[medium].add(int.from_bytes(chunk.key[-8:], "big"))
            cursor = page.cursor
    return blocks


def known(router: Router) -> dict[str, set[int]]:
    """Blocks by medium that a router knows."""
    return {medium: set(router.index.media.get(medium, {})) for medium in MEDIA}
