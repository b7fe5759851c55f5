"""Ledger: what one engine was answered about its saves and flushes, written so that a kill of the engine loses no line.

    B model number     a save begins: its chunks may be stored from now on
    A model            a save begins that will be aborted
    S model number n   the daemon has acknowledged n leading chunks: stored or present
    F model            a flush begins: chunks may be gone from now on
    E model            the daemon has flushed all of it
    W model number n   n chunks were loaded with wrong bytes

An engine writes one, whoever reads it sees whole lines. One thread writes; any process reads.
"""

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Known:
    """What ledgers say of one chain. At least `acknowledged` chunks must be found; none at all where it `is_flushed`."""

    acknowledged: int = 0
    is_flushed: bool = False


@dataclass(slots=True)
class Account:
    """What several ledgers say together: of each chain, by model and number, and what was wrong."""

    chains: defaultdict[str, dict[int, Known]] = field(default_factory=lambda: defaultdict(dict))
    wrong: list[str] = field(default_factory=list)
    saves: int = 0
    flushes: int = 0

    def add(self, line: str) -> None:
        """Take a line into account."""
        verb, model, *numbers = line.split()
        known = self.chains[model]
        if verb == "A":
            return
        if verb == "W":
            self.wrong.append(line)
        elif verb == "F":
            for chain in known.values():
                chain.acknowledged = 0
        elif verb == "E":
            self.flushes += 1
            for chain in known.values():
                chain.is_flushed = True
        else:
            chain = known.setdefault(int(numbers[0]), Known())
            chain.is_flushed = False
            if verb == "S":
                self.saves += 1
                chain.acknowledged = max(chain.acknowledged, int(numbers[1]))


class Ledger:
    """The file of one engine."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, verb: str, model: str, *numbers: int) -> None:
        """Write a line."""
        os.write(self._fd, " ".join([verb, model, *map(str, numbers)]).encode() + b"\n")


class LedgerReader:
    """Reads several ledgers, each from where it has read to."""

    def __init__(self, paths: list[Path]) -> None:
        self._at = dict.fromkeys(paths, 0)
        self.account = Account()

    def read(self) -> Account:
        """The account with all that was written until now."""
        for path, at in self._at.items():
            text = path.read_bytes()[at:] if path.exists() else b""
            self._at[path] = at + len(text)
            for line in text.decode().splitlines():
                self.account.add(line)
        return self.account

    def is_saving(self, path: Path) -> bool:
        """Whether its last line is that a save begins."""
        lines = path.read_text().splitlines() if path.exists() else []
        return bool(lines) and lines[-1][0] in "AB"
