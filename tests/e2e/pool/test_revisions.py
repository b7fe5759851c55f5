"""Revisions of a model: revisions share no chunks, and the keys of a Pool without a revision never change."""

import pytest

import kvpool_client as kv
from kvpool.keys import DEFAULT_DOMAIN, namespace_name, root_key
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

CHUNKS = 3
# The roots of a Pool of this layout and model since the key format exists.
ROOT = "eed2314b37fe0cc773f27abc5db700ad145af6847eaccba0b7478df45bf7db73"


def test_chunks_of_one_revision_are_no_others(daemon: Daemon) -> None:
    tokens = tokens_of(1, CHUNKS * SMALL.chunk_tokens)
    with daemon.connect() as bare, daemon.connect(revision="a") as old, daemon.connect(revision="b") as new:
        keys = {pool.model: pool.keys(tokens) for pool in (bare, old, new)}
        assert sorted(keys) == ["test-model", "test-model@a", "test-model@b"]
        assert len({chain[0] for chain in keys.values()}) == 3
        assert store(old, keys[old.model]).stored == CHUNKS
        assert [pool.lookup(keys[pool.model]).chunks for pool in (bare, old, new)] == [0, CHUNKS, 0]
        with daemon.connect(revision="a") as same:
            result, into = load_all(same, same.keys(tokens))
            assert result.chunks == CHUNKS
            assert_right_bytes(keys[old.model], SMALL, result, into)
        with daemon.admin() as admin:
            assert admin.flush("test-model", None)["chunks"] == 0
            assert admin.flush("test-model@a", None)["chunks"] == CHUNKS


def test_a_pool_without_a_revision_keeps_its_keys() -> None:
    assert root_key(DEFAULT_DOMAIN, model="test-model", adapter="", salt=b"", layout=SMALL).hex() == ROOT
    tokens = tokens_of(1, CHUNKS * SMALL.chunk_tokens)
    with (
        kv.connect("/nowhere", model="test-model", layout=SMALL) as bare,
        kv.connect("/nowhere", model="test-model", revision="", layout=SMALL) as empty,
    ):
        assert bare.keys(tokens).columns() == empty.keys(tokens).columns()
    assert namespace_name("test-model", "") == "test-model"


@pytest.mark.parametrize("revision", [None, 7, b"a", "a@b", "x" * 600])
def test_an_invalid_revision_is_refused(revision: object) -> None:
    with pytest.raises(kv.InvalidArgument, match="revision"):
        kv.connect("/nowhere", model="test-model", revision=revision, layout=SMALL)  # type: ignore[arg-type]
