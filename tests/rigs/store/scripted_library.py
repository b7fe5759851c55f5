"""A library of a shared store that follows a script, behind the store process of the daemon. Imports little: it starts often.

DIRECTORY/objects/NAME      the objects ("/" in names is "+")
DIRECTORY/script.json       what the library does next: see `Script`
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.tiers.store.child import serve

NOT_FOUND = -704


@dataclass(frozen=True)
class Script:
    """What the library does. Codes 0: as a store does. `exists`: what it answers for absent objects; `aborts`: at the next GET;
    `delay_s`: before each answer about objects, `exist_delay_s`: about existence; `refusal`: why nobody can join."""

    get_code: int = 0
    put_code: int = 0
    exist_code: int = 0
    exists: bool = False
    aborts: bool = False
    delay_s: float = 0.0
    exist_delay_s: float = 0.0
    refusal: str = ""


class ScriptedStore:
    """See `child.StoreClient`."""

    def __init__(self, directory: Path, memory: mmap.mmap) -> None:
        self.facts: Mapping[str, Any] = {}
        self._objects = directory / "objects"
        self._script = directory / "script.json"
        self._memory = memory

    @property
    def script(self) -> Script:
        return Script(**json.loads(self._script.read_text()))

    def exist(self, names: list[str]) -> list[int]:
        script = self.script
        time.sleep(script.exist_delay_s)
        return [script.exist_code or int(script.exists or self._path(name).exists()) for name in names]

    def get(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        script = self.script
        if script.aborts:
            os.abort()
        time.sleep(script.delay_s)
        return [script.get_code or self._get(*one) for one in zip(names, offsets, sizes, strict=True)]

    def put(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        script = self.script
        time.sleep(script.delay_s)
        for name, offset, size in zip(names, offsets, sizes, strict=True):
            if not script.put_code and not self._path(name).exists():
                written = self._path(name + ".new")
                written.write_bytes(self._memory[offset : offset + size])
                written.rename(self._path(name))
        return [script.put_code] * len(names)

    def close(self) -> None:
        """Nothing to leave."""

    def _get(self, name: str, offset: int, size: int) -> int:
        path = self._path(name)
        if not path.exists():
            return NOT_FOUND
        value = path.read_bytes()
        if len(value) > size:
            return -600
        self._memory[offset : offset + len(value)] = value
        return len(value)

    def _path(self, name: str) -> Path:
        return self._objects / name.replace("/", "+")


def _connect(settings: Mapping[str, Any], memory: mmap.mmap) -> ScriptedStore:
    assert settings["replicas"] >= 1
    client = ScriptedStore(Path(sys.argv[1]), memory)
    if client.script.refusal:
        raise ConnectionError(client.script.refusal)
    return client


if __name__ == "__main__":
    serve(sys.argv[2:], _connect)
