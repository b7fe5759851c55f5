"""A daemon that is killed anywhere under four engines: no wrong byte, no acknowledged chunk missing, no slot lost for good."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.rigs.batches import batches
from tests.faults.rigs.kept.lives import Lives
from tests.faults.rigs.kept.prompts import all_prompts
from tests.faults.rigs.workload import CHAIN, chain_tokens
from tests.rigs.daemon import SMALL, Daemon, wait_connected
from tests.rigs.kept_daemon import KeptDaemon
from tests.rigs.payload import assert_right_bytes, load_all, store

# Of everything that the engines save: room for all of it and for what nobody may use yet, or for a part, also with an SSD tier.
ROOM = {"all": 6.0, "a part": 0.3, "over a disk": 0.3}
DISK = {"ssd.capacity": "256MiB", "ssd.checkpoint_interval": "100ms"}


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("kills", [pytest.param(6, id="some"), *batches(25, of=350)])
def test_all_that_was_visible_at_a_kill_is_there_afterwards(
    tmp_path: Path, seed: int, summary: Callable[[str], None], kills: int, room: str
) -> None:
    with KeptDaemon(tmp_path, **_options(room, tmp_path)) as daemon:
        lives = Lives(daemon, tmp_path, seed, survives=True, evicts=room != "all", has_disk=room == "over a disk")
        _live(lives, kills, summary)
    assert lives.tally.checked > 0, "chunks outlived kills"


@pytest.mark.slow
@pytest.mark.parametrize("room", ["all", "a part"])
@pytest.mark.parametrize("kills", [pytest.param(4, id="some"), *batches(25, of=50)])
def test_a_daemon_without_kept_memory_begins_empty(
    tmp_path: Path, seed: int, summary: Callable[[str], None], kills: int, room: str
) -> None:
    with Daemon(tmp_path, **_options(room, tmp_path)) as daemon:
        _live(Lives(daemon, tmp_path, seed, survives=False, evicts=room != "all"), kills, summary)


@pytest.mark.parametrize("is_keeper_first", [False, True], ids=["daemon first", "keeper first"])
def test_without_its_keeper_a_killed_daemon_begins_empty_and_is_kept_again(
    tmp_path: Path, is_keeper_first: bool
) -> None:
    daemon = KeptDaemon(tmp_path)
    with daemon, daemon.connect() as pool:
        keys = pool.keys(chain_tokens(1))
        assert store(pool, keys).stored == CHAIN
        keeper = daemon.keeper_of_running
        if is_keeper_first:
            os.kill(keeper.pid, signal.SIGKILL)
        daemon.kill()
        if not is_keeper_first:
            os.kill(keeper.pid, signal.SIGKILL)
        daemon.wait_keeper_ended(keeper)
        daemon.start()
        assert daemon.began().startswith("empty: ")
        assert daemon.stats()["dram.chunks"] == 0
        assert daemon.problems() == []
        wait_connected(pool)
        assert pool.lookup(keys).chunks == 0
        assert store(pool, keys).stored == CHAIN
        daemon.kill()
        daemon.start()
        with daemon.connect() as again:
            result, into = load_all(again, keys)
            assert result.chunks == CHAIN
            assert_right_bytes(keys, SMALL, result, into)
        assert daemon.problems() == []


def _options(room: str, folder: Path) -> dict[str, str]:
    """Of a daemon with such room."""
    capacity = int(ROOM[room] * sum(prompts.payload_bytes for prompts in all_prompts()))
    options = {"dram.capacity": f"{capacity}B", "dram.segment": "512KiB", "server.stop_timeout": "1s"}
    return {**options, "ssd.path": str(folder / "ssd"), **DISK} if room == "over a disk" else options


def _live(lives: Lives, kills: int, summary: Callable[[str], None]) -> None:
    with lives:
        while lives.tally.kills.total() < kills:
            lives.end_one()
        lives.finish()
    tally = lives.tally
    summary(
        f"kills {dict(tally.kills)}, {tally.visible} chunks visible at them, {tally.checked} loaded right afterwards, "
        f"{tally.retained} with a priority of their own, at most {tally.withheld_max} slots withheld"
    )
    assert tally.visible > 0, "the engines have saved"
