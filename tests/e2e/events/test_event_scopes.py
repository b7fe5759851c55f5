"""Scopes of chunks with equal tokens (adapter, salt) as routers get them, and the token ids of chunks on disk alone."""

from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.errors import ProtocolError, Refused
from kvpool.keys import ADAPTER_BYTES_MAX, salt_tag
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from tests.hostile.rigs.raw_clients import engine, keys_of
from tests.rigs.daemon import SMALL, Daemon, Start, wait_connected, wait_until
from tests.rigs.events.publishing import CHUNK, connected, router_of
from tests.rigs.payload import load_all, store, tokens_of

SALT = b"a tenant's secret salt"
TAG = salt_tag(SALT).hex()


def restart(daemon: Daemon, pool: kv.Pool) -> None:
    """Restarts the daemon over a warm disk."""
    assert daemon.stop() == 0
    daemon.start()
    wait_connected(pool)
    daemon.wait_open()


@pytest.mark.parametrize("form", ["map", pytest.param("positional", marks=pytest.mark.slow)])
def test_a_router_distinguishes_tenants_and_adapters_over_restarts(publish: Start, tmp_path: Path, form: str) -> None:
    daemon = publish(ssd=True, events__format=form, log__level="debug", events__block_tokens="8")
    tokens = tokens_of(1, CHUNK * 4)
    asked = {"": b"", "sql": b""}
    with daemon.connect() as pool:
        with router_of(daemon) as router:
            connected(daemon, router, pool)
            store(pool, pool.keys(tokens[: CHUNK * 2], adapter="sql"))
            store(pool, pool.keys(tokens, salt=SALT))
            store(pool, pool.keys(tokens[: CHUNK * 3], salt=SALT, adapter="sql"))
            router.receive_until(lambda: router.index.longest(tokens.tolist(), 8, "sql", TAG), "all are published")

        restart(daemon, pool)
        with router_of(daemon) as router:
            router.index.is_strict = False
            wait_until(lambda: int(daemon.stats()["events.published_snapshots"]) > 0, "what is on disk is published")

            def counts() -> list[int]:
                for topic in {topic for topic, _, _ in router.replay(0)}:
                    router.catch_up(topic)
                return [router.index.longest(tokens.tolist(), 8, name, tag) for tag in ("", TAG) for name in asked]

            per_chunk = CHUNK // 8
            wait_until(lambda: counts() == [0, 2 * per_chunk, 4 * per_chunk, 3 * per_chunk], f"{counts()} are right")
            assert router.index.longest(tokens.tolist(), 8, "other") == 0
            assert router.index.longest(tokens.tolist(), 8, "", SALT.decode()) == 0
            assert all(SALT not in payload for _, _, payload in router.replay(0))
        events = pool.events(kv.BEGINNING)
        assert events.is_gap
        parts = [chunk for part in pool.snapshot() for chunk in part.chunks]
        mine = [chunk for chunk in parts if chunk.salt_tag == salt_tag(SALT) and not chunk.adapter]
        assert b"".join(chunk.tokens for chunk in sorted(mine, key=lambda chunk: chunk.tokens)) == b"".join(
            sorted(tokens[at : at + CHUNK].astype("<i4").tobytes() for at in range(0, 4 * CHUNK, CHUNK))
        )
    assert daemon.stop() == 0
    assert SALT.decode() not in daemon.log()
    for file in (path for path in (tmp_path / "ssd").rglob("*") if path.is_file()):
        assert SALT not in file.read_bytes(), file


def test_events_and_promoted_chunks_keep_their_scope(publish: Start) -> None:
    daemon = publish(ssd=True)
    tokens = tokens_of(2, CHUNK * 2)
    with daemon.connect(salt=SALT) as pool:
        keys = pool.keys(tokens, adapter="x" * 300)
        assert store(pool, keys).stored == 2
        (stored,) = [event for event in pool.events().events if event.kind == kv.EventKind.STORED]
        assert (stored.adapter, stored.salt_tag) == ("x" * ADAPTER_BYTES_MAX, salt_tag(SALT))
        restart(daemon, pool)
        mark = pool.events().mark
        assert load_all(pool, keys)[0].chunks == 2
        batch = pool.events(mark)
        promoted = [event for event in batch.events if kv.Level.DRAM in event.gained]
        packed = tokens.astype("<i4").tobytes()
        published = {event.keys: event.tokens for event in promoted}  # in the order in which they landed
        assert published == {keys[0]: packed[: 4 * CHUNK], keys[1]: packed[4 * CHUNK :]}
        assert {(event.adapter, event.salt_tag) for event in promoted} == {("x" * ADAPTER_BYTES_MAX, salt_tag(SALT))}
        one_less = kv.EventMark(batch.mark.incarnation, batch.mark.last - 1)
        assert batch.until(one_less) == kv.EventBatch(batch.events[:-1], one_less, False, batch.namespaces)


def test_headers_that_cannot_be_read_leave_ids_unknown_and_nothing_else(publish: Start, tmp_path: Path) -> None:
    daemon = publish(ssd=True, events__publish="off", events__replay="off")
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(3, CHUNK * 6))
        assert store(pool, keys).stored == 6
        restart(daemon, pool)
        first = next(iter(sorted((tmp_path / "ssd").glob("segment-*.kvs"))))
        assert all(chunk.tokens for part in pool.snapshot() for chunk in part.chunks)
        first.rename(tmp_path / "elsewhere")
        parts = [chunk for part in pool.snapshot() for chunk in part.chunks]
        assert {chunk.key for chunk in parts} == {keys[number] for number in range(6)}
        assert not any(chunk.tokens for chunk in parts)
        assert load_all(pool, keys)[0].chunks == 6
        assert daemon.problems() == []


@pytest.mark.parametrize("scope", [b"x", bytes(12), bytes(18), bytes(260)])
def test_an_invalid_scope_ends_the_connection(shared_daemon: Daemon, scope: bytes) -> None:
    daemon = shared_daemon
    with engine(daemon) as connection:
        made = connection.call(reserve_chain(b"", keys_of(7, 1)), m.Reserved)
        with pytest.raises((Refused, ProtocolError), match="scope has"):
            connection.call(m.Commit(made.reservation, bytes(4 * SMALL.layers), bytes(4 * CHUNK), scope), m.Committed)
    with daemon.connect() as pool:
        assert store(pool, pool.keys(tokens_of(len(scope), CHUNK))).stored == 1
