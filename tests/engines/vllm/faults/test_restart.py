"""A restart of the daemon, after which the SSD tier alone has the chunks: the engine loads them from there."""

from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Plain, Survivor, counted, wait_on_disk, wait_restored, wait_stored
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_an_engine_loads_from_ssd_what_was_stored_before_the_daemon_ended(
    end: str, survivor: Survivor, tmp_path: Path, plain: Plain
) -> None:
    asked = prompts(first=1000)
    expected = plain(GROUPED).tokens(asked, 16)
    options = {"ssd.path": str(tmp_path / "ssd"), "ssd.capacity": "64MiB", "ssd.write_through": "true"}
    with survivor.daemon(**options) as daemon:
        assert survivor.engine.tokens(asked, 16) == expected
        wait_stored(daemon, loadable_tokens(asked))
        chunks = int(daemon.stats()["dram.chunks"])
        wait_on_disk(daemon, chunks)
        if end == "stopped":
            assert daemon.stop() == 0
        else:
            daemon.kill()
        daemon.start()
        wait_restored(daemon, chunks)
        survivor.wait_served(daemon)
        assert daemon.stats()["dram.chunks"] == 0
        before = counted(survivor.engine, "loaded_chunks")
        assert survivor.engine.tokens(asked, 16) == expected
        assert (counted(survivor.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(asked)
        assert not daemon.problems()
