"""Names of LoRA adapters that mean the same in every engine: digests of their weights.

The engine's own number of an adapter is local to it: two engines can give one number to different adapters. The weights are in
the directory that a request names, or in the request itself; the engine sends them once, so digests are remembered by the
engine's number, as the engine itself does. An adapter whose weights were never seen has no name, and its requests are neither
loaded nor saved.

Reads an adapter's files once. The executor's thread only.
"""

from pathlib import Path
from typing import Any

import numpy as np

import kvpool_native
from kvpool_client.engines.weights import digest_of, directory_digest

ADAPTERS_MAX = 4096
CONFIGURATION = "adapter_config.json"
_UNKNOWN = "lora: the weights of its adapter cannot be read; give LoRARequest a directory that this node can read"


class Adapters:
    """Digests by the engine's number and directory; the oldest is forgotten beyond ADAPTERS_MAX."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], str] = {}

    def name_of(self, request: Any) -> tuple[str, str]:
        """The adapter's name, empty where there is none; and the reason, where a name is missing."""
        number = getattr(request, "lora_task_id", None)
        if number is None:
            return "", ""
        path = str(getattr(request, "py_lora_path", None) or "")
        weights = getattr(request, "lora_weights", None)
        place = (int(number), path)
        if weights is not None:
            return self._note(place, _digest_of_arrays(weights, getattr(request, "lora_config", None))), ""
        if place not in self._known and path:
            digest = _digest_of_directory(Path(path))
            return (self._note(place, digest), "") if digest else ("", _UNKNOWN)
        known = self._known.get(place)
        return (known, "") if known else ("", _UNKNOWN)

    def _note(self, place: tuple[int, str], digest: str) -> str:
        self._known.pop(place, None)
        if len(self._known) >= ADAPTERS_MAX:
            self._known.pop(next(iter(self._known)))
        self._known[place] = digest
        return digest


def _digest_of_directory(path: Path) -> str:
    """Of an adapter's weights and its configuration, which scales them; empty where there are no weights."""
    try:
        weights = directory_digest(path)
        configuration = path / CONFIGURATION
        words = configuration.read_bytes() if configuration.is_file() else b""
    except OSError:
        return ""
    return (
        "lora:" + digest_of({"weights": weights, "configuration": kvpool_native.blake3(words).hex()}) if weights else ""
    )


def _digest_of_arrays(*arrays: Any) -> str:
    """Digest of weights that came with a request: over every byte, because they have no name."""
    parts = []
    for array in arrays:
        if array is not None:
            view = array.cpu().contiguous().view(-1).numpy() if hasattr(array, "cpu") else np.ascontiguousarray(array)
            parts.append([str(view.dtype), kvpool_native.blake3(view.tobytes()).hex()])
    return "lora:" + digest_of({"arrays": parts})
