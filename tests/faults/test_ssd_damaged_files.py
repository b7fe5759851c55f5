"""Truncated, missing and replaced files of the tier: the daemon goes on, and lost chunks are misses."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.rigs.damage import PAGE_BYTES, replace_with
from tests.faults.rigs.tiered import (
    CAPACITY,
    assert_sound,
    directory_bytes,
    is_dead,
    restart,
    tier_options,
)
from tests.faults.rigs.traffic import DramClient, chain_of, fill, load_chains
from tests.rigs.daemon import Daemon, Start, wait_connected, wait_until
from tests.rigs.payload import store

CHAINS = 60
LENGTHS = ("90%", "50%", "10%", "0", "1", "4095", "4097", "8192", "12289", "all but 1", "all but 4096")
KINDS = ("nothing", "directory", "symlink", "dangling", "fifo", "text", "empty")
# Names in the tier's directory, and the kinds of damage that the tier repairs by itself.
PLACES = {
    "catalogue/data.mdb": KINDS,
    "catalogue": KINDS,
    "segment-000003.kvs": ("nothing", "text", "empty"),
    "lock": ("nothing", "fifo", "text", "empty"),
}
QUICK = {
    "all but 4096-catalogue/data.mdb",
    "dangling-catalogue/data.mdb",
    "fifo-catalogue/data.mdb",
    "90%-catalogue/data.mdb",
    "0-segment-000003.kvs",
    "text-catalogue",
}


def _cases(values: tuple[str, ...], places: tuple[str, ...]) -> list[object]:
    names = [(value, place, f"{value}-{place}") for place in places for value in values]
    return [
        pytest.param(value, place, marks=() if name in QUICK else (pytest.mark.campaign,), id=name)
        for value, place, name in names
    ]


def _length(text: str, size: int) -> int:
    if text.endswith("%"):
        return size * int(text[:-1]) // 100
    return size - int(text.removeprefix("all but ")) if text.startswith("all but ") else int(text)


@pytest.fixture
def filled(start_daemon: Start, tmp_path: Path) -> Daemon:
    """A daemon that was killed with every chain on disk."""
    daemon = start_daemon(**tier_options(tmp_path / "ssd"))
    daemon.wait_open()
    fill(daemon, CHAINS)
    daemon.kill()
    return daemon


def _expect_dram_serves(daemon: Daemon) -> None:
    with DramClient(daemon, first_chain=5000) as client:
        client.turn()


def _expect_healed(daemon: Daemon, path: Path) -> None:
    """The tier works and keeps its chunks over another restart."""
    daemon.wait_open()
    with daemon.admin() as admin:
        admin.flush(None, None)
    fill(daemon, CHAINS)
    daemon.kill()
    restart(daemon)
    assert load_chains(daemon, CHAINS).missed == 0
    assert directory_bytes(path) <= CAPACITY
    assert_sound(daemon)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "place"),
    [*_cases(LENGTHS, ("catalogue/data.mdb", "segment-000003.kvs")), *_cases(KINDS, tuple(PLACES))],
)
def test_a_file_that_ends_too_soon_or_is_of_another_kind_costs_misses(
    filled: Daemon, tmp_path: Path, damage: str, place: str
) -> None:
    path = tmp_path / "ssd"
    if damage in LENGTHS:
        os.truncate(path / place, _length(damage, (path / place).stat().st_size))
    else:
        replace_with(path / place, damage)
    restart(filled)
    _expect_dram_serves(filled)
    load_chains(filled, CHAINS)
    assert not is_dead(filled), filled.log()
    for outside in tmp_path.glob("outside-*"):
        assert outside.read_bytes() == b"not yours" * 1000
    if damage in LENGTHS or damage in PLACES[place]:
        _expect_healed(filled, path)
        return
    info = filled.info()
    assert info["ssd_state"] == "offline"
    assert place in info["ssd_reason"] or str(path) in info["ssd_reason"]


@pytest.mark.slow
def test_segment_files_cut_and_removed_under_a_daemon_cost_misses(
    start_daemon: Start, tmp_path: Path, seed: int, summary: Callable[[str], None]
) -> None:
    dice = random.Random(seed)
    path = tmp_path / "ssd"
    daemon = start_daemon(**tier_options(path))
    daemon.wait_open()
    fill(daemon, CHAINS)
    segments = sorted(path.glob("segment-*.kvs"))
    segments[0].unlink()
    os.truncate(segments[1], 0)
    os.truncate(segments[2], dice.randrange(segments[2].stat().st_size))
    found = load_chains(daemon, CHAINS)
    assert found.missed > 0
    with daemon.connect(timeout_s=10.0) as pool, daemon.admin() as admin:
        wait_connected(pool)
        store(pool, chain_of(pool, CHAINS))
        assert not admin.demote_all(10.0)["durable"], "a restart would not find what is in the removed file"
        wait_until(
            lambda: any(f"{segments[0]} has been removed" in one for one in daemon.problems(deep=False)), "it is shown"
        )
    load_chains(daemon, CHAINS)
    assert_sound(daemon)
    summary(f"{found.served} chunks served, {found.missed} missed")
    daemon.kill()
    restart(daemon)
    load_chains(daemon, CHAINS)
    _expect_healed(daemon, path)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_catalogue_removed_or_replaced_under_a_daemon_is_not_durable_and_rebuilt(
    start_daemon: Start, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "ssd"
    daemon = start_daemon(**tier_options(path))
    daemon.wait_open()
    shutil.copytree(path / "catalogue", tmp_path / "older")
    fill(daemon, CHAINS)
    (path / "catalogue").rename(tmp_path / "elsewhere")
    if how == "replaced":
        shutil.copytree(tmp_path / "older", path / "catalogue")
    with daemon.admin() as admin:
        assert not admin.demote_all(10.0)["durable"]
    assert daemon.stop() == 0
    assert "durable: no" in daemon.log()
    restart(daemon)
    daemon.wait_open()
    assert load_chains(daemon, CHAINS).missed == 0, "it is rebuilt from the slots"
    assert_sound(daemon)


@pytest.mark.slow
def test_a_catalogue_damaged_under_a_daemon_is_made_anew(start_daemon: Start, tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    daemon = start_daemon(**tier_options(path))
    daemon.wait_open()
    fill(daemon, CHAINS)
    with (path / "catalogue" / "data.mdb").open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(2 * PAGE_BYTES)
        file.write(bytes(size - 2 * PAGE_BYTES))
    with DramClient(daemon, first_chain=6000) as client, daemon.admin() as admin:
        client.turn()
        # It depends on the first damaged page: the catalogue is made anew under the tier, or the tier closes and opens again.
        wait_until(lambda: admin.demote_all(10.0)["left"] == 0, "the tier has every chunk")
    wait_until(lambda: daemon.stats()["ssd.waiting_rows"] == 0, "the catalogue is written")
    load_chains(daemon, CHAINS)
    assert not is_dead(daemon), daemon.log()
    assert daemon.stats()["ssd.state"] == "ok"
    daemon.kill()
    restart(daemon)
    load_chains(daemon, CHAINS)
    _expect_healed(daemon, path)
