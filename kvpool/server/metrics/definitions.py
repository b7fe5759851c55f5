"""Metric definitions: name, type, unit, labels and meaning of every metric that kvpoold exports, and the source of its values
in a Scrape.

The collector and `docs/metrics.md` are both made from this table. Names never change their meaning. Label sets are bounded:
models by MODELS_MAX of `index/usage.py`, size classes by the arena's 64, all others by their enums.

Counters are named here without the `_total` that their samples end in. Pure functions; any thread.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvpool.clock import NS_PER_S
from kvpool.server.metrics.hbm_definitions import HBM_METRICS
from kvpool.server.metrics.measurements import Scrape
from kvpool.server.metrics.metric import Histogram, Kind, Metric, Values
from kvpool.server.metrics.metric import counter as _counter
from kvpool.server.metrics.metric import gauge as _gauge
from kvpool.server.metrics.peer_definitions import PEER_METRICS
from kvpool.server.metrics.request_times import BOUNDS_NS
from kvpool.server.metrics.sparse_definitions import SPARSE_METRICS
from kvpool.server.metrics.store_definitions import STORE_METRICS
from kvpool.states import Level
from kvpool.tiering.admission import DECLINED, Admitted
from kvpool.usage import ModelUsage


def _index(key: str) -> Callable[[Scrape], float]:
    return lambda now: now.pool.index[key]


def _server(key: str) -> Callable[[Scrape], float]:
    return lambda now: now.pool.server[key]


def _events(key: str) -> Callable[[Scrape], float | None]:
    """Absent where nothing is published and the number is about publishing."""

    def read(now: Scrape) -> float | None:
        return now.pool.events.get(key)

    return read


def _refused_by_publisher(now: Scrape) -> Iterable[tuple[str, float]]:
    names = {
        "no_key": "events.refused_routers",
        "no_request": "events.bad_requests",
        "unread": "events.unsent_replays",
        "shut_down": "events.ended_connections",
    }
    return ((reason, now.pool.events[name]) for reason, name in names.items() if name in now.pool.events)


def _directory(key: str) -> Callable[[Scrape], float]:
    return lambda now: float(now.pool.directory[key])


def _ssd(key: str) -> Callable[[Scrape], float | None]:
    """Absent where there is no SSD tier."""

    def read(now: Scrape) -> float | None:
        counted = now.pool.tiers.get("ssd")
        return float(counted[key]) if counted else None

    return read


def _ssd_by(**keys: str) -> Callable[[Scrape], Values]:
    """A value for each word, from the key that stands for it; absent where there is no SSD tier."""
    read = {value: _ssd(key) for value, key in keys.items()}
    return lambda now: {(value,): found for value, one in read.items() if (found := one(now)) is not None}


def _ssd_state(now: Scrape) -> Values:
    counted = now.pool.tiers.get("ssd", {})
    states = ("starting", "ok", "readonly", "offline") if counted else ()
    return {(state,): float(counted["ssd.state"] == state) for state in states}


def _ssd_admission(now: Scrape) -> Values:
    counted = now.pool.tiers.get("ssd", {})
    words = [step.word for step in Admitted] if counted else []
    return {(word,): float(counted["ssd.admission"] == word) for word in words}


def _by_model(read: Callable[[ModelUsage], float]) -> Callable[[Scrape], Values]:
    return lambda now: {(model,): read(counts) for model, counts in now.pool.models.items()}


def _by_tier(read: Callable[[ModelUsage], tuple[int, ...]]) -> Callable[[Scrape], Values]:
    """DRAM always, other tiers from their first use on."""
    return lambda now: {
        (model, level.name.lower()): read(counts)[level]
        for model, counts in now.pool.models.items()
        for level in Level
        if level is Level.DRAM or read(counts)[level]
    }


def _labelled(read: Callable[[Scrape], Iterable[tuple[str, float]]]) -> Callable[[Scrape], Values]:
    return lambda now: {(label,): value for label, value in read(now)}


def _areas(now: Scrape) -> Values:
    """By the first word of a problem; each area that is always there is 0 without one."""
    areas = dict.fromkeys(AREAS, 0.0)
    areas.update({problem.partition(":")[0]: 1.0 for problem in now.health.problems})
    return {(area,): value for area, value in areas.items()}


def _left_dram(now: Scrape) -> Iterable[tuple[str, float]]:
    names = {
        "own_class": "evicted_own_class",
        "other_class": "evicted_other_class",
        "index_full": "evicted_index_full",
        "flushed": "flushed_chunks",
        "dropped": "dropped_chunks",
    }
    return ((reason, now.pool.directory[name]) for reason, name in names.items())


def _declined(now: Scrape) -> Iterable[tuple[str, float]]:
    """By reason: what reservations answered, and what commits and clients did; a chunk may lack its parent at both."""
    counted = Counter({reason: now.pool.directory[f"answered_{reason}"] for reason in RESERVE_DECLINES})
    counted.update(now.pool.failures.declined_chunks)
    return counted.items()


def _segments(now: Scrape) -> Iterable[tuple[str, float]]:
    counts = now.pool.directory
    yield "free", counts["free_segments"]
    yield "lent", counts["ready_segments"] - counts["free_segments"]
    yield "not_ready", counts["segments"] - counts["ready_segments"]


def _dram_classes(now: Scrape) -> Iterable[Mapping[str, int]]:
    classes: Iterable[Mapping[str, int]] = now.pool.directory["classes"]
    return classes


def _slots(
    unit: Callable[[Mapping[str, Any]], int],
    classes: Callable[[Scrape], Iterable[Mapping[str, int]]] = _dram_classes,
) -> Callable[[Scrape], Values]:
    """Used and free slots of each size class; a class is named `<chunk bytes>x<extents>`."""
    return lambda now: {
        (f"{row['chunk_bytes']}x{row['extents']}", state): slots * unit(row)
        for row in classes(now)
        for state, slots in (("used", row["slots_used"]), ("free", row["slots"] - row["slots_used"]))
    }


def _log2_seconds(key: str) -> Callable[[Scrape], Histogram]:
    def read(now: Scrape) -> Histogram:
        counts, sum_s = now.pool.directory[key]
        return Histogram(tuple(float(1 << power) for power in range(len(counts) - 1)), tuple(counts), sum_s)

    return read


def _durations(now: Scrape) -> Values:
    bounds = tuple(bound / NS_PER_S for bound in BOUNDS_NS)
    return {(verb,): Histogram(bounds, times.counts, times.sum_ns / NS_PER_S) for verb, times in now.verbs.items()}


def _build(now: Scrape) -> Values:
    return {tuple(now.build[label] for label in BUILD_LABELS): 1.0}


RESERVE_DECLINES = ("pending", "no_parent", "full", "not_ready", "foreign", "quota")
HELD_KINDS = ("leased", "reserved", "zombie")
BUILD_LABELS = ("version", "checksum", "key_hash")
PROCESS_METRICS = ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds")

# What problems in health are about.
AREAS = ("dram", "events", "hbm", "peers", "saves", "self-probe", "ssd", "transfer")

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Requests of engines": (
        _counter("kvpool_lookups", "Lookups of engines, but those repeated for an acquire.",
                 _by_model(lambda c: c.lookups), "", "model"),
        _counter("kvpool_lookup_tokens", "Tokens looked up, in full chunks.",
                 _by_model(lambda c: c.lookup_tokens), "tokens", "model"),
        _counter("kvpool_hit_tokens", "Tokens looked up and found, by the fastest tier that has them.",
                 _by_tier(lambda c: c.hit_tokens), "tokens", "model", "tier"),
        _counter("kvpool_hit_bytes", "Bytes of the chunks looked up and found.",
                 _by_tier(lambda c: c.hit_bytes), "bytes", "model", "tier"),
        _counter("kvpool_missed_tokens", "Tokens looked up that no tier had.",
                 _by_model(lambda c: c.missed_tokens), "tokens", "model"),
        _counter("kvpool_missed_bytes", "Bytes of the chunks looked up that no tier had.",
                 _by_model(lambda c: c.missed_bytes), "bytes", "model"),
        _counter("kvpool_loads", "Loads that ended, complete or shorter.", _by_model(lambda c: c.loads), "", "model"),
        _counter("kvpool_loaded_tokens", "Tokens whose KV was verified in engine memory, by the tier at acquire.",
                 _by_tier(lambda c: c.loaded_tokens), "tokens", "model", "tier"),
        _counter("kvpool_loaded_bytes", "Bytes of the chunks loaded.",
                 _by_tier(lambda c: c.loaded_bytes), "bytes", "model", "tier"),
        _counter("kvpool_failed_loads", "Loads that ended before their last chunk, by reason.",
                 _labelled(lambda now: now.pool.failures.failed_loads.items()), "", "reason"),
        _counter("kvpool_saved_chunks", "Chunks committed.", _by_model(lambda c: c.stored_chunks), "chunks", "model"),
        _counter("kvpool_saved_tokens", "Tokens of the chunks committed.",
                 _by_model(lambda c: c.stored_tokens), "tokens", "model"),
        _counter("kvpool_saved_bytes", "Bytes of the chunks committed.",
                 _by_model(lambda c: c.stored_bytes), "bytes", "model"),
        _counter("kvpool_usage_reports", "Reports that clients sent of their lookups, loads and recalls.",
                 lambda now: now.pool.failures.usage_reports),
        _counter("kvpool_usage_clamped_values", "Values in such reports that were implausibly large, and were cut.",
                 lambda now: now.pool.failures.clamped_values),
    ),
    "Compute by lookup (of models that use it)": SPARSE_METRICS,
    "Chunks": (
        _gauge("kvpool_chunks", "Chunks in DRAM or a lower tier of this node, each counted once.",
               lambda now: now.pool.chunks, "chunks"),
        _gauge("kvpool_dram_chunks", "Chunks in DRAM.", _directory("chunks"), "chunks"),
        _gauge("kvpool_writing_chunks", "Chunks reserved in DRAM and not yet committed.", _directory("writing"), "chunks"),
        _gauge("kvpool_held_chunks", "Chunks in DRAM that leases, tickets, announcements, saves or reads into DRAM protect "
               "from eviction.", _directory("held"), "chunks"),
        _counter("kvpool_evicted_chunks", "Chunks evicted from the last tier of this node that had them: they are lost here.",
                 lambda now: now.pool.evicted_chunks, "chunks"),
        _counter("kvpool_dram_removed_chunks", "Chunks that left DRAM, those included that a lower tier has, by reason: "
                 "evicted for a newer chunk of the same size (own_class), for another size class (other_class), for want of "
                 "index entries (index_full); removed by order (flushed); found bad, or behind a chunk that is bad or could "
                 "not be read into DRAM (dropped).", _labelled(_left_dram), "chunks", "reason"),
        _counter("kvpool_declined_chunks", "Chunks of saves that were declined, by reason. disconnected, timeout, "
                 "too_long and aborted are reported by clients; expired is found when a save ends, checksum at commit, where "
                 "what is behind a chunk of other bytes has no_parent.", _labelled(_declined), "chunks", "reason"),
        _counter("kvpool_present_chunks", "Chunks offered for saving that were stored already.",
                 _directory("answered_present"), "chunks"),
        _counter("kvpool_aborted_chunks", "Chunks reserved and never committed: given up, or too late.",
                 _directory("aborted_chunks"), "chunks"),
        _gauge("kvpool_dram_retained_chunks", "Chunks in DRAM with more than the default priority, and their ancestors.",
               _directory("retained_chunks"), "chunks"),
        _gauge("kvpool_dram_retained_bytes", "Bytes of those chunks.", _directory("retained_bytes"), "bytes"),
        _counter("kvpool_retention_clipped_chunks", "Chunks that were refused a priority above the default, "
                 "because dram.retained_quota is used up.", _directory("retention_clipped_chunks"), "chunks"),
        _counter("kvpool_retention_expired_chunks", "Chunks in DRAM whose priority returned to the default when its duration "
                 "ended.",
                 _directory("retention_expired_chunks"), "chunks"),
        _gauge("kvpool_eviction_by_age", "1 while the oldest chunk is evicted first, 0 while the least useful one is.",
               _directory("policy_by_age")),
        Metric("kvpool_reuse_gap_seconds", Kind.HISTOGRAM, "For each chunk in DRAM that is acquired, the time since its last "
               "access; 0 while it is in use.", _log2_seconds("reuse_gaps"), "seconds"),
        Metric("kvpool_chunk_lifetime_seconds", Kind.HISTOGRAM, "For each chunk evicted from DRAM, the time since it came "
               "there. Where reuse gaps reach as far as lifetimes, more memory means more hits.",
               _log2_seconds("lifetimes"), "seconds"),
    ),
    "Integrity": (
        _counter("kvpool_checksum_failures", "Chunks in DRAM whose bytes did not match their checksums, dropped: found by "
                 "checks, after reports, and by moves to other tiers.", _index("checksum_failures")),
        _counter("kvpool_corrupt_reports", "Reports of such chunks by clients.", _index("corrupt_reports")),
        _counter("kvpool_verified_chunks", "Chunks read by kvpoolctl check --deep and verify: one in two tiers twice.",
                 _index("verified_chunks"), "chunks"),
    ),
    "Holders": (
        _gauge("kvpool_leases", "Leases that live.", _index("leases"), "leases"),
        _gauge("kvpool_tickets", "Tickets that can be claimed.", _index("tickets"), "tickets"),
        _gauge("kvpool_announced_bytes", "Bytes of DRAM reserved for chunks that engines have announced.",
               _index("announced_bytes"), "bytes"),
        _counter("kvpool_announced_chunks", "Chunks that were announced and accepted.", _index("announced_chunks"), "chunks"),
        _counter("kvpool_announcements_clipped_chunks", "Chunks announced beyond dram.announced_quota, and not accepted.",
                 _index("announcements_clipped_chunks"), "chunks"),
        _gauge("kvpool_reservations", "Saves under way, with expired ones whose writers have not acknowledged the loss.",
               _index("reservations"), "reservations"),
        _counter("kvpool_expired_leases", "Leases that expired.", _index("expired_leases"), "leases"),
        _gauge("kvpool_staging_bytes", "Staging memory of connections that save by copy.",
               _index("staging_bytes"), "bytes"),
        _counter("kvpool_expired_reservations", "Saves that took longer than server.reservation_ttl.",
                 _index("expired_reservations"), "reservations"),
        _gauge("kvpool_joint_chunks", "Chunks of joint saves that lack the part of a rank, and those behind such a chunk.",
               _index("joint_chunks"), "chunks"),
        _gauge("kvpool_joint_bytes", "Memory of those chunks' slots; a half of DRAM at most.", _index("joint_bytes"), "bytes"),
        _counter("kvpool_joint_stored_chunks", "Chunks of joint saves that every part was stored of.",
                 _index("joint_stored_chunks"), "chunks"),
        _counter("kvpool_joint_expired_chunks", "Chunks of joint saves of which a part never came, or came too late.",
                 _index("joint_expired_chunks"), "chunks"),
        _gauge("kvpool_namespaces", "Models and layouts, by rank, that are known: those without chunks and users until others "
               "need their room.",
               _index("namespaces"), "namespaces"),
    ),
    "Tenants": (
        _gauge("kvpool_held_bytes", "Payload in DRAM that cannot be evicted, by kind: held by leases and tickets (leased), "
               "being saved (reserved), and of saves that are too late and may still write (zombie).",
               _labelled(lambda now: ((kind, now.pool.held[f"held.{kind}_bytes"]) for kind in HELD_KINDS)), "bytes", "kind"),
        _gauge("kvpool_model_held_bytes", "Payload in DRAM that cannot be evicted, by model: of the 32 with most, and of "
               "all others together (other).",
               _labelled(lambda now: now.pool.held_by_model.items()), "bytes", "model"),
        _gauge("kvpool_user_held_bytes", "Memory of slots that the connections of a user protect from eviction: of the 32 "
               "users with most, by uid, and of all others (other), tickets, other nodes (peers) and operators together.",
               _labelled(lambda now: now.pool.held_by_user.items()), "bytes", "user"),
    ),
    "Memory": (
        _gauge("kvpool_dram_capacity_bytes", "Capacity of the DRAM tier, in payload.",
               lambda now: now.pool.capacity_bytes, "bytes"),
        _gauge("kvpool_dram_used_bytes", "Payload of all slots in use.", _directory("used_bytes"), "bytes"),
        _gauge("kvpool_dram_idle_bytes", "Payload that may be evicted.", _directory("idle_bytes"), "bytes"),
        _gauge("kvpool_dram_resident_bytes", "Arena faulted in.", lambda now: now.pool.resident_bytes, "bytes"),
        _gauge("kvpool_dram_huge_bytes", "Arena in huge pages.", lambda now: now.pool.huge_bytes, "bytes"),
        _gauge("kvpool_dram_settling", "1 while the arena is being faulted in or collapsed.",
               lambda now: float(now.pool.is_settling)),
        _gauge("kvpool_slots", "Slots lent to each size class, named by chunk bytes and extents.",
               _slots(lambda _: 1), "slots", "size_class", "state"),
        _gauge("kvpool_slot_bytes", "Memory of those slots.",
               _slots(lambda row: int(row["slot_bytes"])), "bytes", "size_class", "state"),
        _gauge("kvpool_zombie_slots", "Slots of expired reservations that wait for writers.", _directory("zombies"), "slots"),
        _gauge("kvpool_segments", "Segments of the arena.", _labelled(_segments), "segments", "state"),
    ),
    "SSD tier (where there is one)": (
        _gauge("kvpool_ssd_state", "1 for the tier's state, 0 for the others.", _ssd_state, "", "state"),
        _gauge("kvpool_ssd_chunks", "Chunks that can be read from it.", _ssd("ssd.chunks"), "chunks"),
        _gauge("kvpool_ssd_used_bytes", "Bytes of its slots in use.", _ssd("ssd.used_bytes"), "bytes"),
        _gauge("kvpool_ssd_capacity_bytes", "Bytes of its segment files.", _ssd("ssd.capacity_bytes"), "bytes"),
        _gauge("kvpool_ssd_slots", "Slots lent to each size class in its files, named by chunk bytes and extents.",
               _slots(lambda _: 1, lambda now: now.pool.classes.get("ssd", ())), "slots", "size_class", "state"),
        _counter("kvpool_ssd_demoted_chunks", "Chunks written to it.", _ssd("ssd.demoted_chunks"), "chunks"),
        _counter("kvpool_ssd_promoted_chunks", "Chunks read back from it.", _ssd("ssd.promoted_chunks"), "chunks"),
        _counter("kvpool_ssd_failed_chunks", "Chunks that could not be written to it (demotion) or read back (promotion).",
                 _ssd_by(demotion="ssd.demotion_failed_chunks", promotion="ssd.promotion_failed_chunks"),
                 "chunks", "direction"),
        _counter("kvpool_ssd_evicted_chunks", "Chunks that were evicted from it for newer ones.",
                 _ssd("ssd.evicted_chunks"), "chunks"),
        _counter("kvpool_ssd_read_bytes", "Bytes read from it.", _ssd("ssd.read_bytes"), "bytes"),
        _counter("kvpool_ssd_written_bytes", "Bytes written to it: the disk's wear, to compare with the bytes read.",
                 _ssd("ssd.written_bytes"), "bytes"),
        _gauge("kvpool_ssd_write_budget_left_bytes", "Bytes that the write budget allows now; 0 without one.",
               _ssd("ssd.write_budget_left_bytes"), "bytes"),
        _gauge("kvpool_ssd_admission", "1 for the admission step in force, 0 for others: all chunks, those likely to be used, "
               "those used again, nothing.", _ssd_admission, "", "admitted"),
        _counter("kvpool_ssd_admission_tightenings", "How often admission became stricter for a low budget.",
                 _ssd("ssd.admission_tightenings")),
        _counter("kvpool_ssd_declined_chunks", "Chunks evicted from DRAM and not written to it: too unlikely to "
                 "be used again, used once, no budget, written before and not used since, not written in time.",
                 _ssd_by(**{reason: f"ssd.declined_{reason}" for reason in DECLINED}), "chunks", "reason"),
        _counter("kvpool_ssd_unrestored_chunks", "Chunks of earlier daemons that were not restored: their slots fit no layout "
                 "now.",
                 _ssd("ssd.unrestored_chunks"), "chunks"),
        _counter("kvpool_ssd_lost_chunks", "Chunks dropped because a failed sync had covered them.",
                 _ssd("ssd.lost_chunks"), "chunks"),
        _counter("kvpool_ssd_checkpoints", "Checkpoints of the catalogue.", _ssd("ssd.checkpoints")),
        _counter("kvpool_ssd_io_errors", "Reads and writes that failed.", _ssd("ssd.io_errors")),
        _gauge("kvpool_ssd_unanswered_seconds", "Age of the oldest unanswered read or write of the disk; 0 where there "
               "is none.", _ssd("ssd.unanswered_s"), "seconds"),
        _counter("kvpool_ssd_corrupt_chunks", "Chunks whose slot had another header or wrong checksums.",
                 _ssd("ssd.corrupt_chunks"), "chunks"),
        _counter("kvpool_ssd_read_back_chunks", "Chunks read back after they were written, before they were published.",
                 _ssd("ssd.read_back_chunks"), "chunks"),
        _counter("kvpool_ssd_bad_writes", "Chunks that were read back with other bytes than were written.",
                 _ssd("ssd.bad_writes")),
        _gauge("kvpool_ssd_io_distrusted", "1 after a read or write gave different bytes on repetition: plain calls alone, and "
               "every written chunk is read back.", _ssd("ssd.io_distrusted")),
        _gauge("kvpool_ssd_waiting_jobs", "Jobs that wait for it: reads for engines, writes, checks, rows of its catalogue.",
               _ssd_by(reads="ssd.waiting_reads", writes="ssd.waiting_writes", checks="ssd.waiting_checks",
                       catalogue="ssd.waiting_rows"), "jobs", "queue"),
        _counter("kvpool_ssd_dropped_rows", "Rows that did not fit its catalogue: their chunks are not found after a "
                 "restart.", _ssd("ssd.dropped_rows")),
        _counter("kvpool_ssd_lost_rows", "Rows that a failing disk lost: their chunks are not found after a restart.",
                 _ssd("ssd.lost_rows")),
    ),
    "Connections and requests": (
        _gauge("kvpool_connections", "Open connections.",
               _labelled(lambda now: now.connections.items()), "connections", "role"),
        _counter("kvpool_accepted_connections", "Connections taken.", _server("accepted_connections"), "connections"),
        _counter("kvpool_refused_connections", "Connections refused before their first request.",
                 _server("refused_connections"), "connections"),
        _counter("kvpool_protocol_errors", "Connections ended by bytes that were no frame.", _server("protocol_errors")),
        Metric("kvpool_request_duration_seconds", Kind.HISTOGRAM, "Time from a request's dispatch to its answer, waits "
               "included.", _durations, "seconds", ("verb",)),
        _counter("kvpool_request_refusals", "Requests that were refused with a reason.",
                 _labelled(lambda now: ((verb, times.refused) for verb, times in now.verbs.items())), "", "verb"),
        _counter("kvpool_request_failures", "Requests that ended in an unexpected error; the log has it.",
                 _labelled(lambda now: ((verb, times.failed) for verb, times in now.verbs.items())), "", "verb"),
        _gauge("kvpool_transfer_waiting_jobs", "Jobs that wait for a transfer thread.",
               _server("transfer_waiting_jobs"), "jobs"),
    ),
    "Events": (
        _counter("kvpool_written_events", "Events of the daemon's start, and of chunks stored, removed and moved.",
                 _events("events.written"), "events"),
        _counter("kvpool_dropped_events", "Events dropped because the buffer was full or a gap had made them useless.",
                 _events("events.dropped"), "events"),
        _counter("kvpool_event_gaps", "Gaps: more happened at once than the event log holds.", _events("events.gaps")),
        _gauge("kvpool_buffered_event_bytes", "Memory of the event log.", _events("events.buffered_bytes"), "bytes"),
        _gauge("kvpool_engine_chunks", "Chunks that engines have reported in block pools of their own (level 0).",
               _events("events.engine_chunks"), "chunks"),
        _gauge("kvpool_engine_chunk_record_bytes", "Memory of their record.",
               _events("events.engine_chunk_record_bytes"), "bytes"),
        _counter("kvpool_declined_engine_chunks", "Such chunks that were declined: beyond the bound, without their parent, or "
                 "known under another model.", _events("events.declined_engine_chunks"), "chunks"),
        _counter("kvpool_published_events", "Events published to routers (with events.publish).",
                 _events("events.published"), "events"),
        _counter("kvpool_published_event_messages", "Messages that carried them.",
                 _events("events.published_messages"), "messages"),
        _counter("kvpool_replayed_event_messages", "Messages replayed (with events.replay).",
                 _events("events.replayed_messages"), "messages"),
        _counter("kvpool_published_event_snapshots", "Snapshots published to routers, after a gap or for new routers.",
                 _events("events.published_snapshots")),
        _counter("kvpool_event_publish_errors", "Unexpected errors of the publisher; the log has the first.",
                 _events("events.publish_errors")),
        _counter("kvpool_event_refusals", "Routers without a known key, invalid replay requests, replays "
                 "that were not read to their end, and connections beyond "
                 "their bounds.", _labelled(_refused_by_publisher), "", "reason"),
    ),
    "Device memory": HBM_METRICS,
    "Other nodes": PEER_METRICS,
    "Shared store": STORE_METRICS,
    "Health": (
        _gauge("kvpool_ready", "1 while the daemon serves requests.", lambda now: float(now.health.is_ready)),
        _gauge("kvpool_healthy", "1 while /healthz answers 200.", lambda now: float(now.health.is_healthy)),
        _gauge("kvpool_degraded", "1 while a part of the daemon is degraded or unhealthy, by the word that its problems in "
               "health begin with.", _areas, "", "area"),
        _gauge("kvpool_early_ends", "Lives before this one, in a row, that were killed, crashed or could not serve.",
               lambda now: now.health.early_ends),
        _gauge("kvpool_probe_age_seconds", "Time since the last self-probe ended; absent without one.",
               lambda now: now.health.probe_age_s, "seconds"),
        _gauge("kvpool_probe_latency_seconds", "How long the last self-probe took; absent without one.",
               lambda now: now.health.probe_latency_s, "seconds"),
        _gauge("kvpool_uptime_seconds", "Time since the daemon's start.", _server("uptime_s"), "seconds"),
        Metric("kvpool_build", Kind.INFO, "Version of the daemon, and the code paths chosen for this processor.", _build,
               labels=BUILD_LABELS),
    ),
}  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)


def sample_names(metric: Metric) -> tuple[str, ...]:
    """The names of a metric's samples: what a query may ask for."""
    suffixes = {
        Kind.COUNTER: ("_total",),
        Kind.GAUGE: ("",),
        Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
        Kind.INFO: ("_info",),
    }
    return tuple(metric.name + suffix for suffix in suffixes[metric.kind])
