"""Names of LoRA adapters that mean the same in every engine: digests of their weights.

The engine's own number of an adapter is local to it: two engines can give one number to different adapters. The weights are in
the directory that a request names, or in the request itself; the engine sends them once, so digests are remembered by the
engine's number, as the engine itself does. An adapter whose weights were never seen, or whose files are being read, has no
name, and its requests are neither loaded nor saved.

An adapter's files are read once, in the background (`engines/weights_reading`). The executor's thread only.
"""

from pathlib import Path
from typing import Any

import numpy as np

import kvpool_native
from kvpool.errors import LayoutMismatch
from kvpool_client.engines.weights_reading import WeightsReader, WeightsReading, digest_of

# One that was forgotten would be taken for what its files are now: so none is, and there is no name for more.
ADAPTERS_MAX = 16384
CONFIGURATION = "adapter_config.json"
_UNKNOWN = "lora: the weights of its adapter cannot be read; give LoRARequest a directory that this node can read"
_TOO_MANY = f"lora: its adapter is one more than the {ADAPTERS_MAX} that are remembered; start the engine again"
_READING = "lora: the files of its adapter are being read; nothing is loaded or saved until their digest is known"


class Adapters:
    """Names by the engine's number and directory, ADAPTERS_MAX at most.

    An adapter is what its files were at its first request, or the weights that the engine was sent last: it has these in
    memory.
    """

    def __init__(self, reader: WeightsReader) -> None:
        self._reader = reader
        self._known: dict[tuple[int, str], str | WeightsReading] = {}

    def name_of(self, request: Any) -> tuple[str, str]:
        """The adapter's name, empty where there is none; and the reason, where a name is missing."""
        number = getattr(request, "lora_task_id", None)
        if number is None:
            return "", ""
        path = str(getattr(request, "py_lora_path", None) or "")
        weights = getattr(request, "lora_weights", None)
        place = (int(number), path)
        if weights is not None:
            self._remember(place, _digest_of_arrays(weights, getattr(request, "lora_config", None)))
        if place not in self._known and path:
            self._begin_reading(place, Path(path))
        known = self._known.get(place, "")
        try:
            digest = known if isinstance(known, str) else known.find()
        except LayoutMismatch as error:
            return "", f"lora: {error}"
        if digest is None:
            return "", _READING
        unknown = _UNKNOWN if len(self._known) < ADAPTERS_MAX else _TOO_MANY
        return (f"lora:{digest}", "") if digest else ("", unknown)

    def _begin_reading(self, place: tuple[int, str], path: Path) -> None:
        """Begin to read an adapter's weights and its configuration, which scales them, where there are any."""
        try:
            reading = WeightsReading(path, (CONFIGURATION,))
        except LayoutMismatch:
            return
        if reading.has_files:
            self._remember(place, reading)
        if place in self._known:
            self._reader.begin_reading(reading)

    def _remember(self, place: tuple[int, str], known: str | WeightsReading) -> None:
        if place in self._known or len(self._known) < ADAPTERS_MAX:
            self._known[place] = known


def _digest_of_arrays(*arrays: Any) -> str:
    """Digest of weights that came with a request: over every byte, because they have no name."""
    parts = []
    for array in arrays:
        if array is not None:
            view = array.cpu().contiguous().view(-1).numpy() if hasattr(array, "cpu") else np.ascontiguousarray(array)
            parts.append([str(view.dtype), kvpool_native.blake3(view.tobytes()).hex()])
    return digest_of({"arrays": parts})
