"""A keeper in this process: descriptors by name, over lives of a pool in this process. `fail_after`: how many calls succeed."""

import os
from collections.abc import Collection

from kvpool.tiers.dram.kept.keeper import FILES_MAX, KeeperFault


class MemoryKeeper:
    """See the module. Invariant: it never has more than a keeper may."""

    name = "memory"

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.calls: list[str] = []
        self.fail_after: int | None = None

    def why_it_may_end(self, *, is_restart: bool) -> str:
        """It outlives restarts alone, as systemd."""
        return "" if is_restart else "it is no restart"

    def take_memory(self) -> dict[str, int]:
        """Duplicates."""
        self._note("take")
        return {name: os.dup(descriptor) for name, descriptor in self.kept.items()}

    def give_memory(self, name: str, descriptor: int) -> None:
        """Has a duplicate from now on."""
        self._note(f"give {name}")
        assert name not in self.kept
        self.kept[name] = os.dup(descriptor)
        assert len(self.kept) <= FILES_MAX

    def drop_memory(self, names: Collection[str]) -> None:
        """Closes its own."""
        self._note(f"drop {' '.join(names)}")
        for name in names:
            if name in self.kept:
                os.close(self.kept.pop(name))

    def close(self) -> None:
        """Drop all."""
        self.drop_memory([*self.kept])

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fail_after is not None and len(self.calls) > self.fail_after:
            raise KeeperFault("this call was to fail")
