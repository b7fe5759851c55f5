"""Token ids stay with their chunks: from the client into DRAM, the slots on disk, and back."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import load_all, store, tokens_of

CHAIN = 5
PAGE = kvpool_native.SSD_HEADER_BYTES


def _open(start_daemon: Callable[..., Daemon], tmp_path: Path, **options: str) -> Daemon:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="32MiB", **options)
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    return daemon


def _on_disk(path: Path) -> dict[bytes, bytes]:
    """Token ids by key, of every slot."""
    found = {}
    for file in sorted(path.glob("segment-*.kvs")):
        data = file.read_bytes()
        for at in range(0, len(data), PAGE):
            header = kvpool_native.decode_ssd_header(data[at : at + PAGE]) if data[at : at + 4] == b"KVPS" else None
            if header is not None:
                found[header.key] = header.tokens
    return found


def _expected(pool: kv.Pool, tokens: np.ndarray) -> dict[bytes, bytes]:
    keys = pool.keys(tokens)
    chunks = tokens.astype("<i4").reshape(-1, SMALL.chunk_tokens)
    return {keys[chunk]: chunks[chunk].tobytes() for chunk in range(len(keys))}


def test_ids_reach_the_disk_and_come_back_with_a_promotion(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = _open(start_daemon, tmp_path)
    tokens = tokens_of(1, CHAIN * SMALL.chunk_tokens).astype(np.int64)
    with daemon.connect() as pool:
        expected = _expected(pool, tokens)
        assert store(pool, pool.keys(tokens)).stored == CHAIN
        assert daemon.stats()["dram.token_id_bytes"] == tokens.size * 4
    assert daemon.stop() == 0
    assert _on_disk(tmp_path / "ssd") == expected

    daemon.start()
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    with daemon.connect() as pool:
        assert load_all(pool, pool.keys(tokens))[0].chunks == CHAIN
        wait_until(lambda: daemon.stats()["dram.token_id_bytes"] == tokens.size * 4, "the ids came with the chunks")
    with daemon.admin() as admin:
        assert admin.flush(None, None, "ssd")["chunks"] == CHAIN
    for file in (tmp_path / "ssd").glob("segment-*.kvs"):
        file.write_bytes(bytes(file.stat().st_size))
    assert daemon.stop() == 0
    assert _on_disk(tmp_path / "ssd") == expected


def test_token_ids_of_hashed_chunks_are_those_of_the_engine(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = _open(start_daemon, tmp_path)
    tokens = tokens_of(2, CHAIN * SMALL.chunk_tokens + 7)
    hashes = [bytes([number]) * 32 for number in range(2 * CHAIN)]
    with daemon.connect() as pool:
        with_ids = pool.keys_from_hashes(hashes, SMALL.chunk_tokens // 2, tokens=tokens)
        without = pool.keys_from_hashes(hashes, SMALL.chunk_tokens // 2)
        assert [with_ids[n] for n in range(CHAIN)] == [without[n] for n in range(CHAIN)]
        assert with_ids.token_ids([1]) == tokens[SMALL.chunk_tokens : 2 * SMALL.chunk_tokens].astype("<i4").tobytes()
        assert without.token_ids([1]) == b""
        assert store(pool, without).stored == CHAIN
        assert daemon.stats()["dram.token_id_bytes"] == 0
        with pytest.raises(kv.InvalidArgument, match="tokens are 10, expected at least"):
            pool.keys_from_hashes(hashes, SMALL.chunk_tokens // 2, tokens=tokens[:10])


def test_a_daemon_configured_without_token_ids_stores_none(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = _open(start_daemon, tmp_path, server__keep_token_ids="false")
    tokens = tokens_of(3, CHAIN * SMALL.chunk_tokens)
    with daemon.connect() as pool:
        expected = _expected(pool, tokens)
        assert store(pool, pool.keys(tokens)).stored == CHAIN
    assert daemon.stats()["dram.token_id_bytes"] == 0
    assert daemon.stop() == 0
    assert _on_disk(tmp_path / "ssd") == dict.fromkeys(expected, b"")
