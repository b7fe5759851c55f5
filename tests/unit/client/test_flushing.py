"""An engine's flush drops what was held a moment ago, and says so where something stays held."""

from typing import Any

import pytest

from kvpool.protocol.blocking import BlockingConnection
from kvpool_client.engines.flushing import flush_model
from tests.rigs.daemon import ANSWER_TIMEOUT_S, Daemon
from tests.rigs.payload import store, tokens_of

MODEL = "test-model"


def test_a_flush_outlasts_a_hold_that_ends(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 4 * 32))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        first = []
        flush = BlockingConnection.flush

        def flush_then_release(
            self: BlockingConnection, model: str | None, older_than_s: float | None, **given: Any
        ) -> dict[str, Any]:
            report = flush(self, model, older_than_s, **given)
            first.append(report["skipped"])
            lease.release()
            return report

        monkeypatch.setattr(BlockingConnection, "flush", flush_then_release)
        assert flush_model(daemon.socket, MODEL, ANSWER_TIMEOUT_S) == ""
        assert first[0] == 4, "they were held at the first order"
        assert pool.lookup(keys).chunks == 0


def test_a_flush_that_leaves_something_says_what(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 4 * 32))
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)):
            assert flush_model(daemon.socket, MODEL, 0.05) == "4 chunks were held by loads or saves for 0.05 s"
            assert pool.lookup(keys).chunks == 4
    assert "kvpool.sock" in flush_model(f"{daemon.socket}.none/kvpool.sock", MODEL, 0.05)
