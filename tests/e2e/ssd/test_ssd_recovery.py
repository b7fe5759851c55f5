"""Start of a daemon on an SSD directory that is damaged, lost, foreign or missing: chunks found again, or misses."""

import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

import kvpool_native
from kvpool.tiers.ssd.catalogue import opening as catalogue_open
from tests.e2e.ssd.conftest import STORED
from tests.rigs.daemon import SMALL, Daemon, Start, wait_until
from tests.rigs.payload import store, tokens_of
from tests.rigs.tiered_chains import CHAIN, chains, load_right, store_whole

PAGE_BYTES = 4096


def found_after_start(daemon: Daemon, *arguments: str) -> int:
    """Chunks that a fresh life serves, each compared with its key."""
    daemon.start(*arguments)
    daemon.wait_open()
    with daemon.connect(timeout_s=20.0) as pool:
        found = sum(load_right(pool, keys).chunks for keys in chains(pool, STORED))
        store_whole(pool, chains(pool, STORED + 1)[-1])
    assert daemon.problems() == []
    return found


def generations_on_disk(ssd: Path) -> set[int]:
    """The generation of every slot that has a header, known to the catalogue or not."""
    found = set()
    for file in ssd.glob("segment-*.kvs"):
        content = file.read_bytes()
        for at in range(0, len(content), kvpool_native.SSD_HEADER_BYTES):
            if content.startswith(b"KVPSLOT1", at):
                header = kvpool_native.decode_ssd_header(content[at : at + kvpool_native.SSD_HEADER_BYTES])
                assert header is not None
                found.add(header.generation)
    return found


def test_no_generation_is_reused_after_a_life_that_left_no_rows(stopped: Daemon, ssd: Path, tmp_path: Path) -> None:
    """A power cut before the first checkpoint: slots have been written, and the catalogue is unchanged since its opening."""
    before = generations_on_disk(ssd)
    given: list[set[int]] = []
    for seed in (50, 60):
        stopped.start("--set=ssd.checkpoint_interval=1h")
        wait_until(lambda: stopped.stats()["ssd.checkpoints"] == 1, "the catalogue is open")
        stopped.wait_open()
        shutil.copytree(ssd / "catalogue", tmp_path / str(seed))
        with stopped.connect() as pool, stopped.admin() as admin:
            keys = pool.keys(tokens_of(seed, CHAIN * SMALL.chunk_tokens))
            assert store(pool, keys).stored == CHAIN
            assert admin.demote_all(60.0)["left"] == 0
        stopped.kill()
        shutil.rmtree(ssd / "catalogue")
        shutil.copytree(tmp_path / str(seed), ssd / "catalogue")
        given.append(generations_on_disk(ssd) - before)
        before |= given[-1]
        assert len(given[-1]) == CHAIN, "all of them are new"


def test_a_lost_catalogue_is_rebuilt_from_headers_once(stopped: Daemon, ssd: Path) -> None:
    shutil.rmtree(ssd / "catalogue")
    for _ in range(2):
        assert found_after_start(stopped) == STORED * CHAIN
        assert stopped.stop() == 0
    assert stopped.log().count("rebuilt from the headers") == 1


def cut(file: Path, size: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(size)


def segment(ssd: Path, number: int) -> Path:
    return sorted(ssd.glob("segment-*.kvs"))[number]


def cut_catalogue(ssd: Path) -> None:
    cut(ssd / "catalogue" / "data.mdb", 4 * PAGE_BYTES)  # most of it is room that has no row yet


def lose_identity(ssd: Path) -> None:
    (ssd / "identity").unlink()


def lose_both(ssd: Path) -> None:
    shutil.rmtree(ssd / "catalogue")
    lose_identity(ssd)


def tear_a_header(ssd: Path) -> None:
    shutil.rmtree(ssd / "catalogue")
    with segment(ssd, 0).open("r+b") as file:
        file.seek(100)
        file.write(b"torn")


def take_anothers_catalogue(ssd: Path) -> None:
    shutil.rmtree(ssd / "catalogue")
    with lmdb.open(str(ssd / "catalogue")) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"somebody's", b"data")


ALL = STORED * CHAIN


@pytest.mark.parametrize(
    ("damage", "arguments", "found", "is_there", "logged"),
    [
        pytest.param(cut_catalogue, [], range(ALL, ALL + 1), "catalogue.bad", "", marks=pytest.mark.slow),
        pytest.param(None, ["--rebuild"], range(ALL, ALL + 1), "identity", "rebuilt from the headers"),
        pytest.param(lose_identity, [], range(ALL, ALL + 1), "identity", ""),
        pytest.param(lose_both, [], range(1), "identity", ""),
        pytest.param(tear_a_header, [], range(ALL - CHAIN, ALL), "identity", ""),
        pytest.param(take_anothers_catalogue, [], range(ALL, ALL + 1), "catalogue.bad/data.mdb", ""),
        pytest.param(lambda ssd: cut(segment(ssd, 1), 4096), [], range(1, ALL), "identity", "it begins empty"),
    ],
    ids=["cut catalogue", "rebuild", "no identity", "neither", "torn header", "another's catalogue", "cut segment"],
)
def test_damage_costs_the_chunks_that_nothing_describes_any_more(
    stopped: Daemon,
    ssd: Path,
    damage: Callable[[Path], None] | None,
    arguments: list[str],
    found: range,
    is_there: str,
    logged: str,
) -> None:
    if damage is not None:
        damage(ssd)
    assert found_after_start(stopped, *arguments) in found
    assert (ssd / is_there).exists()
    assert logged in stopped.log()


def test_a_newer_format_is_refused_and_left_alone(stopped: Daemon, ssd: Path) -> None:
    with lmdb.open(str(ssd / "catalogue"), max_dbs=4) as environment:
        meta = environment.open_db(b"meta")
        newer = catalogue_open.meta_record(bytes(16), catalogue_open.FORMAT_VERSION + 1)
        with environment.begin(write=True) as transaction:
            transaction.put(catalogue_open.META_KEY, newer, db=meta)
    before = {file: file.stat().st_mtime_ns for file in ssd.glob("segment-*.kvs")}
    stopped.start()
    wait_until(lambda: stopped.stats()["ssd.state"] == "offline", "the tier refuses")
    with stopped.admin() as admin:
        assert "this version of kvpool reads up to" in str(admin.info()["ssd_reason"])
    with stopped.connect() as pool:
        keys = chains(pool, 1)[0]
        assert store(pool, keys).stored == CHAIN
        assert load_right(pool, keys).chunks == CHAIN
    assert {file: file.stat().st_mtime_ns for file in ssd.glob("segment-*.kvs")} == before


def test_a_catalogue_of_another_program_is_set_aside(stopped: Daemon, ssd: Path) -> None:
    shutil.rmtree(ssd / "catalogue")
    with lmdb.open(str(ssd / "catalogue")) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"somebody's", b"data")
    assert found_after_start(stopped) == STORED * CHAIN
    assert (ssd / "catalogue.bad" / "data.mdb").exists()


def test_a_directory_that_appears_later_is_used_and_gets_what_a_lease_had_kept_when_that_ends(
    start_daemon: Start, tmp_path: Path
) -> None:
    blocked = tmp_path / "mount"
    blocked.write_text("not mounted yet")
    daemon = start_daemon(ssd__path=str(blocked / "ssd"), ssd__capacity="64MiB", ssd__write_through="true")
    wait_until(lambda: daemon.stats()["ssd.state"] == "offline", "the tier cannot be opened")
    with daemon.connect() as pool:
        keys = chains(pool, 1)[0]
        assert store(pool, keys).stored == CHAIN
        with pool.acquire(pool.lookup(keys)):
            blocked.unlink()
            blocked.mkdir()
            daemon.wait_open()
            assert daemon.stats()["ssd.chunks"] == 0
        wait_until(lambda: daemon.stats()["ssd.chunks"] == CHAIN, "all chunks are on disk")
    assert daemon.stop() == 0


def test_a_directory_in_use_is_refused_and_left_alone(start_daemon: Start, stopped: Daemon, ssd: Path) -> None:
    stopped.start()
    stopped.wait_open()
    other = start_daemon(ssd__path=str(ssd), ssd__capacity="32MiB")
    wait_until(lambda: other.stats()["ssd.state"] == "offline", "the second daemon gives up")
    with other.admin() as admin:
        assert "another daemon uses this directory" in str(admin.info()["ssd_reason"])
    with stopped.connect(timeout_s=20.0) as pool:
        assert sum(load_right(pool, keys).chunks for keys in chains(pool, STORED)) == STORED * CHAIN
    assert stopped.problems() == []


def test_a_truncated_file_costs_only_its_own_chunks(stopped: Daemon, ssd: Path) -> None:
    second = sorted(ssd.glob("segment-*.kvs"))[1]
    with second.open("r+b") as file:
        file.truncate(4096)
    assert 0 < found_after_start(stopped) < STORED * CHAIN
    assert "it begins empty" in stopped.log()


def test_another_capacity_begins_the_tier_anew(start_tiered: Start, stopped: Daemon, ssd: Path) -> None:
    other = start_tiered(ssd__capacity="32MiB", ssd__segment="1MiB")
    assert other.stats()["ssd.chunks"] == 0
    assert "the ssd tier begins empty" in other.log()
    assert sum(file.stat().st_size for file in ssd.glob("segment-*")) <= 32 << 20


@pytest.mark.parametrize("point", ["daemon.ssd.look", "daemon.ssd.open_catalogue"])
def test_a_stop_while_the_tier_is_being_opened_writes_down_what_was_stored(
    stopped: Daemon, ssd: Path, point: str
) -> None:
    stopped.environment = {"KVPOOL_FAILPOINT": f"{point}:*:delay(1s)"}
    stopped.start()
    with stopped.connect(timeout_s=20.0) as pool:
        keys = pool.keys(tokens_of(70, CHAIN * SMALL.chunk_tokens))
        assert store(pool, keys).stored == CHAIN
    assert stopped.stop() == 0
    assert f"{CHAIN} chunks written down, 0 dropped with the DRAM tier, durable: yes" in stopped.log()
    stopped.environment = {}
    stopped.start()
    stopped.wait_open()
    with stopped.connect(timeout_s=20.0) as pool:
        assert load_right(pool, pool.keys(tokens_of(70, CHAIN * SMALL.chunk_tokens))).chunks == CHAIN
