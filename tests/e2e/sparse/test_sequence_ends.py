"""Sparse sequences whose chunks move, end or are somebody else's: bytes of another place are never read, and nothing
is left behind."""

import os

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_sparse import SequenceLost, SparseConfig, SparseSequence
from kvpool_sparse.pages import Page
from tests.e2e.sparse.test_sequences import pool
from tests.rigs.daemon import Daemon, Start, wait_until
from tests.rigs.payload import tokens_of
from tests.rigs.sparse_text import CONFIG, EVERYTHING, LAYOUT, Text, due_chunks, lose_lease, sequence_of

__all__ = ["pool"]  # fixtures


@pytest.mark.parametrize("is_back", [True, False])
def test_chunks_are_read_where_they_come_back_to_and_a_lost_place_is_never_saved_from(
    start_daemon: Start, *, is_back: bool
) -> None:
    daemon = start_daemon(dram__capacity="8MiB")
    text = Text(19, 1800)
    with (
        daemon.connect(layout=LAYOUT) as pool,
        daemon.connect(layout=LAYOUT) as other,
        daemon.admin() as admin,
        sequence_of(pool, text, EVERYTHING, 1300, is_shared=True) as sequence,
    ):
        sequence.extend(text.ids[1300:])
        assert sequence.settle() > 10
        lose_lease(daemon, pool)
        admin.flush(None, None)
        with sequence_of(other, Text(20, 1300), EVERYTHING, 1300, is_shared=True) as taker:  # takes the slots
            taker.settle()
            if not is_back:
                with pytest.raises(SequenceLost):
                    text.append_to(sequence, 1700, step=10)
            with sequence_of(other, text, EVERYTHING, 1700, is_shared=True) as again:
                again.settle()
                if is_back:
                    text.append_to(sequence, 1700)
                    sequence.settle()
                for layer in range(LAYOUT.layers):
                    found = (sequence if is_back else again).attend(layer, text.query)
                    np.testing.assert_allclose(found, text.exact(layer, 1700), atol=2e-5)


def test_nothing_is_saved_before_it_is_full(pool: kv.Pool, module_daemon: Daemon) -> None:
    config = SparseConfig(128, 64, 1.0, 64, dense_boundary=0, offload_boundary=0)
    text = Text(21, 400)
    with SparseSequence(pool, config, tokens=text.ids[:300], threads=1) as sequence:
        assert sequence.settle() == 0
        text.append_to(sequence, 300, step=10)
        sequence.settle()
        np.testing.assert_allclose(sequence.attend(0, text.query), text.exact(0, 300), atol=2e-5)
    with (
        module_daemon.connect(layout=LAYOUT) as other,
        SparseSequence(other, config, tokens=text.ids[:300], threads=1) as again,
    ):
        text.append_to(again, 300)
        np.testing.assert_allclose(again.attend(1, text.query), text.exact(1, 300), atol=2e-5)


def test_a_fork_keeps_the_ids_of_tokens_that_are_still_to_come(pool: kv.Pool) -> None:
    config = SparseConfig(0, 96, 1.0, 64, dense_boundary=0, offload_boundary=0)
    text, answer = Text(22, 600), tokens_of(23, 200)
    with SparseSequence(pool, config, tokens=text.ids[:300], threads=1) as parent:
        child = parent.fork()
    text.append_to(child, 300)
    child.extend(answer)
    text.append_to(child, 500)
    child.settle()
    assert pool.lookup(pool.keys(answer)).chunks == 0
    assert (
        pool.lookup(pool.keys(np.concatenate([text.ids[:300], answer]))).chunks == child.stats()["chunks_in_arena"] > 4
    )
    child.close()


def test_a_sequence_that_is_dropped_gives_its_lease_back(pool: kv.Pool, module_daemon: Daemon) -> None:
    text = Text(24, 1000)
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "those of other tests have ended")
    sequence = SparseSequence(pool, CONFIG, threads=1)
    text.append_to(sequence, 1000)
    assert sequence.settle() > 0
    child = sequence.fork()
    del sequence
    assert module_daemon.stats()["leases"] == 1
    del child
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "the last one has given it back")


def test_a_forked_process_has_no_sequences(pool: kv.Pool) -> None:
    text = Text(25, 1000)
    with sequence_of(pool, text, CONFIG, 1000) as sequence:
        sequence.settle()
        child = os.fork()
        if not child:
            try:
                sequence.attend(0, text.query)
            except kv.KVPoolError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        np.testing.assert_allclose(sequence.attend(0, text.query), text.exact(0, 1000), atol=0.6)


def test_more_query_heads_than_the_kernels_take_are_refused(pool: kv.Pool) -> None:
    text = Text(26, 100)
    with sequence_of(pool, text, CONFIG, 100) as sequence, pytest.raises(kv.InvalidArgument, match="at most 16 times"):
        sequence.attend(0, np.zeros((34, LAYOUT.head_dim), np.float32))


def test_a_call_that_ended_in_the_middle_is_the_last_one(pool: kv.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(41, 900)
    with sequence_of(pool, text, CONFIG, 600) as sequence:
        with monkeypatch.context() as patched:
            patched.setattr(Page, "use_own_summaries", _without_memory)
            with pytest.raises(MemoryError):
                text.append_to(sequence, 900)
        for call in (lambda: sequence.attend(0, text.query), sequence.settle, sequence.fork):
            with pytest.raises(kv.KVPoolError, match="an earlier call ended in the middle"):
                call()
    sequence.close()


def _without_memory(*args: object, **kwargs: object) -> None:
    raise MemoryError


def test_tokens_whose_ids_never_come_are_offloaded_under_keys_of_their_own(pool: kv.Pool) -> None:
    text = Text(42, 2400)
    with SparseSequence(pool, CONFIG, tokens=text.ids[:300], threads=2) as sequence:
        text.append_to(sequence, 1800)
        assert sequence.settle() == due_chunks(1800)
        assert sequence.own_bytes <= 6 * LAYOUT.chunk_bytes * 1.5
        assert pool.lookup(pool.keys(text.ids)).chunks == 300 // LAYOUT.chunk_tokens
        with sequence.fork() as fork:
            sequence.extend(text.ids[300:1800])  # too late: nobody finds them
            for each in (sequence, fork):
                text.append_to(each, 2400)
                assert each.settle() == due_chunks(2400)
                for layer in range(LAYOUT.layers):
                    keys, values = each.dense(layer)
                    for part, whole in ((keys, text.keys), (values, text.values)):
                        np.testing.assert_array_equal(np.asarray(part), whole[layer, :2400].transpose(1, 0, 2))
        assert pool.lookup(pool.keys(text.ids)).chunks == 300 // LAYOUT.chunk_tokens
