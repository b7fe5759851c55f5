"""Two daemons on one host: chunks are copied out of the other's memory, and what is wrong with that is the stream or a miss."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.config.curve_keys import make_key_pair, write_key_file
from kvpool.errors import Refused
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.transfer.near.owners import NearFailed, map_owner
from tests.e2e.remote.test_followed_saves import announce_all_but_the_last
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.payload import assert_right_bytes, payload_of, store, tokens_of
from tests.rigs.transfer.impostor import Impostor, peer_hello

CHUNKS = 40
# Layers so large that a copy takes a while.
LARGE = kv.Layout(layers=8, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=64)
LARGE_CHUNKS = 16
PATIENT_S = 60.0
ROOM = {"owner__dram__capacity": "128MiB", "here__dram__capacity": "128MiB"}


def near_daemons(directory: Path, **further: str) -> AbstractContextManager[tuple[Daemon, Daemon]]:
    shared = {"owner__peer__shm": "true", "here__peer__shm": "true"}
    return two_daemons(directory, **{**shared, **further})


def saved(owner: Daemon, pool: kv.Pool, *, seed: int = 1, chunks: int = CHUNKS) -> kv.KeyChain:
    """A chain that the owner has, and the other node knows."""
    keys = pool.keys(tokens_of(seed, chunks * pool.layout.chunk_tokens))
    with owner.connect(pool.layout) as there:
        assert store(there, keys).stored == chunks
    wait_until(lambda: pool.lookup(keys).chunks == chunks, "the hint has come")
    return keys


def load(pool: kv.Pool, keys: kv.KeyChain) -> int:
    """Load what there is of a chain, and compare its bytes. How many chunks came."""
    layout = pool.layout
    into = np.zeros((len(keys), layout.chunk_bytes), np.uint8)
    with pool.acquire(pool.lookup(keys)) as lease:
        result = pool.load(lease, into=into[: lease.chunks]).wait()
    assert_right_bytes(keys, layout, result, into)
    return result.chunks


def pulls(here: Daemon) -> tuple[int, int]:
    """By shared memory, and by the stream."""
    stats = here.stats()
    return int(stats["peer.shm.pulls"]), int(stats["peer.tcp.pulls"])


def load_later(owner: Daemon, pool: kv.Pool) -> int:
    """Load another chain, which the owner has whole."""
    return load(pool, saved(owner, pool, seed=99))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """An owner and a node on its host, for all tests that leave both as they were."""
    with near_daemons(tmp_path_factory.mktemp("pair"), **ROOM) as daemons:
        yield daemons


def counted(owner: Daemon, here: Daemon) -> np.ndarray:
    """What one copy out of the owner's memory changes."""
    mine, theirs = here.stats(), owner.stats()
    names = ("peer.shm.pulls", "peer.tcp.pulls", "peer.shm.copied_bytes", "peer.read_bytes")
    return np.array(
        [*(mine[name] for name in names), *(theirs[f"peer.offers.{name}"] for name in ("shm", "sent_bytes"))]
    )


def test_what_one_has_stored_is_copied_out_of_its_memory(pair: tuple[Daemon, Daemon]) -> None:
    owner, here = pair
    with here.connect() as pool:
        for seed in (1, 2):
            keys, before = saved(owner, pool, seed=seed), counted(owner, here)
            assert load(pool, keys) == CHUNKS
            wait_until(lambda: owner.stats()["leases"] == 0, "the owner's lease has ended")
            size = CHUNKS * SMALL.chunk_bytes
            assert (counted(owner, here) - before).tolist() == [1, 0, size, size, 1, 0]
            assert here.stats()["peer.shm.owners"] == 1
        with owner.admin() as admin:
            assert [row["role"] for row in admin.connections()["connections"]].count("peer") == 1
        with here.admin() as admin:
            assert admin.info()["peer_shm_owners"] == 1


def test_layers_land_in_order_and_all_bytes_are_right(pair: tuple[Daemon, Daemon]) -> None:
    owner, here = pair
    before = pulls(here)
    with here.connect(LARGE, timeout_s=PATIENT_S) as pool:
        keys = saved(owner, pool, chunks=LARGE_CHUNKS)
        into = np.zeros((LARGE_CHUNKS, LARGE.chunk_bytes), np.uint8)
        with pool.acquire(pool.lookup(keys)) as lease:
            running = pool.load(lease, into=into)
            for layer in range(LARGE.layers):
                assert running.wait_layer(layer, PATIENT_S)
                assert running.chunks_so_far == LARGE_CHUNKS
            result = running.wait()
        assert result.reason == "complete"
        assert_right_bytes(keys, LARGE, result, into)
        assert pulls(here) == (before[0] + 1, before[1])


def test_an_owner_that_encrypts_is_read_by_shared_memory_too(tmp_path: Path) -> None:
    pair = make_key_pair()
    write_key_file(str(tmp_path / "key"), pair)
    (tmp_path / "allow").write_text(pair.public.decode() + "\n")
    common = {"peer__keys": str(tmp_path / "key"), "peer__allow": str(tmp_path / "allow"), "peer__encrypt": "true"}
    options = {f"{name}__{key}": value for name in ("owner", "here") for key, value in common.items()}
    with near_daemons(tmp_path, **options) as (owner, here), here.connect() as pool:
        assert load(pool, saved(owner, pool)) == CHUNKS
        assert pulls(here) == (1, 0)


def test_chunks_that_are_still_being_saved_come_over_the_stream(pair: tuple[Daemon, Daemon]) -> None:
    owner, here = pair
    with owner.connect() as there, here.connect(timeout_s=PATIENT_S) as pool:
        (near, streamed), asked = pulls(here), owner.stats()["peer.asked.shm"]
        keys = pool.keys(tokens_of(5, CHUNKS * SMALL.chunk_tokens))
        with there.save(keys, from_=payload_of(keys, SMALL)) as save:
            announce_all_but_the_last(save)
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the save has been reported")
            with pool.acquire(pool.lookup(keys)) as lease:
                into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
                load = pool.load(lease, into=into)
                assert load.wait_layer(0, PATIENT_S)
                assert pulls(here) == (near, streamed + 1)
                assert save.commit() is not None
                result = load.wait()
        assert_right_bytes(keys, SMALL, result, into)
        assert owner.stats()["peer.asked.shm"] == asked
        assert load_later(owner, pool) == CHUNKS
        assert pulls(here) == (near + 1, streamed + 1), "what is whole is copied out of its memory"


@pytest.mark.parametrize(
    "options",
    [
        {"owner__peer__shm": "false"},
        {"here__peer__transport": "tcp"},
        {"owner__peer__rate": "1GiB"},
        pytest.param({"here__peer__shm": "false"}, marks=pytest.mark.slow),
        pytest.param({"owner__peer__transport": "tcp"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options),
)
def test_the_stream_is_used_where_a_node_is_configured_so(tmp_path: Path, options: dict[str, str]) -> None:
    with near_daemons(tmp_path, **options) as (owner, here), here.connect() as pool:
        for seed in (1, 2):
            assert load(pool, saved(owner, pool, seed=seed)) == CHUNKS
        stats = here.stats()
        assert (stats.get("peer.shm.pulls", 0), stats["peer.tcp.pulls"]) == (0, 2)
        assert owner.stats()["peer.asked.shm"] <= 1, "it is not asked again in this life"


def test_an_owner_that_is_killed_in_mid_transfer_is_no_wrong_byte_and_its_memory_is_let_go(tmp_path: Path) -> None:
    with near_daemons(tmp_path, **ROOM) as (owner, here), here.connect(LARGE, timeout_s=PATIENT_S) as pool:
        keys = saved(owner, pool, chunks=LARGE_CHUNKS)
        into = np.zeros((LARGE_CHUNKS, LARGE.chunk_bytes), np.uint8)
        with pool.acquire(pool.lookup(keys)) as lease:
            running = pool.load(lease, into=into)
            assert running.wait_layer(0, PATIENT_S)
            owner.kill()
            result = running.wait()
        assert result.reason == "complete", "nobody changes the memory of who has ended"
        assert_right_bytes(keys, LARGE, result, into)
        wait_until(lambda: here.stats()["peer.shm.owners"] == 0, "the former life's memory is not held")
        owner.start()
        wait_until(lambda: pool.lookup(keys).chunks in (0, LARGE_CHUNKS), "the former life's hints have gone")
        before = pulls(here)[0]
        wait_until(lambda: load(pool, saved(owner, pool, seed=3, chunks=2)) == 2, "the new life's chunks are hits")
        assert pulls(here)[0] > before, "by shared memory, though the socket has the path of the former life's"
        assert here.stats()["peer.shm.owners"] == 1


def test_an_owner_that_is_stopped_in_mid_transfer_delays_nothing(pair: tuple[Daemon, Daemon]) -> None:
    owner, here = pair
    with here.connect(LARGE, timeout_s=PATIENT_S) as pool:
        keys = saved(owner, pool, seed=6, chunks=LARGE_CHUNKS)
        into = np.zeros((LARGE_CHUNKS, LARGE.chunk_bytes), np.uint8)
        assert owner.process is not None
        with pool.acquire(pool.lookup(keys)) as lease:
            running = pool.load(lease, into=into)
            assert running.wait_layer(0, PATIENT_S)
            owner.process.send_signal(signal.SIGSTOP)
            try:
                result = running.wait()
            finally:
                owner.process.send_signal(signal.SIGCONT)
        assert result.reason == "complete"
        assert_right_bytes(keys, LARGE, result, into)
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's lease has ended")


def test_a_socket_that_never_answers_is_the_stream_and_is_not_asked_again_at_once(tmp_path: Path) -> None:
    with near_daemons(tmp_path) as (owner, here), here.connect() as pool:
        keys, later = saved(owner, pool), saved(owner, pool, seed=2)
        with Impostor(owner, None) as silent:
            assert load(pool, keys) in (0, CHUNKS), "the engine's own time may be over"
            wait_until(lambda: here.stats()["peer.pulled_chunks"] == CHUNKS, "the stream brings it in any case")
            assert load(pool, later) == CHUNKS
            assert silent.greeted == 1
        assert pulls(here) == (0, 2)
        assert here.stats()["peer.shm.refused"] == 1


def other_epoch(welcome: m.Welcome, fds: list[int]) -> tuple[m.Welcome, list[int]]:
    return replace(welcome, epoch=bytes(16)), fds


def no_descriptors(welcome: m.Welcome, _fds: list[int]) -> tuple[m.Welcome, list[int]]:
    return welcome, []


def too_large(welcome: m.Welcome, fds: list[int]) -> tuple[m.Welcome, list[int]]:
    return replace(welcome, arena_bytes=welcome.arena_bytes * 2), fds


def unsealed(welcome: m.Welcome, fds: list[int]) -> tuple[m.Welcome, list[int]]:
    arena = os.memfd_create("unsealed")
    os.ftruncate(arena, welcome.arena_bytes)
    return welcome, [arena, *fds[1:]]


def shorter_arena(welcome: m.Welcome, fds: list[int]) -> tuple[m.Welcome, list[int]]:
    """Honest about its size, which leaves the named places outside."""
    _KEPT.append(kvpool_native.Mapping.create("short", 4096))
    return replace(welcome, arena_bytes=4096), [_KEPT[-1].fd, *fds[1:]]


def no_index(welcome: m.Welcome, fds: list[int]) -> tuple[m.Welcome, list[int]]:
    return welcome, [fds[0], fds[0]]


_KEPT: list[kvpool_native.Mapping] = []


@pytest.mark.parametrize(
    ("twist", "fault"),
    [
        (other_epoch, "another daemon answers"),
        (no_descriptors, "0 descriptors"),
        (too_large, "seal|size|bytes"),
        (unsealed, "seal|size|bytes"),
        (no_index, "index"),
    ],
)
def test_who_answers_with_something_else_is_not_mapped(
    pair: tuple[Daemon, Daemon],
    twist: Callable[[m.Welcome, list[int]], tuple[m.Welcome, list[int]]],
    fault: str,
) -> None:
    owner, _ = pair
    with closing(BlockingConnection(owner.socket, peer_hello(), PATIENT_S)) as connection:
        epoch = connection.welcome.epoch
    with Impostor(owner, twist), pytest.raises(NearFailed, match=fault):
        map_owner(owner.socket, epoch, PATIENT_S)
    connection, memory = map_owner(owner.socket, epoch, PATIENT_S)
    assert memory.epoch == epoch
    connection.close()


@pytest.mark.parametrize(
    "twist",
    [
        unsealed,
        shorter_arena,
        *(pytest.param(twist, marks=pytest.mark.slow) for twist in (other_epoch, no_descriptors, too_large, no_index)),
    ],
)
def test_who_answers_with_something_else_than_the_owners_memory_is_passed_over_for_the_stream(
    tmp_path: Path, twist: Callable[[m.Welcome, list[int]], tuple[m.Welcome, list[int]]]
) -> None:
    with near_daemons(tmp_path) as (owner, here), here.connect() as pool:
        keys, later = saved(owner, pool), saved(owner, pool, seed=2)
        with Impostor(owner, twist) as impostor:
            assert load(pool, keys) == CHUNKS
            assert load(pool, later) == CHUNKS
            assert impostor.greeted == 1
        assert pulls(here) == (0, 2)
        assert here.stats()["peer.shm.refused"] == 1


def test_other_bytes_in_the_named_places_are_a_miss_and_then_the_stream(tmp_path: Path) -> None:
    """The right index, and an arena of the right size with bytes of its own."""

    def other_bytes(welcome: m.Welcome, fds: list[int]) -> tuple[m.Welcome, list[int]]:
        _KEPT.append(kvpool_native.Mapping.create("other", welcome.arena_bytes))
        return welcome, [_KEPT[-1].fd, *fds[1:]]

    with near_daemons(tmp_path) as (owner, here), here.connect() as pool:
        keys, later = saved(owner, pool), saved(owner, pool, seed=2)
        with Impostor(owner, other_bytes):
            assert load(pool, keys) == 0
            wait_until(lambda: load(pool, later) == CHUNKS, "the stream brings what comes later")
        stats = here.stats()
        assert stats["peer.shm.refused"] == 1
        assert stats["peer.shm.copied_bytes"] == 0


def test_a_socket_that_may_not_be_opened_is_the_stream(tmp_path: Path) -> None:
    with near_daemons(tmp_path) as (owner, here), here.connect() as pool:
        keys = saved(owner, pool)
        os.rename(owner.socket, f"{owner.socket}.away")
        try:
            assert load(pool, keys) == CHUNKS
            assert pulls(here) == (0, 1)
            assert here.stats()["peer.shm.refused"] == 1
        finally:
            os.rename(f"{owner.socket}.away", owner.socket)


def test_a_node_on_another_host_is_read_by_the_stream(tmp_path: Path) -> None:
    """The owner's kernel says another boot id: a mount namespace of its own."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("a mount namespace needs root")
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("00000000-0000-0000-0000-000000000001\n")

    class Elsewhere(Daemon):
        def command(self) -> list[str]:
            mount = f'mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec "$@"'
            return ["unshare", "-m", "sh", "-c", mount, "sh", *super().command()]

    with near_daemons(tmp_path) as (owner, here), here.connect() as pool:
        owner.stop()
        owner.__class__ = Elsewhere
        owner.start()
        for seed in (1, 2):
            wait_until(lambda: load(pool, saved(owner, pool, seed=seed)) == CHUNKS, "it comes")  # noqa: B023
        assert pulls(here) == (0, 2)
        assert owner.stats()["peer.asked.shm"] == 1


def test_a_connection_of_a_peer_gets_memory_and_may_ask_nothing(pair: tuple[Daemon, Daemon]) -> None:
    owner, _ = pair
    before = owner.stats()["protocol_errors"]
    with closing(BlockingConnection(owner.socket, peer_hello(), PATIENT_S)) as connection:
        assert len(connection.fds) == 2
        assert connection.welcome.remote_bytes == 0
        with pytest.raises(Refused, match="not allowed on this connection"):
            connection.info()
    wait_until(lambda: owner.stats()["protocol_errors"] == before + 1, "it is counted")


def test_a_daemon_without_peers_hands_its_memory_to_no_other_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, pytest.raises(Refused, match="for its own engines alone"):
        BlockingConnection(daemon.socket, peer_hello(), 5.0)
