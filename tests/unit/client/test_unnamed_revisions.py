"""Models that are connected without a revision: one line in the log of a process for each."""

import logging

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL
from tests.rigs.fake_pool import AWAY


def _connect(model: str, revision: str = "") -> None:
    kv.connect(AWAY, model=model, revision=revision, layout=SMALL).close()


def test_a_model_without_a_revision_is_one_warning_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvpool_client.pool"):
        for model in ("unnamed-draft", "unnamed-target", "unnamed-draft", "unnamed-target"):
            _connect(model)
        _connect("named-draft", "5f0b02c")
        _connect("named-target@5f0b02c")
    lines = [record.getMessage() for record in caplog.records if record.name == "kvpool_client.pool"]
    assert [line.split(":")[0] for line in lines] == [
        f"model 'unnamed-{role}' is connected without a revision" for role in ("draft", "target")
    ]
    assert all("expected connect(revision=…)" in line for line in lines)
