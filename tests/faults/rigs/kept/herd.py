"""Engines of the campaign as processes: going, paused between two of their steps, stopped in the middle of one, killed.

One thread. Invariant: an engine is going, paused, or stopped while it was going.
"""

import contextlib
import random
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from tests.faults.rigs.kept.engine import GO, PAUSE
from tests.faults.rigs.kept.ledger import LedgerReader
from tests.faults.rigs.kept.prompts import ENGINES
from tests.rigs.daemon import importing, wait_until

PAUSE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0


class EngineProcess:
    """One engine; a killed one is begun again with the same ledger."""

    _process: "subprocess.Popen[str]"
    _asking: IO[str]
    _answers: IO[str]

    def __init__(self, socket: str, ledger: Path, number: int, seed: int) -> None:
        self._arguments = [socket, str(ledger), str(number)]
        self._seed = seed
        self._log = ledger.with_suffix(".log")
        self.ledger = ledger
        self.is_going = self.is_stopped = False

    def begin(self) -> None:
        """Its process, which waits to be asked to go."""
        command = [sys.executable, "-m", "tests.faults.rigs.kept.engine", *self._arguments, str(self._seed)]
        with self._log.open("ab") as log:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=importing())
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asking, self._answers = self._process.stdin, self._process.stdout
        self._say(PAUSE)
        self._wait_paused()
        self.is_going = self.is_stopped = False

    def go(self) -> None:
        """On its way, if it is paused."""
        if not self.is_going:
            self._say(GO)
            self.is_going = True

    def ask_pause(self) -> None:
        """To pause, unless it is stopped: `wait_paused` waits for it."""
        if self.is_going and not self.is_stopped:
            self._say(PAUSE)

    def wait_paused(self) -> None:
        """Until its step has ended, which was asked to pause."""
        if self.is_going and not self.is_stopped:
            self._wait_paused()
            self.is_going = False

    def stop(self) -> None:
        """SIGSTOP: in the middle of whatever it does, and of what its native threads copy."""
        self._process.send_signal(signal.SIGSTOP)
        self.is_stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)
        self.is_stopped = False

    def kill_and_begin(self) -> None:
        """SIGKILL, and another one in its place."""
        self.close()
        self._seed += 1
        self.begin()

    def finish(self) -> None:
        """Have it end by itself; it must have raised nothing."""
        self._asking.close()
        code = self._process.wait(END_TIMEOUT_S)
        assert code == 0, f"exit code {code}: {self._log.read_text()[-3000:]}"

    def close(self) -> None:
        """End it, however it is."""
        with self._process as process, contextlib.suppress(BrokenPipeError):
            process.kill()
            self._asking.close()

    def _say(self, word: bytes) -> None:
        self._asking.write(word.decode())
        self._asking.flush()

    def _wait_paused(self) -> None:
        assert select.select([self._answers], [], [], PAUSE_TIMEOUT_S)[0], "an engine's step does not end"
        line = self._answers.readline()
        assert line == "paused\n", f"{line!r}: {self._log.read_text()[-3000:]}"


class Herd:
    """All engines of a campaign, and their ledgers."""

    def __init__(self, socket: str, folder: Path, seed: int) -> None:
        paths = [folder / f"engine-{number}.ledger" for number in range(ENGINES)]
        self.ledgers = LedgerReader(paths)
        self.engines = [EngineProcess(socket, path, number, seed + 1000 * number) for number, path in enumerate(paths)]

    def __enter__(self) -> "Herd":
        for engine in self.engines:
            engine.begin()
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.close()

    def go(self) -> None:
        """All that are paused go on."""
        for engine in self.engines:
            engine.go()

    def pause(self) -> None:
        """All that are not stopped pause between two steps."""
        for engine in self.engines:
            engine.ask_pause()
        for engine in self.engines:
            engine.wait_paused()

    @property
    def stopped(self) -> list[EngineProcess]:
        """Those that are stopped in the middle of a step."""
        return [engine for engine in self.engines if engine.is_stopped]

    def finish(self) -> None:
        """All end by themselves."""
        for engine in self.stopped:
            engine.resume()
        self.pause()
        for engine in self.engines:
            engine.finish()

    def choose_writer(self, dice: random.Random) -> EngineProcess:
        """One that is in the middle of a save, if there is any."""
        writers = [engine for engine in self.engines if self.ledgers.is_saving(engine.ledger)]
        return dice.choice(writers or self.engines)

    def wait_saved(self, saves: int) -> None:
        """Until so many further saves were acknowledged."""
        begun = self.ledgers.read().saves
        wait_until(lambda: self.ledgers.read().saves >= begun + saves, f"{saves} saves are acknowledged")
