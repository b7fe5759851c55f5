"""One run of a daemon with DRAM for a part of what is saved, over an SSD tier: every counter of chunks, engines and holders has
the value that the run gives it, in metrics and statistics alike."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.server.metrics.definitions import SECTIONS, sample_names
from kvpool.server.metrics.metric import Kind
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.metrics import samples_of, wait_sample
from tests.rigs.payload import flip_bit, load_all, payload_of, store, tokens_of

CHAIN = 8
DRAM_CHUNKS = 3 * CHAIN
TOKENS, BYTES = CHAIN * SMALL.chunk_tokens, CHAIN * SMALL.chunk_bytes
SSD_SLOT_BYTES = 16384  # a chunk of SMALL and the page of its header
# What the run decides, and no clock, disk or other test.
COUNTED = ("Requests of engines", "Chunks", "Integrity", "Holders", "Tenants", "SSD tier (where there is one)")
NOT_COUNTED = {
    *("kvpool_usage_reports_total", "kvpool_eviction_by_age"),  # by time, and by what the policy has learned
    *("kvpool_ssd_capacity_bytes", "kvpool_ssd_slots", "kvpool_ssd_state", "kvpool_ssd_admission"),  # as configured
    *("kvpool_ssd_checkpoints_total", "kvpool_ssd_waiting_jobs", "kvpool_ssd_unanswered_seconds"),  # by time
    *(
        "kvpool_ssd_read_bytes_total",
        "kvpool_ssd_read_back_chunks_total",
    ),  # how many writes are compared is the disk's matter
}
# The names in the statistics of what a metric counts; of several a sum.
IN_STATISTICS = {
    "lookups": "usage.lookups",
    "lookup_tokens": "usage.lookup_tokens",
    "hit_tokens": "usage.hit_tokens",
    "loads": "usage.loads",
    "loaded_tokens": "usage.loaded_tokens",
    "loaded_bytes": "usage.loaded_bytes",
    "failed_loads": "usage.failed_loads_checksum",
    "saved_chunks": "saved_chunks",
    "saved_tokens": "usage.saved_tokens",
    "saved_bytes": "usage.saved_bytes",
    "evicted_chunks": "evicted_chunks",
    "present_chunks": "present_chunks",
    "aborted_chunks": "aborted_chunks",
    "checksum_failures": "checksum_failures",
    "corrupt_reports": "corrupt_reports",
    "verified_chunks": "verified_chunks",
    "expired_leases": "expired_leases",
    "expired_reservations": "expired_reservations",
    "ssd_demoted_chunks": "ssd.demoted_chunks",
    "ssd_promoted_chunks": "ssd.promoted_chunks",
    "ssd_evicted_chunks": "ssd.evicted_chunks",
    "ssd_written_bytes": "ssd.written_bytes",
}


class Run:
    """A daemon whose options can change while it runs, and the engine and the operator that drive it."""

    def __init__(self, daemon: Daemon, options: Path) -> None:
        self.daemon = daemon
        self._options = options
        self.pool = daemon.connect(model="m")
        self.admin = daemon.admin()

    def chain(self, seed: int, chunks: int = CHAIN) -> kv.KeyChain:
        return self.pool.keys(tokens_of(seed, chunks * SMALL.chunk_tokens))

    def set_options(self, text: str) -> None:
        """Continue with these options beside those of the command line."""
        self._options.write_text(text)
        self.admin.reload()

    def store_on_both(self, keys: kv.KeyChain) -> None:
        """Store a chain in DRAM and on disk."""
        assert store(self.pool, keys).stored == len(keys)
        assert self.admin.demote_all(60.0) == {"chunks": len(keys), "left": 0, "durable": True}

    def load_from_disk(self, keys: kv.KeyChain) -> None:
        """Load a chain that DRAM lacks, and wait until it counts as DRAM's: a client reads each layer before."""
        result, _ = load_all(self.pool, keys)
        assert result.reason == "complete"
        wait_until(lambda: self.daemon.stats()["ssd.promotions_under_way"] == 0, "what was read is in DRAM")

    def close(self) -> None:
        self.pool.close()
        self.admin.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    options = tmp_path / "kvpool.toml"
    options.write_text("")
    daemon = Daemon(
        tmp_path,
        **{
            "dram.capacity": f"{DRAM_CHUNKS * SMALL.chunk_bytes}B",
            "dram.policy": "lru",
            "ssd.path": str(tmp_path / "ssd"),
            "ssd.capacity": "64MiB",
            "server.metrics": "127.0.0.1:0",
            "server.probe_interval": "0s",
        },
    )
    try:
        daemon.start(f"--config={options}")
        daemon.wait_open()
        wait_until(lambda: not daemon.info()["dram_is_settling"], "all of the arena can be handed out")
        found = Run(daemon, options)
        yield found
        found.close()
    finally:
        daemon.__exit__()


def _counted(samples: dict[str, float]) -> dict[str, float]:
    """The samples that the run decides and that are not 0."""
    metrics = [metric for title in COUNTED for metric in SECTIONS[title] if metric.kind is not Kind.HISTOGRAM]
    names = {name for metric in metrics for name in sample_names(metric)} - NOT_COUNTED
    return {
        name.removeprefix("kvpool_"): value
        for name, value in samples.items()
        if value and name.partition("{")[0] in names
    }


def _tiers(stats: dict[str, object]) -> tuple[object, ...]:
    return tuple(stats[name] for name in ("chunks", "dram.chunks", "ssd.chunks", "evicted_chunks"))


def test_every_count_is_what_the_run_did(run: Run) -> None:
    pool, daemon, admin = run.pool, run.daemon, run.admin
    first, second, third, fourth = (run.chain(seed) for seed in (1, 2, 3, 4))

    assert pool.lookup(first).chunks == 0  # a miss
    for keys in (first, second, third):
        run.store_on_both(keys)
    assert _tiers(daemon.stats()) == (24, 24, 24, 0)
    run.store_on_both(fourth)  # for which DRAM loses the first
    assert _tiers(daemon.stats()) == (32, 24, 32, 0), "none has left the pool"
    assert admin.check()["chunks"] == 32, "a chunk in two tiers is one"
    assert daemon.problems() == []  # reads every chunk of each tier
    assert store(pool, fourth).present == CHAIN

    assert load_all(pool, fourth)[0].reason == "complete"  # from DRAM
    run.load_from_disk(first)  # for which DRAM loses the second

    leases = [pool.acquire(pool.lookup(keys)) for keys in (third, fourth, first)]
    refused = store(pool, run.chain(5, 2))
    assert refused.reasons == {"full": 1, "no-parent": 1}
    held = wait_sample(run.daemon, "kvpool_leases", 3)
    assert held["kvpool_held_chunks"] == DRAM_CHUNKS
    assert held['kvpool_held_bytes{kind="leased"}'] == held['kvpool_model_held_bytes{model="m"}'] == 3 * BYTES
    users = {name: value for name, value in held.items() if name.startswith("kvpool_user_held_bytes")}
    assert list(users.values()) == [3 * BYTES]
    listed = {name: value for name, value in daemon.stats().items() if name.startswith("held.user.")}
    assert list(listed.values()) == [3 * BYTES]
    for lease in leases:
        lease.release()
    wait_until(lambda: daemon.stats()["leases"] == 0, "the leases have ended: nobody waits for that")

    run.set_options('[server]\nreservation_ttl = "100ms"\n')
    late_keys = run.chain(6, 2)
    late = pool.save(late_keys, from_=payload_of(late_keys, SMALL))  # for which DRAM loses two
    wait_until(lambda: daemon.stats()["expired_reservations"] == 1, "the save has expired")
    run.set_options("")
    expired = wait_sample(run.daemon, "kvpool_expired_reservations_total", 1)
    assert expired["kvpool_zombie_slots"] == 2
    assert (expired["kvpool_reservations"], expired["kvpool_writing_chunks"]) == (1, 0)
    result = late.commit()
    assert result is not None
    assert result.reasons == {"expired": 2}
    given_up = run.chain(7, 3)
    pool.save(given_up, from_=payload_of(given_up, SMALL)).abort()  # for which DRAM loses one more

    assert admin.flush(None, None, "dram")["chunks"] == 21
    assert _tiers(daemon.stats()) == (32, 0, 32, 0), "what DRAM has lost is on disk"
    run.load_from_disk(second)
    with pool.acquire(pool.lookup(second)) as lease:
        flip_bit(lease, 7)
        into = np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)
        assert pool.load(lease, into=into).wait().reason == "checksum"
    wait_until(lambda: daemon.stats()["leases"] == 0, "the lease has ended")
    assert _tiers(daemon.stats()) == (32, 7, 32, 0), "the bad one is on disk, and is good there"
    report = admin.flush("m", None)
    assert (report["chunks"], report["skipped"]) == (32, 0)

    pool.close()
    found = wait_sample(run.daemon, 'kvpool_lookups_total{model="m"}', 8)
    assert _counted(found) == {
        'lookups_total{model="m"}': 1 + 2 + 3 + 2,
        'lookup_tokens_total{model="m"}': 8 * TOKENS,
        'missed_tokens_total{model="m"}': TOKENS,
        'missed_bytes_total{model="m"}': BYTES,
        'hit_tokens_total{model="m",tier="dram"}': 5 * TOKENS,
        'hit_bytes_total{model="m",tier="dram"}': 5 * BYTES,
        'hit_tokens_total{model="m",tier="ssd"}': 2 * TOKENS,
        'hit_bytes_total{model="m",tier="ssd"}': 2 * BYTES,
        'loads_total{model="m"}': 4,
        'loaded_tokens_total{model="m",tier="dram"}': TOKENS + TOKENS * 7 // 8,
        'loaded_bytes_total{model="m",tier="dram"}': BYTES + BYTES * 7 // 8,
        'loaded_tokens_total{model="m",tier="ssd"}': 2 * TOKENS,
        'loaded_bytes_total{model="m",tier="ssd"}': 2 * BYTES,
        'failed_loads_total{reason="checksum"}': 1,
        'saved_chunks_total{model="m"}': 32,
        'saved_tokens_total{model="m"}': 4 * TOKENS,
        'saved_bytes_total{model="m"}': 4 * BYTES,
        'dram_removed_chunks_total{reason="own_class"}': 8 + 8 + 2 + 1,
        'dram_removed_chunks_total{reason="flushed"}': 21 + 7,
        'dram_removed_chunks_total{reason="dropped"}': 1,
        'declined_chunks_total{reason="full"}': 1,
        'declined_chunks_total{reason="no_parent"}': 1,
        'declined_chunks_total{reason="expired"}': 2,
        'declined_chunks_total{reason="aborted"}': 3,
        "present_chunks_total": CHAIN,
        "aborted_chunks_total": 2 + 3,
        "checksum_failures_total": 1,
        "corrupt_reports_total": 1,
        "verified_chunks_total": DRAM_CHUNKS + 32,
        "expired_reservations_total": 1,
        "namespaces": 1,
        "ssd_demoted_chunks_total": 32,
        "ssd_promoted_chunks_total": 2 * CHAIN,
        "ssd_written_bytes_total": 32 * SSD_SLOT_BYTES,
    }
    removed = sum(value for name, value in found.items() if name.startswith("kvpool_dram_removed_chunks_total"))
    assert found["kvpool_dram_chunks"] + removed == 32 + 2 * CHAIN, "what came to DRAM is there or has left it"
    assert found["kvpool_chunk_lifetime_seconds_count"] == 8 + 8 + 2 + 1
    assert found["kvpool_reuse_gap_seconds_count"] == 7 * CHAIN

    stats = daemon.stats()
    for name, key in IN_STATISTICS.items():
        counted = sum(value for sample, value in found.items() if sample.startswith(f"kvpool_{name}_total"))
        assert stats[key] == counted, f"{name} is {key}"
    for name in ("own_class", "other_class", "index_full"):
        assert stats[f"dram.evicted_{name}"] == found[f'kvpool_dram_removed_chunks_total{{reason="{name}"}}']
    assert (stats["dram.flushed_chunks"], stats["dram.dropped_chunks"]) == (28, 1)
    for sample, value in found.items():
        if sample.startswith("kvpool_declined_chunks_total"):
            assert stats[f"declined_{sample.partition(chr(34))[2].removesuffix(chr(34) + '}')}"] == value, sample
    assert stats["usage.hit_rate"] == 7 / 8
    assert daemon.problems() == []


def test_chunks_of_the_only_tier_leave_the_pool(run: Run) -> None:
    """Without a disk that takes them, what DRAM evicts is lost, and is counted so."""
    run.set_options('[ssd]\nadmission = "second-touch"\n')
    for seed in range(4):
        assert store(run.pool, run.chain(seed)).stored == CHAIN
    found = wait_sample(run.daemon, "kvpool_evicted_chunks_total", CHAIN)
    assert found["kvpool_chunks"] == found["kvpool_dram_chunks"] == DRAM_CHUNKS
    assert found['kvpool_ssd_declined_chunks_total{reason="used_once"}'] == CHAIN
    assert _tiers(run.daemon.stats()) == (DRAM_CHUNKS, DRAM_CHUNKS, 0, CHAIN)
    assert samples_of(run.daemon)["kvpool_present_chunks_total"] == 0


def test_hints_tickets_and_saves_at_once_are_counted_as_they_were_answered(run: Run) -> None:
    """Announcements of one connection may have a half of a quarter of DRAM, priorities three tenths."""
    pool, daemon = run.pool, run.daemon
    announced, kept, saved = run.chain(11), run.chain(12), run.chain(13)
    for keys in (announced, kept):
        assert store(pool, keys).stored == CHAIN

    assert pool.announce(announced).announced == 3
    found = wait_sample(run.daemon, "kvpool_announced_chunks_total", 3)
    assert found["kvpool_announcements_clipped_chunks_total"] == CHAIN - 3
    assert found["kvpool_announced_bytes"] == 3 * SMALL.chunk_bytes
    assert found["kvpool_held_chunks"] == 3

    retained = pool.retain(kept, [kv.TokenRange(0, None, 80, 0.2)])
    assert (retained.accepted, retained.clipped) == (7, 1)
    found = wait_sample(run.daemon, "kvpool_retention_expired_chunks_total", 7)
    assert (found["kvpool_retention_clipped_chunks_total"], found["kvpool_dram_retained_chunks"]) == (1, 0)

    lease = pool.acquire(pool.lookup(announced))
    ticket = lease.ticket()
    lease.release()
    wait_until(lambda: daemon.stats()["leases"] == 0, "the lease has ended")
    found = wait_sample(run.daemon, "kvpool_tickets", 1)
    assert (found["kvpool_leases"], found["kvpool_announced_bytes"], found["kvpool_held_chunks"]) == (0, 0, CHAIN)
    assert found['kvpool_user_held_bytes{user="tickets"}'] == BYTES
    with pool.claim(ticket):
        found = wait_sample(run.daemon, "kvpool_leases", 1)
        assert (found["kvpool_tickets"], found["kvpool_held_chunks"]) == (0, CHAIN)

    save = pool.save(saved, from_=payload_of(saved, SMALL))
    with daemon.connect(model="m") as other:
        assert store(other, saved).reasons == {"pending": CHAIN}
    found = wait_sample(run.daemon, "kvpool_writing_chunks", CHAIN)
    assert (found["kvpool_reservations"], found['kvpool_held_bytes{kind="reserved"}']) == (1, BYTES)
    result = save.commit()
    assert result is not None
    assert result.stored == CHAIN
    found = wait_sample(run.daemon, "kvpool_writing_chunks", 0)
    assert found['kvpool_declined_chunks_total{reason="pending"}'] == CHAIN
    assert (found["kvpool_chunks"], found["kvpool_dram_chunks"], found["kvpool_reservations"]) == (24, 24, 0)
