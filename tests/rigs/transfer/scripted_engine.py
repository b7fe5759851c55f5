"""A library in TransferEngine's or NIXL's place that follows a script, behind the process that the daemon starts.

It reads or writes another one's memory through /proc. DIRECTORY/script.json says what it does next: see `Script`.
"""

import json
import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.transfer.child.service import serve
from kvpool.transfer.engine.child import run

FIRST_PORT = 10_000
PORTS = 50_000
# Addresses begin here: an offset is none.
BASE = 1 << 40


@dataclass(frozen=True)
class Script:
    """`fails`: every move does; `refuses`: to begin one. `is_stuck`: none ends, and none has written yet. `aborts`: at the next
    one. `refusal`: why it cannot begin."""

    fails: bool = False
    refuses: bool = False
    is_stuck: bool = False
    aborts: bool = False
    refusal: str = ""

    def write(self, directory: Path) -> None:
        new = directory / "script.new"
        new.write_text(json.dumps(asdict(self)))
        new.rename(directory / "script.json")


class ScriptedEngine:
    """See `child.MoveClient`."""

    @property
    def notices(self) -> "ScriptedAgent | None":
        return None

    met = 0

    def __init__(self, directory: Path, memory: mmap.mmap, facts: Mapping[str, Any]) -> None:
        self._directory = directory
        self._memory = memory
        self._reads: dict[int, tuple[Any, int, int, int]] = {}
        self._numbers = 0
        self.facts = facts

    @property
    def script(self) -> Script:
        return Script(**json.loads((self._directory / "script.json").read_text()))

    def submit(self, other: Any, offset: int, address: int, size: int) -> int:
        script = self.script
        if script.aborts:
            os.abort()
        if script.refuses:
            return 0
        self._numbers += 1
        self._reads[self._numbers] = (other, offset, address, size)
        return self._numbers

    def look(self, number: int) -> int:
        script = self.script
        if script.is_stuck:
            return 0
        other, offset, address, size = self._reads.pop(number)
        return -1 if script.fails else self._move(other, offset, address, size)

    def _move(self, other: Any, offset: int, address: int, size: int) -> int:
        there = self._directory.parent / other.rpartition(":")[2]
        try:
            with there.open("rb") as memory:
                memory.seek(address - BASE)
                found = memory.read(size)
        except OSError:
            return -1
        if len(found) != size:
            return -1
        self._memory[offset : offset + size] = found
        return 1

    def close(self) -> None:
        """Nothing to give back."""


class ScriptedAgent(ScriptedEngine):
    """See `child.Notices`. Marks are files beside another one's memory; its description is its node's name and its port."""

    @property
    def notices(self) -> "ScriptedAgent":
        return self

    def submit(self, other: Any, offset: int, address: int, size: int) -> int:
        _, node, _, described = other
        return super().submit(other, offset, address, size) if described.rpartition(b"/")[0] == node.encode() else -1

    def notify(self, other: Any, mark: bytes) -> bool:
        (self._marks_of(other[3]) / mark.hex()).touch()
        return True

    def heard(self) -> list[bytes]:
        found = list(self._marks_of(self.facts["agent"]).iterdir())
        for one in found:
            one.unlink()
        return [bytes.fromhex(one.name) for one in found]

    def _marks_of(self, described: bytes) -> Path:
        made = self._directory.parent / f"marks-{described.decode().rpartition('/')[2]}"
        made.mkdir(exist_ok=True)
        return made

    def _move(self, other: Any, offset: int, address: int, size: int) -> int:
        there = self._directory.parent / other[3].decode().rpartition("/")[2]
        try:
            with there.open("r+b") as memory:
                if not 0 <= address - BASE <= os.fstat(memory.fileno()).st_size - size:
                    return -1
                memory.seek(address - BASE)
                memory.write(self._memory[offset : offset + size])
        except OSError:
            return -1
        return 1


def connect(settings: Mapping[str, Any], memory: mmap.mmap) -> ScriptedEngine:
    """Serve under a port that derives from the process."""
    directory = Path(settings["devices"])
    refusal = json.loads((directory / "script.json").read_text())["refusal"]
    if refusal:
        raise ConnectionError(refusal)
    port = FIRST_PORT + os.getpid() % PORTS
    named = directory.parent / str(port)
    named.unlink(missing_ok=True)
    named.symlink_to(f"/proc/{os.getpid()}/fd/{sys.argv[2]}")
    facts = {"server": f"127.0.0.1:{port}", "base": BASE, "port": port}
    if settings["library"] == "nixl":
        return ScriptedAgent(
            directory, memory, {**facts, "agent": f"{settings['node']}/{port}".encode(), "met_max": 1000}
        )
    return ScriptedEngine(directory, memory, facts)


if __name__ == "__main__":
    serve(sys.argv[1:], connect, run)
