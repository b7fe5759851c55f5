"""Metric definitions of the shared store: what this node fetches from it and publishes there. Absent where it has none.

Pure functions; any thread.
"""

from collections.abc import Callable

from kvpool.server.metrics.measurements import Scrape
from kvpool.server.metrics.metric import Metric, Values, counter, gauge

STATES = ("ok", "suspended", "away")


def _store(key: str) -> Callable[[Scrape], float | None]:
    def read(now: Scrape) -> float | None:
        counted = now.pool.tiers.get("store", {}).get(f"store.{key}")
        return None if counted is None else float(counted)

    return read


def _store_by(**keys: str) -> Callable[[Scrape], Values]:
    read = {value: _store(key) for value, key in keys.items()}
    return lambda now: {(value,): found for value, one in read.items() if (found := one(now)) is not None}


def _states(now: Scrape) -> Values:
    counted = now.pool.tiers.get("store", {})
    return {(state,): float(counted["store.state"] == state) for state in STATES if counted}


STORE_METRICS: tuple[Metric, ...] = (
    gauge("kvpool_store_state", "1 for the state of the shared store: ok, suspended after failures, or away because its "
          "process has not joined it.", _states, "", "state"),
    counter("kvpool_store_queries", "Queries for chunks that this node lacks.", _store("queries")),
    counter("kvpool_store_late_answers", "Those of them that were not answered within store.answer_timeout.",
            _store("late_answers")),
    counter("kvpool_store_pulled_chunks", "Chunks pulled from the store.", _store("pulled_chunks"), "chunks"),
    counter("kvpool_store_read_bytes", "Bytes pulled from the store.", _store("read_bytes"), "bytes"),
    counter("kvpool_store_missed_chunks", "Chunks that the store seemed to have and that did not come: gone, or with other "
            "bytes than the chunk's (wrong).", _store_by(gone="gone_objects", wrong="wrong_objects"), "chunks", "reason"),
    counter("kvpool_store_published_chunks", "Chunks published.", _store("published_chunks"), "chunks"),
    counter("kvpool_store_published_bytes", "Bytes published.", _store("published_bytes"), "bytes"),
    counter("kvpool_store_unpublished_chunks", "Chunks that were not published: the store was full, it failed, or too many "
            "were due at once (left_out).",
            _store_by(full="unpublished_full", failed="unpublished_failed", left_out="unpublished_left_out"),
            "chunks", "reason"),
    counter("kvpool_store_late_transfers", "Transfers that had not ended within store.transfer_timeout.",
            _store("late_transfers")),
    counter("kvpool_store_process_starts", "How often the store's process has joined the store.", _store("process_starts")),
    counter("kvpool_store_suspensions", "How often the store was left alone because it failed again and again.",
            _store("suspensions")),
)  # fmt: skip
