"""A daemon that is killed anywhere under four engines: no wrong byte, no acknowledged chunk missing, no slot lost for good."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.rigs.batches import batches
from tests.faults.rigs.kept.keepers import KEPT, end_keeper, keeper_of
from tests.faults.rigs.kept.lives import Lives
from tests.faults.rigs.kept.prompts import all_prompts
from tests.faults.rigs.workload import CHAIN, chain_tokens
from tests.rigs.daemon import SMALL, Start, wait_connected
from tests.rigs.payload import assert_right_bytes, load_all, store

# Of everything that the engines save: room for all of it and for what nobody may use yet, or for a part, also with an SSD tier.
ROOM = {"all": 3.0, "a part": 0.3, "over a disk": 0.3}
DISK = {"ssd__capacity": "64MiB", "ssd__checkpoint_interval": "100ms"}


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("kills", [pytest.param(6, id="some"), *batches(25, of=350)])
def test_all_that_was_visible_at_a_kill_is_there_afterwards(
    start_daemon: Start, tmp_path: Path, seed: int, summary: Callable[[str], None], kills: int, room: str
) -> None:
    lives = _lives(start_daemon, tmp_path, seed, room, survives=True)
    _live(lives, kills, summary)
    assert lives.tally.checked > 0, "chunks outlived kills"


@pytest.mark.slow
@pytest.mark.parametrize("room", ["all", "a part"])
@pytest.mark.parametrize("kills", [pytest.param(4, id="some"), *batches(25, of=50)])
def test_a_daemon_without_kept_memory_begins_empty(
    start_daemon: Start, tmp_path: Path, seed: int, summary: Callable[[str], None], kills: int, room: str
) -> None:
    _live(_lives(start_daemon, tmp_path, seed, room, survives=False), kills, summary)


@pytest.mark.parametrize("is_keeper_first", [False, True], ids=["daemon first", "keeper first"])
def test_without_its_keeper_a_killed_daemon_begins_empty_and_is_kept_again(
    start_daemon: Start, is_keeper_first: bool
) -> None:
    daemon = start_daemon(**KEPT)
    with daemon.connect() as pool:
        keys = pool.keys(chain_tokens(1))
        assert store(pool, keys).stored == CHAIN
        keeper = keeper_of(daemon)
        if is_keeper_first:
            end_keeper(keeper)
        daemon.kill()
        end_keeper(keeper)
        daemon.start()
        assert daemon.info()["dram_began"].startswith("empty: ")
        assert daemon.stats()["dram.chunks"] == 0
        assert daemon.problems() == []
        wait_connected(pool)
        assert pool.lookup(keys).chunks == 0
        assert store(pool, keys).stored == CHAIN
        keeper = keeper_of(daemon)
        daemon.kill()
        daemon.start()
    with daemon.connect() as pool:
        result, into = load_all(pool, keys)
        assert result.chunks == CHAIN
        assert_right_bytes(keys, SMALL, result, into)
    assert daemon.problems() == []
    end_keeper(keeper)


def _lives(start_daemon: Start, folder: Path, seed: int, room: str, *, survives: bool) -> Lives:
    capacity = int(ROOM[room] * sum(prompts.payload_bytes for prompts in all_prompts()))
    options = {"dram__capacity": f"{capacity}B", "dram__segment": "512KiB", "server__stop_timeout": "1s"}
    has_disk = room == "over a disk"
    if has_disk:
        options |= {"ssd__path": str(folder / "ssd"), **DISK}
    daemon = start_daemon(**options, **(KEPT if survives else {}))
    return Lives(daemon, folder, seed, survives=survives, evicts=room != "all", has_disk=has_disk)


def _live(lives: Lives, kills: int, summary: Callable[[str], None]) -> None:
    with lives:
        while lives.tally.kills.total() < kills:
            lives.end_one()
        lives.finish()
    tally = lives.tally
    summary(
        f"kills {dict(tally.kills)}, {tally.visible} chunks visible at them, {tally.checked} loaded right afterwards, "
        f"at most {tally.withheld_max} slots withheld"
    )
    assert tally.visible > 0, "the engines have saved"
