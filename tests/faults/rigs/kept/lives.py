"""Lives of one daemon under a herd of engines: each ends by a kill somewhere, and the next one must have what it left.

Three kinds of truth, each without the other two: bytes are a function of their key; a ledger says what was acknowledged; the
dead daemon's index says what was visible. A life over memory that nobody kept begins empty. One thread.
"""

import contextlib
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from kvpool import failpoint
from kvpool.errors import KVPoolError
from kvpool.failpoint import FAILPOINTS
from kvpool.router_events.columns import unpack_chunks
from kvpool.states import DEFAULT_PRIORITY, Level, levels_in
from tests.faults.rigs.kept.engine import BRIEF
from tests.faults.rigs.kept.former_life import Found, Watcher, withheld_slots
from tests.faults.rigs.kept.herd import Herd
from tests.faults.rigs.kept.prompts import REVISION, all_prompts
from tests.faults.rigs.tiered import is_dead
from tests.rigs.daemon import Daemon, wait_until

WORK_S_MAX = 0.4
START_S_MAX = 0.5
# How often a point is reached before it kills: mostly few times, sometimes many.
REACHED_MAX = 50
# Points that traffic of engines reaches, and points of a start that takes kept memory over.
OF_WORK = [
    name
    for name in FAILPOINTS
    if re.match(r"daemon\.(answer|reserve|evict|commit|end|expire|acquire|release|retain|flush|connection)\.", name)
]
OF_TAKING_OVER = [name for name in FAILPOINTS if name.startswith("daemon.keep.")]


@dataclass(slots=True)
class Tally:
    """Of a whole campaign. `visible`: chunks at the kills; `checked`: those that came back, with their right bytes;
    `retained`: those that came back with a priority of their own."""

    kills: Counter[str] = field(default_factory=Counter)
    visible: int = 0
    checked: int = 0
    retained: int = 0
    withheld_max: int = 0


class Lives:
    """See the module. `survives`: whether something keeps the memory; `evicts`: whether chunks leave DRAM by themselves;
    `has_disk`: for an SSD tier, which has more after a kill than DRAM, and may have lost what it had alone."""

    def __init__(
        self, daemon: Daemon, folder: Path, seed: int, *, survives: bool, evicts: bool, has_disk: bool = False
    ) -> None:
        self._daemon = daemon
        self._dice = random.Random(seed)
        self._survives, self._evicts, self._has_disk = survives, evicts, has_disk
        self._stack = contextlib.ExitStack()
        self._herd = self._stack.enter_context(Herd(daemon.socket, folder, seed))
        self._pools = {
            prompts: self._stack.enter_context(
                daemon.connect(layout=prompts.layout, model=prompts.model, revision=REVISION)
            )
            for prompts in all_prompts()
        }
        self.tally = Tally()
        self._watch()

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def end_one(self) -> None:
        """Work, a kill, perhaps another one in the middle of the next start, and what is there then."""
        self._herd.go()
        self._work_and_kill()
        is_exact = self._evicts or not self._survives or self._dice.random() < 0.7
        if is_exact:
            self._herd.pause()
        before = self._watcher.found()
        self.tally.visible += sum(before.values())
        if self._dice.random() < 0.1:
            self._dice.choice(self._herd.engines).kill_and_begin()
        if self._dice.random() < 0.3:
            self._kill_starts()
        self._start()
        self._herd.pause()
        self._check(before if is_exact else None)
        if self._dice.random() < 0.5:
            self._arm()

    def finish(self) -> None:
        """The engines end, everything is flushed: every slot is free."""
        if self._daemon.environment:  # this life may end at a point
            self._daemon.kill()
            self._start()
        self._herd.finish()
        with contextlib.suppress(AssertionError):  # what is held says more
            wait_until(lambda: not self._held(), "nothing is held, written or withheld any more")
        assert self._held() == {}
        assert self._daemon.problems() == []
        with self._daemon.admin() as admin:
            assert admin.flush(None, None)["skipped"] == 0
        stats = self._daemon.stats()
        assert stats["dram.chunks"] == 0
        assert stats["dram.used_bytes"] == 0
        assert stats["dram.free_segments"] == stats["dram.segments"], "every slot can be assigned again"
        assert self._daemon.problems() == []

    def _held(self) -> dict[str, object]:
        """What of an idle daemon's counts is not 0, and connections that are not of this process."""
        stats = self._daemon.stats()
        names = ("leases", "reservations", "dram.writing_chunks", "dram.zombie_slots")
        held = {name: stats[name] for name in names if stats[name]}
        others = int(stats["connections"]) - len(self._pools) - 1
        return {**held, "connections": others} if others else held

    def _start(self) -> None:
        """A life that is killed at no point, and all Pools of this process in it."""
        self._daemon.environment = {}
        self._daemon.start()
        if self._has_disk:
            self._daemon.wait_open()
        self._watch()

    def _watch(self) -> None:
        """Wait until this process has the index of the daemon's life; it may be killed at a point before."""
        wait_until(lambda: is_dead(self._daemon) or self._is_seen(), "every Pool is connected to this life")
        if not is_dead(self._daemon):
            self._watcher = Watcher(self._pools)

    def _is_seen(self) -> bool:
        with contextlib.suppress(KVPoolError, OSError):
            epoch = self._daemon.info()["epoch"]
            return all(pool.epoch.hex() == epoch for pool in self._pools.values())
        return False

    def _work_and_kill(self) -> None:
        """A kill at a random instant, or at the point that was armed; an engine is stopped or resumed somewhere before."""
        if self._herd.stopped:
            self._pass_work(WORK_S_MAX)
            self._herd.stopped[0].resume()
        is_stopping = self._dice.random() < 0.4
        self._pass_work(WORK_S_MAX)
        if is_stopping:
            self._herd.choose_writer(self._dice).stop()
            self._pass_work(0.1 * WORK_S_MAX)
        if self._daemon.environment and not is_dead(self._daemon):
            self._pass_work(4 * WORK_S_MAX)
        if not self._daemon.environment and self._dice.random() < 0.2:
            self._note_end("no kill, a stop")
            assert self._daemon.stop() == 0
            return
        self._note_end("at points" if is_dead(self._daemon) else "anywhere")
        self._daemon.kill()

    def _note_end(self, kind: str) -> None:
        """Count a life's end; whoever reads the daemon's log after a failure needs to know who was stopped at it."""
        self.tally.kills[kind] += 1
        stopped = ", ".join(engine.ledger.stem for engine in self._herd.stopped)
        print(f"{datetime.now(timezone.utc):%H:%M:%S.%f} {kind}, stopped: {stopped or 'nobody'}")

    def _pass_work(self, seconds_max: float) -> None:
        """Let them work, unless the daemon has died at a point."""
        end = time.monotonic() + self._dice.uniform(0.0, seconds_max)
        wait_until(lambda: is_dead(self._daemon) or time.monotonic() >= end, "time passes")

    def _kill_starts(self) -> None:
        """One or two starts that are killed: somewhere, or at a point of taking kept memory over."""
        for _ in range(self._dice.randint(1, 2)):
            if OF_TAKING_OVER and self._dice.random() < 0.5:
                point = f"{self._dice.choice(OF_TAKING_OVER)}:{self._dice.randint(1, 3)}:crash"
                self._daemon.environment = {failpoint.VARIABLE: point}
            self._daemon.launch()
            self._pass_work(START_S_MAX)
            self._note_end("starting")
            self._daemon.kill()

    def _arm(self) -> None:
        """Go on in a life that dies at a point of its work. Nobody works meanwhile: it has each chunk with its priority."""
        before = self._priorities()
        self._daemon.kill()
        self._note_end("idle")
        reached = round(REACHED_MAX ** self._dice.random())
        self._daemon.environment = {failpoint.VARIABLE: f"{self._dice.choice(OF_WORK)}:{reached}:crash"}
        self._daemon.launch()
        wait_until(lambda: is_dead(self._daemon) or self._daemon.answers(), "the daemon answers or has died")
        self._watch()
        if self._survives:
            self._compare_priorities(before)

    def _compare_priorities(self, before: dict[bytes, int]) -> None:
        """Each chunk has that which it had, unless that has ended."""
        with contextlib.suppress(KVPoolError, OSError):  # it may die at the point
            now = self._priorities()
            changed = {key.hex(): (was, now.get(key)) for key, was in before.items() if now.get(key) != was}
            lasting = {key: of for key, of in changed.items() if of[0] % BRIEF or of[1] != DEFAULT_PRIORITY}
            assert lasting == {}, "chunks have other priorities than before"
            self.tally.retained += sum(was != DEFAULT_PRIORITY for was in before.values())

    def _priorities(self) -> dict[bytes, int]:
        """Of each chunk in DRAM."""
        found, cursor = {}, 0
        with self._daemon.admin() as admin:
            while cursor >= 0:
                page = admin.snapshot(cursor)
                found.update(
                    {one.key: one.priority for one in unpack_chunks(page.chunks) if Level.DRAM in levels_in(one.tiers)}
                )
                cursor = page.cursor
        return found

    def _check(self, before: Found | None) -> None:
        """Every byte is right; nothing is missing, nothing has come back, the counts are recounts."""
        account = self._herd.ledgers.read()
        assert account.wrong == []
        assert "a chunk is bad" not in self._daemon.log(), (
            "no engine has found a chunk whose bytes are not its checksums'"
        )
        now = self._find_all()
        if before is not None:
            expected = before if self._survives else dict.fromkeys(before, 0)
            differing = {chain: (chunks, now[chain]) for chain, chunks in expected.items() if now[chain] != chunks}
            if self._has_disk:
                differing = {chain: (chunks, found) for chain, (chunks, found) in differing.items() if found < chunks}
            assert differing == {}, "what was visible at the kill is there, and nothing else"
        self._load_all(now)
        for model, chains in account.chains.items():
            for number, known in chains.items():
                found = now[model, number]
                assert not known.is_flushed or not found, f"{model} {number} was flushed, and has {found} chunks"
                if self._survives and not self._evicts:
                    assert found >= known.acknowledged, (
                        f"{model} {number} has {found} chunks, {known.acknowledged} were acknowledged"
                    )
        assert self._daemon.problems() == []
        stats = self._daemon.stats()
        assert self._evicts or stats["evicted_chunks"] == 0, "there is room for all of it"
        self.tally.withheld_max = max(self.tally.withheld_max, withheld_slots(self._daemon))

    def _find_all(self) -> Found:
        """How many leading chunks of each chain are found."""
        return {
            (prompts.model, number): prompts.find(pool, number)
            for prompts, pool in self._pools.items()
            for number in range(prompts.count)
        }

    def _load_all(self, now: Found) -> None:
        """All that was found loads with its right bytes; over a disk one load may evict what another one was to find."""
        for prompts, pool in self._pools.items():
            for number in range(prompts.count):
                found = now[prompts.model, number]
                loaded, wrong = prompts.load(pool, number)
                assert wrong == 0, f"{wrong} chunks of {prompts.model} {number} have other bytes"
                assert loaded == found or self._has_disk, f"{loaded} of {found} chunks of {prompts.model} {number} load"
                self.tally.checked += loaded
