"""Retention and hints of a batch's pages, as SGLang's orchestrator sends them with a request: ranges for each page.

SGLang passes an envelope on unchanged, in the free part of a storage call's extra info. Its ranges count the prompt's tokens,
while a batch begins anywhere in the prompt: `prefix_keys` shows how many pages precede it where SGLang passes them, and where
it does not, only ranges over the whole prompt count. Pure functions; any thread.
"""

from collections.abc import Mapping

from kvpool.states import TokenRange
from kvpool_client.hint_envelope import Hints, parse_hints

_NAMES = ("kv_hints", "kv_hint", "router_hint")
NOTHING: tuple[TokenRange, ...] = ()


def hints_of(extra_info: object) -> Hints | None:
    """The envelope in a HiCacheStorageExtraInfo; None where there is none."""
    free = getattr(extra_info, "extra_info", None)
    if not isinstance(free, Mapping):
        return None
    given = next((free[name] for name in _NAMES if free.get(name) is not None), None)
    return None if given is None else parse_hints(given)


def page_retention(
    extra_info: object, hints: Hints | None, *, pages: int, page_tokens: int, priority: int | None = None
) -> list[tuple[TokenRange, ...]]:
    """Retention of each page of a batch: by the hints, else with `priority`, else none."""
    otherwise = NOTHING if priority is None else (TokenRange(0, None, priority),)
    ranges = () if hints is None else hints.retention
    if not ranges:
        return [otherwise] * pages
    prefix = getattr(extra_info, "prefix_keys", None)
    known = len(prefix) if isinstance(prefix, (list, tuple)) else None
    retention = []
    for number in range(pages):
        first = None if known is None else (known + number) * page_tokens
        found = next((entry for entry in ranges if _touches(entry, first, page_tokens)), None)
        retention.append(otherwise if found is None else (TokenRange(0, None, found.priority, found.duration_s),))
    return retention


def _touches(entry: TokenRange, first: int | None, page_tokens: int) -> bool:
    if first is None:
        return entry.start == 0 and entry.end is None
    return entry.start < first + page_tokens and (entry.end is None or entry.end > first)
