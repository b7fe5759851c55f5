"""Each situation of which operators must hear, made by daemons, fires its alert and no other, by Prometheus' own evaluation.

The metrics of a daemon before and in a situation are series of an hour: ten minutes of the first, then the second, with
counters that go on growing as they did between the two.
"""

import errno
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import kvpool_client as kv
from tests.faults.rigs.fault_filesystem import FaultFilesystem
from tests.faults.rigs.tiered import tier_options
from tests.faults.rigs.traffic import chain_of
from tests.rigs.daemon import SMALL, Daemon, Start, wait_connected, wait_until
from tests.rigs.payload import load_all, store, tokens_of
from tests.rigs.runs.ports import free_port

RULES = Path(__file__).parents[2] / "configs" / "kvpool-alerts.yml"
BEFORE_MIN, WHOLE_MIN, LOOK_MIN = 10, 60, 40
FLAP_MIN = 3
FEW_LOADS = 20

# The series of a page, by name with labels, and whether each is a counter.
Page = dict[str, tuple[float, bool]]

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


def _page(daemon: Daemon, address: str = "") -> Page:
    """The metrics of this moment, as a scraper has them: not those that a scrape just before has left. `address`: theirs, where
    the daemon has no connection to spare for the question."""
    uptime, address = 'kvpool_uptime_seconds{instance="n",job="kvpool"}', address or daemon.info()["metrics"]
    first = _scrape(address)[uptime]
    wait_until(lambda: _scrape(address)[uptime] != first, "the page is made anew")
    return _scrape(address)


def _scrape(address: str) -> Page:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    page: Page = {"up": (1.0, False)}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = "".join(f',{name}="{value}"' for name, value in sample.labels.items())
            is_counter = family.type in ("counter", "histogram")
            page[f'{sample.name}{{instance="n",job="kvpool"{labels}}}'] = (sample.value, is_counter)
    page['up{instance="n",job="kvpool"}'] = page.pop("up")
    return page


def _values(before: float, now: float, *, is_counter: bool, flaps: bool) -> str:
    values = [before] * BEFORE_MIN
    for minute in range(WHOLE_MIN - BEFORE_MIN):
        if is_counter:
            values.append(now + (now - before) * minute)
        else:
            values.append(before if flaps and minute // FLAP_MIN % 2 else now)
    return " ".join(f"{value:g}" for value in values)


def _fired(tmp_path: Path, before: Page, now: Page, *, flaps: bool = False) -> set[str]:
    """The alerts that fire half an hour into a situation."""
    series = [
        {
            "series": name,
            "values": _values(before.get(name, (0.0, False))[0], value, is_counter=is_counter, flaps=flaps),
        }
        for name, (value, is_counter) in now.items()
    ]
    look = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{LOOK_MIN}m", "exp_samples": []}
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [look]}
    file = tmp_path / "rules.test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "got:" in done.stderr + done.stdout, done.stderr
    return set(re.findall(r'alertname="(\w+)"', done.stderr + done.stdout))


@pytest.fixture
def metered(start_daemon: Start) -> Start:
    """Starts daemons with metrics."""

    def start(**options: str) -> Daemon:
        return start_daemon(server__metrics="127.0.0.1:0", **options)

    return start


def _used(daemon: Daemon, first: int = 1) -> None:
    """A save and a load, as on any day."""
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(first, 4 * SMALL.chunk_tokens))
        assert store(pool, keys).stored == 4
        assert load_all(pool, keys)[0].chunks == 4


def test_a_daemon_that_is_used_fires_nothing(tmp_path: Path, metered: Start) -> None:
    daemon = metered()
    _used(daemon)
    before = _page(daemon)
    _used(daemon, 2)
    assert _fired(tmp_path, before, _page(daemon)) == set()


def test_declined_saves(tmp_path: Path, metered: Start) -> None:
    daemon = metered(dram__connection_quota="0.000001")
    before = _page(daemon)
    with daemon.connect() as pool:
        for number in range(8):
            assert store(pool, pool.keys(tokens_of(number, 4 * SMALL.chunk_tokens))).declined == 4
    assert _fired(tmp_path, before, _page(daemon)) == {"KvpoolSavesDeclined"}


def test_refused_connections(tmp_path: Path, metered: Start) -> None:
    daemon = metered(server__max_connections="4")
    before, address = _page(daemon), daemon.info()["metrics"]
    with ExitStack() as pools, daemon.admin() as admin:
        for number in range(10):
            pools.enter_context(daemon.connect(model=f"model-{number}"))
        wait_until(lambda: int(admin.stats()["server"]["refused_connections"]) >= 6, "connections are refused")
        now = _page(daemon, address)
    assert _fired(tmp_path, before, now) == {"KvpoolConnectionsRefused"}


def test_loads_that_fall_short(tmp_path: Path, metered: Start) -> None:
    """An operator ends a connection that has leased what it then loads."""
    daemon = metered()
    _used(daemon)
    before = _page(daemon)
    with daemon.connect() as pool, daemon.admin() as admin:
        keys = pool.keys(tokens_of(1, 4 * SMALL.chunk_tokens))
        with pool.acquire(pool.lookup(keys)) as lease:
            (engine,) = (one for one in admin.connections()["connections"] if one["model"] == "test-model")
            assert admin.disconnect(int(engine["id"]))
            wait_until(lambda: _load(pool, lease).reason == "disconnected", "the connection has ended")
        wait_connected(pool)
        wait_until(lambda: _short_loads(_page(daemon)) > 0, "it is counted")
    assert _fired(tmp_path, before, _page(daemon)) == {"KvpoolLoadsFallShort"}


def _load(pool: kv.Pool, lease: kv.Lease) -> kv.LoadResult:
    return pool.load(lease, into=np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)).wait()


def _short_loads(page: Page) -> float:
    return sum(value for name, (value, _) in page.items() if name.startswith("kvpool_failed_loads_total"))


def test_a_peer_that_was_killed(tmp_path: Path, metered: Start) -> None:
    ports = free_port(), free_port()
    members = ", ".join(f"127.0.0.1:{port}" for port in ports)
    nodes = [
        metered(
            peer__listen=f"tcp://127.0.0.1:{port}",
            peer__stream="tcp://127.0.0.1:0",
            peer__name=name,
            peer__members=members,
        )
        for name, port in zip(("here", "there"), ports, strict=True)
    ]
    here, there = nodes
    wait_until(lambda: here.stats()["peer.links.ready"] == 1, "the two know each other")
    before = _page(here)
    there.kill()
    wait_until(lambda: here.stats()["peer.links.ready"] == 0, "the peer is away")
    assert _fired(tmp_path, before, _page(here)) == {"KvpoolPeerAway"}
    assert "peer there at 127.0.0.1:" in here.log()
    assert "the connection ended" in here.log()


def test_a_store_that_is_away(tmp_path: Path, metered: Start) -> None:
    daemon = metered(store__master="localhost:1")
    assert _fired(tmp_path, _page(daemon), _page(daemon)) == {"KvpoolStoreAway"}


def test_a_daemon_that_is_restarted_again_and_again(tmp_path: Path, metered: Start) -> None:
    daemon = metered()
    before = _page(daemon)
    for _ in range(2):
        daemon.kill()
        daemon.start()
    assert _fired(tmp_path, before, _page(daemon)) == {"KvpoolRestarts"}


@pytest.fixture
def on_disk(fault_filesystem: FaultFilesystem, metered: Start) -> Iterator[Daemon]:
    """A daemon with metrics and a tier on a disk that can fail, with chunks there."""
    options = tier_options(fault_filesystem.path / "ssd", dram_chunks=96, capacity=64 << 20, policy="lru")
    daemon = metered(**options)
    daemon.wait_open()
    with daemon.connect(timeout_s=10.0) as pool, daemon.admin() as admin:
        wait_connected(pool)
        for number in range(3):
            store(pool, chain_of(pool, number))
        assert admin.demote_all(60.0)["durable"]
        admin.flush(None, None, "dram")
    yield daemon
    fault_filesystem.clear()


def test_a_disk_that_fails_some_reads(tmp_path: Path, on_disk: Daemon, fault_filesystem: FaultFilesystem) -> None:
    before = _page(on_disk)
    fault_filesystem.set(match="segment-", read_error=errno.EIO, below=8192)
    with on_disk.connect(timeout_s=10.0) as pool:
        for number in range(3):
            load_all(pool, chain_of(pool, number))
        wait_until(lambda: int(on_disk.stats()["ssd.io_errors"]) > 0, "a read has failed")
        for _ in range(8 * FEW_LOADS):  # so that those that bring less than was promised are few
            load_all(pool, chain_of(pool, 1))
    assert on_disk.info()["ssd_state"] == "ok"
    assert _fired(tmp_path, before, _page(on_disk)) == {"KvpoolSsdErrors"}


def test_a_disk_that_fails_every_write_and_one_that_fails_and_recovers(
    tmp_path: Path, on_disk: Daemon, fault_filesystem: FaultFilesystem
) -> None:
    before = _page(on_disk)
    fault_filesystem.set(write_error=errno.EIO)
    with on_disk.connect(timeout_s=10.0) as pool, on_disk.admin() as admin:
        store(pool, chain_of(pool, 10))
        admin.demote_all(5.0)
    wait_until(lambda: on_disk.info()["ssd_state"] == "readonly", "nothing is written")
    now = _page(on_disk)
    lost = {"KvpoolCatalogueRowsLost"}
    assert _fired(tmp_path, before, now) - lost == {"KvpoolDegraded"}
    assert _fired(tmp_path, before, now, flaps=True) - lost == {"KvpoolSsdFlaps"}
