"""Sequences on a device whose chunks are lost, also while blocks are on their way: nothing that was not verified is
attended to, and nothing is served after a loss."""

import threading

import numpy as np
import pytest
import torch

import kvpool_client as kv
from kvpool_sparse import SequenceLost, SparseSequence
from kvpool_sparse.device import DeviceSequence
from kvpool_sparse.device.block_reader import BlockReader
from kvpool_sparse.device.prefetch import Prefetch
from kvpool_sparse.device.slot_table import Numbers
from kvpool_sparse.device.staging_area import StagingArea
from kvpool_sparse.device.tensors import Items
from tests.e2e.sparse.test_device_sequences import CLOSE, append_to, attended, device, pool, prefetch_threads, queries
from tests.rigs.daemon import Daemon, Start, wait_until
from tests.rigs.sparse_text import EVERYTHING, LAYOUT, Text, end_connection_of, lose_lease, sequence_of

__all__ = ["device", "pool"]  # fixtures

END = 1300


def on_device(
    pool: kv.Pool, text: Text, device: torch.device, *, staging_blocks: int = 60, is_shared: bool = False
) -> DeviceSequence:
    host = SparseSequence(pool, EVERYTHING, tokens=text.ids[:END] if is_shared else None, threads=1)
    found = DeviceSequence(host, device=device, staging_blocks=staging_blocks)
    append_to(found, text, END)
    assert found.settle() > 10
    return found


def lose_chunks(daemon: Daemon, pool: kv.Pool) -> None:
    """End the lease, and flush what it held."""
    lose_lease(daemon, pool)
    with daemon.admin() as admin:
        admin.flush(None, None)


def check_exact(sequence: DeviceSequence, text: Text) -> None:
    for layer in range(LAYOUT.layers):
        np.testing.assert_allclose(attended(sequence, layer, text.query), text.exact(layer, END), atol=CLOSE)


def test_nothing_staged_is_served_after_a_loss(pool: kv.Pool, module_daemon: Daemon, device: torch.device) -> None:
    text, before = Text(61, END), prefetch_threads()
    with on_device(pool, text, device) as there:
        check_exact(there, text)
        assert there.stats()["staged_blocks"] > 0
        lose_chunks(module_daemon, pool)
        with pytest.raises(SequenceLost, match="first 0 tokens"):
            there.attend(0, text.query)
        assert there.stats()["staged_blocks"] == 0
        assert there.stats()["lost"] == 1
        assert there.device_bytes == 0
        assert prefetch_threads() == before
        with pytest.raises(kv.KVPoolError, match="closed"):
            there.attend(0, text.query)


@pytest.mark.parametrize("call", [1, 3])
def test_blocks_of_chunks_that_are_lost_while_they_are_read_enter_no_slot(
    pool: kv.Pool, module_daemon: Daemon, device: torch.device, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The slots belong to another sequence before they are read, as if the copy had been slow."""
    text, calls = Text(62, END), []
    with on_device(pool, text, device, staging_blocks=40) as there, module_daemon.connect(layout=LAYOUT) as other:
        read = BlockReader.read

        def slowly(self: BlockReader, layer: int, blocks: Numbers, heads: Numbers, out: Items) -> None:
            calls.append(layer)
            if len(calls) == call:
                lose_chunks(module_daemon, pool)
                with sequence_of(other, Text(63, END), EVERYTHING, END) as taker:
                    taker.settle()
                    read(self, layer, blocks, heads, out)
                    return
            read(self, layer, blocks, heads, out)

        monkeypatch.setattr(BlockReader, "read", slowly)
        with pytest.raises(SequenceLost):
            there.attend(0, text.query)
        assert len(calls) == call
        assert there.stats()["staging_copies"] == (call - 1) * there._staging.area.piece


def test_a_lease_that_is_lost_while_blocks_are_read_is_mended(
    pool: kv.Pool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, calls = Text(64, END), []
    with on_device(pool, text, device, staging_blocks=40) as there:
        read = BlockReader.read

        def interrupted(self: BlockReader, layer: int, blocks: Numbers, heads: Numbers, out: Items) -> None:
            read(self, layer, blocks, heads, out)
            calls.append(layer)
            if len(calls) == 2:
                end_connection_of(pool)
                wait_until(lambda: pool.connected, "the pool has connected again")

        monkeypatch.setattr(BlockReader, "read", interrupted)
        for _ in range(2):
            check_exact(there, text)
        there._ready()
        there._staging.table.verify()


def test_a_prefetch_of_lost_chunks_stages_nothing(
    pool: kv.Pool, module_daemon: Daemon, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, is_armed = Text(65, END), []
    with on_device(pool, text, device, staging_blocks=200) as there:
        check_exact(there, text)
        there._ready()
        there._staging.table.clear()
        copies = there.stats()["staging_copies"]
        foreseen = BlockReader.foreseen

        def slowly(self: BlockReader, layer: int, query: np.ndarray) -> object:
            wanted = foreseen(self, layer, query)
            is_armed.append(layer)
            lose_chunks(module_daemon, pool)
            return wanted

        monkeypatch.setattr(BlockReader, "foreseen", slowly)
        check_exact_layer = attended(there, 0, text.query)
        np.testing.assert_allclose(check_exact_layer, text.exact(0, END), atol=CLOSE)
        wanted = EVERYTHING.middle_blocks(END) * LAYOUT.kv_heads
        assert there.stats()["staging_copies"] == copies + wanted, "those of layer 0"
        assert is_armed == [1]
        with pytest.raises(SequenceLost):
            there.attend(1, text.query)


def test_chunks_that_come_back_to_other_slots_are_staged_anew(start_daemon: Start, device: torch.device) -> None:
    daemon = start_daemon(dram__capacity="8MiB")
    text, between = Text(66, END), Text(67, END)
    with (
        daemon.connect(layout=LAYOUT) as pool,
        daemon.connect(layout=LAYOUT) as other,
        on_device(pool, text, device, is_shared=True) as there,
    ):
        check_exact(there, text)
        lose_chunks(daemon, pool)
        with (
            sequence_of(other, between, EVERYTHING, END, is_shared=True) as taker,
            sequence_of(other, text, EVERYTHING, END, is_shared=True) as again,
        ):
            taker.settle()
            again.settle()
            copies = there.stats()["staging_copies"]
            check_exact(there, text)
            assert there.stats()["reattached"] == 1
            assert there.stats()["staging_copies"] > copies


def test_a_step_that_is_interrupted_is_the_last_one(
    pool: kv.Pool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(51, END)
    with on_device(pool, text, device) as sequence:
        for query in queries(51, 2):  # a prefetch is under way
            attended(sequence, 0, query)
        with monkeypatch.context() as patched:
            patched.setattr(StagingArea, "read", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                attended(sequence, 1, text.query)
        for call in (sequence.settle, sequence.fork, sequence.stats, lambda: sequence.attend(0, text.query)):
            with pytest.raises(kv.KVPoolError, match="an earlier call ended in the middle"):
                call()
    assert prefetch_threads() == 0


def _interrupted(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_wait_for_a_prefetch_that_is_interrupted_forgets_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetch, is_free = Prefetch(), threading.Event()
    prefetch.begin_job(lambda: _wait_for(is_free))
    job = prefetch._job
    assert job is not None
    with monkeypatch.context() as patched:
        patched.setattr(job, "result", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            prefetch.finish()
    assert prefetch._job is job
    is_free.set()
    prefetch.finish()
    assert prefetch._job is None
    prefetch.close()


def _wait_for(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_device_without_room_for_a_fork_keeps_nothing_of_it(
    pool: kv.Pool, device: torch.device, module_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(52, END)
    with on_device(pool, text, device) as sequence:
        pages = sequence.sequence._table._pages
        before = [page.references for page in pages]
        with monkeypatch.context() as patched:
            patched.setattr(StagingArea, "__init__", _without_memory)
            with pytest.raises(MemoryError):
                sequence.fork()
        assert [page.references for page in pages] == before
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "its lease has ended")


def _without_memory(*args: object, **kwargs: object) -> None:
    raise MemoryError


def test_arrays_that_run_backwards_reach_the_device(pool: kv.Pool, device: torch.device) -> None:
    text = Text(53, 300)
    with DeviceSequence(SparseSequence(pool, EVERYTHING, threads=1), device=device) as sequence:
        for layer in range(LAYOUT.layers):
            keys, values = (part[layer, :300][::-1].copy()[::-1] for part in (text.keys, text.values))
            assert keys.strides[0] < 0
            sequence.append(layer, keys, values)
            np.testing.assert_allclose(attended(sequence, layer, text.query), text.exact(layer, 300), atol=2e-5)


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_named(pool: kv.Pool, name: str) -> None:
    with SparseSequence(pool, EVERYTHING, threads=1) as host:
        with pytest.raises(kv.InvalidArgument, match=f"device is '{name}', expected one that torch has here"):
            DeviceSequence(host, device=name)
        host.close()
        with pytest.raises(kv.KVPoolError, match="the sequence is closed"):
            DeviceSequence(host, device="cpu")


def test_close_does_not_wait_for_all_of_a_prefetch(
    pool: kv.Pool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(69, END)
    with on_device(pool, text, device, staging_blocks=300) as there:
        check_exact(there, text)
        there._ready()
        there._staging.table.clear()
        read, calls = BlockReader.read, []

        def closing(self: BlockReader, layer: int, blocks: Numbers, heads: Numbers, out: Items) -> None:
            if layer == 1:
                calls.append(layer)
                there._prefetch._stop.set()  # as `close` does meanwhile
            read(self, layer, blocks, heads, out)

        monkeypatch.setattr(BlockReader, "read", closing)
        monkeypatch.setattr(there._staging.area, "piece", 4)
        attended(there, 0, queries(69, 1)[0])
        there.close()
    assert calls in ([], [1])
    assert there._prefetch.is_stopping
