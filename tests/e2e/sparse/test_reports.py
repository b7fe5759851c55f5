"""Compute by lookup as operators see it: what sequences did, in the metrics and statistics of a real daemon."""

from dataclasses import astuple

import pytest

import kvpool_client as kv
from kvpool.protocol.records import messages as m
from kvpool.usage import MASS_UNIT, SPARSE_COUNTS, SparseUsage
from kvpool_sparse import SequenceLost, SparseSequence
from kvpool_sparse.tally import Tally
from tests.rigs.daemon import Daemon, Start, wait_until
from tests.rigs.metrics import METERED, samples_of
from tests.rigs.sparse_text import CONFIG, LAYOUT, Text, end_connection_of, lose_lease, sequence_of

TOKENS = 900


@pytest.fixture
def measured(start_daemon: Start) -> Daemon:
    """A daemon with metrics."""
    return start_daemon(**METERED)


def sparse_metrics(daemon: Daemon) -> dict[str, float]:
    """Samples about compute by lookup, by name and labels without what all begin with."""
    begin = "kvpool_sparse_"
    return {name.removeprefix(begin): value for name, value in samples_of(daemon).items() if name.startswith(begin)}


def wait_for(daemon: Daemon, name: str, value: float) -> dict[str, float]:
    wait_until(lambda: sparse_metrics(daemon).get(name) == value, f"{name} is {value}")
    return sparse_metrics(daemon)


def steps_of(sequence: SparseSequence, text: Text) -> None:
    """A step of each layer in both ways."""
    for layer in range(LAYOUT.layers):
        sequence.attend(layer, text.query)
        sequence.fetch(layer, sequence.recall(layer, text.query).blocks)


def test_what_sequences_did_appears_by_model(measured: Daemon) -> None:
    text = Text(1, TOKENS)
    with measured.connect(layout=LAYOUT, model="long") as pool, measured.connect(layout=LAYOUT, model="short") as other:
        with sequence_of(pool, text, CONFIG, TOKENS) as one, sequence_of(pool, text, CONFIG, TOKENS) as two:
            child = two.fork()
            for sequence in (one, two, child):
                steps_of(sequence, text)
            child.close()
            done = [sequence.tally.since(Tally()) for sequence in (one, two, child)]
        with sequence_of(other, text, CONFIG, CONFIG.dense_boundary - 1) as dense:
            dense.attend(0, text.query)
        wanted = SparseUsage(*(sum(counts) for counts in zip(*map(astuple, done), strict=True)))
        assert wanted.recalls == 3 * 2 * LAYOUT.layers
        found = wait_for(measured, 'recalls_total{model="long"}', wanted.recalls)
        mass = found.pop('kept_mass_total{model="long"}')
        assert mass == pytest.approx(wanted.kept_mass_millionths / MASS_UNIT, abs=1e-5)
        assert 0 < mass <= wanted.query_heads
        for name in set(SPARSE_COUNTS) - {"kept_mass_millionths"}:  # those of devices are 0
            assert found[f'{name}_total{{model="long"}}'] == getattr(wanted, name), name
        assert not [name for name in found if "short" in name and found[name] and not name.startswith("built_")]
        stats = measured.stats()
        assert stats["sparse.recalls"] == wanted.recalls
        assert stats["sparse.recalled_share"] == round(wanted.recalled_blocks / wanted.middle_blocks, 4)
        assert stats["sparse.kept_mass"] == pytest.approx(mass / wanted.query_heads, abs=1e-4)
        assert stats["usage.clamped_values"] == 0


def test_sequences_that_lost_their_chunks_or_their_lease_are_counted(measured: Daemon) -> None:
    text, model = Text(3, 1300), '{model="test-model"}'
    with measured.connect(layout=LAYOUT) as pool, measured.admin() as admin:
        with sequence_of(pool, text, CONFIG, 1300) as sequence:
            end_connection_of(pool)
            wait_until(lambda: pool.connected, "the pool has connected again")
            sequence.attend(0, text.query)
            lose_lease(measured, pool)
            admin.flush(None, None)
            with pytest.raises(SequenceLost):
                sequence.attend(0, text.query)
            leased_again = sequence.stats()["reattached"]
        assert (
            wait_for(measured, f"lost_sequences_total{model}", 1)[f"reattached_sequences_total{model}"] == leased_again
        )


def notify(pool: kv.Pool, column: bytes) -> None:
    session = pool._link.session
    assert session is not None
    assert session.notify(m.Usage(column))
