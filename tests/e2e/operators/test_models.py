"""`kvpoolctl models` of a live daemon: bytes by tier, chunks, hits, last use and connections of each model and layout."""

from pathlib import Path
from typing import Any

import kvpool_client as kv
from kvpool.ids import PROBE_MODEL
from tests.rigs.daemon import SMALL, Daemon, Start, wait_until
from tests.rigs.kvpoolctl import ctl, ctl_json
from tests.rigs.payload import store, tokens_of

SHARDED: dict[str, Any] = {
    "layers": 3,
    "kv_heads": 2,
    "head_dim": 16,
    "dtype": "float16",
    "chunk_tokens": 32,
    "world": 2,
}


def _models(daemon: Daemon) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = ctl_json(daemon, "models")["models"]
    return rows


def test_rows_have_what_each_model_and_layout_stores_and_uses(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB", server__metrics="127.0.0.1:0")
    daemon.wait_open()
    wait_until(lambda: daemon.info()["health"] == "ready", "the probe's chunk is there")
    ranks = [daemon.connect(kv.Layout(**SHARDED, rank=rank), model="sharded", revision="a1") for rank in range(2)]
    for pool in ranks:
        store(pool, pool.keys(tokens_of(1, 2 * 32)))
    with daemon.connect(model="plain") as pool, daemon.admin() as admin:
        keys = pool.keys(tokens_of(2, 5 * 32))
        store(pool, pool.keys(tokens_of(2, 3 * 32)))
        assert pool.lookup(keys).chunks == 3
        admin.demote_all(60.0)
        admin.flush("plain", None, "dram")
    wait_until(lambda: daemon.stats()["usage.lookup_tokens"] == 5 * 32, "the lookup is reported")
    rows = {row["model"]: row for row in _models(daemon)}
    assert set(rows) == {"plain", "sharded@a1"}
    assert PROBE_MODEL not in rows
    plain, sharded = rows["plain"], rows["sharded@a1"]
    assert (plain["chunks"], plain["dram_bytes"], plain["ssd_bytes"]) == (3, 0, 3 * SMALL.stored_bytes)
    assert (plain["lookup_tokens"], plain["hit_tokens"], plain["connections"]) == (5 * 32, 3 * 32, 0)
    assert plain["layout"] == "32 tokens, 3 layers, 2 heads of 16, float16"
    assert plain["unused_s"] is not None
    assert (sharded["chunks"], sharded["ranks"], sharded["connections"]) == (4, 2, 2)
    assert sharded["dram_bytes"] == sharded["ssd_bytes"] == 4 * SMALL.stored_bytes
    assert sharded["layout"].endswith("; 2 ranks")
    text = ctl(daemon, "models").stdout
    assert "60.0%" in text
    for pool in ranks:
        pool.close()


def test_a_pool_without_models_says_so(daemon: Daemon) -> None:
    assert _models(daemon) == []
    text = ctl(daemon, "models").stdout
    assert text == "no model has chunks here, and no engine is connected\n"
