"""TensorRT-LLM's form of KV cache events: plain values for JSON, one object for each event.

A chunk is a block: its `block_hash` is the last eight bytes of its key as a number, `cache_level` the number of the fastest
tier that has it (`Level`), `cache_salt` the tag of its salt. With `block_tokens` a chunk is cut into its blocks. A change that
this form cannot express (a chunk that a lower tier has besides) gives an event with only its id. Pure functions; any thread.
"""

from typing import Any

import numpy as np

from kvpool.events import Event, EventKind
from kvpool.router_events.block_hashes import block_hash, blocks_of, hashes_of
from kvpool.router_events.columns import NamespaceNames


def trtllm_event(event: Event, namespaces: NamespaceNames, block_tokens: int = 0) -> dict[str, Any]:
    """The object of one event. `namespaces` names those that the event may name."""
    named = namespaces.get(event.namespace)
    chunk_tokens = named[1].chunk_tokens if named is not None else 0
    blocks = blocks_of(chunk_tokens, block_tokens)
    if event.kind == EventKind.CREATED:
        data: dict[str, Any] = {"type": "created", "num_blocks_per_cache_level": list(event.capacities)}
    elif event.kind == EventKind.STORED:
        data = _stored(event, chunk_tokens, blocks)
    elif event.kind == EventKind.REMOVED:
        data = {"type": "removed", "block_hashes": hashes_of(event.column, blocks)}
    else:
        data = {
            "type": "updated",
            "block_hash": block_hash(event.keys),
            "cache_level": _difference(event.level_before, event.level),
            "priority": _difference(event.priority_before, event.priority),
        }
    return {"event_id": event.id, "data": data, "window_size": 0}


def _stored(event: Event, chunk_tokens: int, blocks: int) -> dict[str, Any]:
    tokens = np.frombuffer(event.tokens, "<i4").tolist()
    hashes = hashes_of(event.column, blocks)
    size = chunk_tokens // blocks if tokens else 0
    return {
        "type": "stored",
        "parent_hash": block_hash(event.parent) if event.parent else None,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": hash,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in tokens[number * size : (number + 1) * size]
                ],
                "cache_level": event.level,
                "priority": event.priority,
                "mm_keys": [],
                "cache_salt": event.salt_tag.hex() or None,
            }
            for number, hash in enumerate(hashes)
        ],
    }


def _difference(before: int | None, now: int | None) -> dict[str, Any] | None:
    return None if before == now else {"type": "event_diff", "new_value": now, "old_value": before}
