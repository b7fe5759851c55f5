"""Identity of an engine's weights: what distinguishes one model from another, and a fine-tuned one from its origin.

Of a directory (or one file) with weights: the digest of every byte, found in the background (`weights_reading`). Of a model of
the Hub: the commit that lies in the local cache. A Revision is made of that and of an engine's other settings; which of them
change its KV, each adapter knows itself.

Any thread.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpool.clock import Deadline, process_began_ns
from kvpool.errors import LayoutMismatch
from kvpool_client.engines.file_stamps import FileStamp, first_younger
from kvpool_client.engines.weights_reading import (
    TICK_NS,
    WeightsReader,
    WeightsReading,
    changed_since_start,
    digest_of,
)

CONFIGURATION = "config.json"
# How long an engine's start waits for weights: long enough for those that are remembered, and for small ones (guess).
START_WAIT_S = 1.0
# The refusal that ends on its own.
READING = (
    "reading: the files of the weights are being read for their digest; nothing is loaded or saved until it is known"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")

# What identifies weights: known words, or a reading of their files.
Weights = str | WeightsReading


class Revision:
    """A digest of an engine's weights and settings. Invariant: it is known when all of its readings have ended."""

    def __init__(self, facts: Mapping[str, object], **weights: "Weights | Revision") -> None:
        """`facts` are known; `weights` are, or will be, and stand under their names beside them."""
        self._facts = facts
        self._weights = weights

    def __repr__(self) -> str:
        return f"<Revision {', '.join(map(repr, self.readings)) or 'known'}>"

    @property
    def readings(self) -> tuple[WeightsReading, ...]:
        """What is to be read, or was: none where everything was known at once."""
        found: list[WeightsReading] = []
        for weights in self._weights.values():
            if isinstance(weights, Revision):
                found += weights.readings
            elif isinstance(weights, WeightsReading):
                found.append(weights)
        return tuple(found)

    @property
    def size(self) -> int:
        """Bytes that are to be read, or were."""
        return sum(reading.size for reading in self.readings)

    @property
    def done(self) -> int:
        """Bytes of them that were read, or whose digest was remembered."""
        return sum(reading.done for reading in self.readings)

    def counts(self) -> dict[str, int]:
        """How far the reading is, for an adapter's counters; nothing where nothing is read."""
        return {"weights_bytes": self.size, "weights_bytes_read": self.done} if self.readings else {}

    def begin_reading(self, reader: WeightsReader) -> None:
        """Have the files read. Waits for at most START_WAIT_S: those of a small model, and those that were read before, are
        known then."""
        deadline = Deadline(START_WAIT_S)
        for reading in self.readings:
            reader.begin_reading(reading)
        for reading in self.readings:
            reading.wait(deadline.remaining_s())

    def find(self) -> str | None:
        """The digest; None while files are read. Raises LayoutMismatch where they cannot be read, or have changed."""
        words = {name: each if isinstance(each, str) else each.find() for name, each in self._weights.items()}
        return None if None in words.values() else digest_of({**self._facts, **words})


def weights_of(name: str, revision: str, environment: Mapping[str, str]) -> Weights:
    """The identity of the weights `name`, a directory, a file or a model of the Hub: a reading to begin, or a commit.

    A directory's configuration, which changes KV as weights do, is read too. Raises LayoutMismatch where nothing does.
    """
    path = Path(name)
    if path.exists():
        reading = loaded_files(path, (CONFIGURATION,))
        if not reading.has_files:
            raise LayoutMismatch(f"no weights in {name!r} distinguish one version of the model from another")
        return reading
    commit = cached_commit(name, revision, environment)
    if not commit:
        raise LayoutMismatch(
            f"nothing identifies the version of {name!r} that is served, expected a commit or a directory"
        )
    return commit


def loaded_files(place: Path, further: Sequence[str] = ()) -> WeightsReading:
    """A reading of files that this process's engine has loaded: none of them may have changed since the process began. Raises
    LayoutMismatch, also where something that led to them has."""
    return WeightsReading(place, further, since_ns=process_began_ns())


def cached_commit(name: str, revision: str, environment: Mapping[str, str]) -> str:
    """The commit of a model of the Hub: `revision` where it is one, else what the local cache has for it; else empty. Raises
    LayoutMismatch where the cache's has changed since the process began: which of them the engine has loaded is not known."""
    if _COMMIT.fullmatch(revision):
        return revision
    reference = _hub_cache(environment) / f"models--{name.replace('/', '--')}" / "refs" / (revision or "main")
    try:
        commit = reference.read_text().strip()
        stamps = {reference.name: FileStamp.at(str(reference))}
        younger = first_younger(reference, stamps, process_began_ns() + TICK_NS)
    except (OSError, ValueError):
        return ""
    if younger:
        raise changed_since_start(younger)
    return commit if _COMMIT.fullmatch(commit) else ""


def _hub_cache(environment: Mapping[str, str]) -> Path:
    """The Hub's local cache, which is found as huggingface_hub finds it."""
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if not cache:
        home = os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        cache = os.path.join(environment.get("HF_HOME") or home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))
