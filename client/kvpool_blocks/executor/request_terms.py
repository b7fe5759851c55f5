"""Terms of a request: what its KV may be shared with, and how long it is retained, read from an LlmRequest's fields.

A salt separates requests that name one. Adapters are named by numbers that hold in one engine alone, and multimodal content
is in no token: both get a name of this process, so that neither another engine nor another request is given such KV. Pure;
any thread.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from kvpool.states import TokenRange
from kvpool_blocks.sequence import Retention
from kvpool_blocks.tree.scope import Scope


class RequestTerms:
    """Scopes and retention of one engine's requests."""

    def __init__(self) -> None:
        self._engine = os.urandom(16)

    def scope(self, request: Any) -> Scope:
        """What separates the request's prefixes."""
        salt: bytes | None = None
        salt_id = getattr(request, "cache_salt_id", None)
        if salt_id is not None:
            salt = b"cache salt " + str(salt_id).encode()
        content = getattr(request, "multimodal_hashes", None)  # an id may be used again, for other content
        if content or getattr(request, "is_dummy_request", False):
            salt = b"request " + self._engine + f"{request.py_request_id} {content!r}".encode()
        task = getattr(request, "lora_task_id", None)
        return Scope(salt, "" if task is None else f"lora task {task} of {self._engine.hex()}")

    def retention(self, request: Any) -> Retention:
        """What its KvCacheRetentionConfig asks for; nothing where it has none."""
        config = getattr(request, "kv_cache_retention_config", None)
        if config is None:
            return Retention()
        ranges: Sequence[Any] = config.token_range_retention_configs
        return Retention(
            tuple(
                TokenRange(entry.token_start, entry.token_end, entry.priority, _seconds(entry.duration_ms))
                for entry in ranges
            ),
            config.decode_retention_priority,
            _seconds(config.decode_duration_ms),
        )


def _seconds(duration_ms: timedelta | float | None) -> float | None:
    """TensorRT-LLM's bindings give milliseconds as a timedelta."""
    if isinstance(duration_ms, timedelta):
        return duration_ms.total_seconds()
    return None if duration_ms is None else duration_ms / 1000
