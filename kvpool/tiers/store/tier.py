"""Store tier: a Mooncake Store that many nodes share, below all tiers of this node.

It is a remote tier that can be asked and written to. Which chunks the store has is not known here: `ask` asks for them, within
a deadline, and what was answered is remembered briefly; `find` and `read` go by that. `publish` puts chunks there.
The library runs in a process of its own (`process`), objects pass through memory shared with it (`transfers`), and no byte is
believed (`objects`). Everything that fails is a miss, or a chunk that is not published.

A store that fails several times in a row, or answers late, is left alone for a while (`circuit_breaker`). Loop thread only.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpool.clock import NS_PER_S, Clock
from kvpool.config.store_options import StoreConfig
from kvpool.ids import NamespaceId
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.key_column import KeyColumn
from kvpool.peers.back_off import Uniform
from kvpool.peers.circuit_breaker import BreakerState, CircuitBreaker, Permit
from kvpool.states import Level
from kvpool.tiers.bad_chunk_log import BadChunkLog
from kvpool.tiers.base import (
    NOT_STARTED,
    UNOWNED,
    ArenaMemory,
    Counters,
    Finished,
    Info,
    JobId,
    Moves,
    Outcome,
    TierOwner,
)
from kvpool.tiers.remote import Asker, PullOrder, RemoteRun
from kvpool.tiers.store import wire
from kvpool.tiers.store.objects import ObjectForm
from kvpool.tiers.store.presence import Presence
from kvpool.tiers.store.transfers import OnEnded, Transfer, Transfers
from kvpool.transfer.child.process import ChildProcess, ChildTask, Codes, module_command

NAME = "store"
# How long a chunk counts as there after the store has answered so: it keeps what it was asked for at least 5 s.
THERE_S = 5.0
# How long an object with other bytes than the chunk's counts as absent: the store keeps the first value of a name.
WRONG_S = 60.0
# Questions without an answer.
QUESTIONS_MAX = 64
# Transfers under way: those that wait for room have their deadlines too.
FETCHES_MAX = 64
PUBLISHED_CHUNKS_MAX = 64
LEAST_BYTES_PER_S = 50 << 20
THREADS = 2
# The library's codes: no room; the master does not answer.
NO_ROOM = -200
AWAY = (-900, -901)
FORMS_MAX = 4096
COUNTED = (
    *("read_bytes", "queries", "late_answers", "wrong_objects", "gone_objects"),
    *("published_chunks", "published_bytes", "unpublished_full", "unpublished_failed", "late_transfers"),
)


@dataclass(slots=True)
class _Question:
    """Chunks that the store was asked for. `answered`: for who waits, if anybody does still; `timer`: ends its time."""

    keys: list[bytes]
    permit: Permit
    answered: "asyncio.Future[None]"
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False


class StoreTier:
    """See the module, and `Remote`."""

    name = NAME
    level = Level.STORE

    def __init__(
        self,
        memory: ArenaMemory,
        config: StoreConfig,
        *,
        clock: Clock,
        random: Uniform,
        command: Sequence[str] = module_command("kvpool.tiers.store.child"),
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._presence = Presence()
        self._bad_chunk_log = BadChunkLog(NAME, clock)
        self._breaker = breaker or CircuitBreaker(clock, random)
        settings = {
            "master": config.master,
            "host": config.own_host,
            "protocol": config.protocol,
            "metadata": config.metadata,
            "segment": config.segment,
            "replicas": config.replicas,
            "pin": config.pin,
        }
        self.process = ChildProcess(
            ChildTask("the shared store", command), settings, config.buffer, random=random, on_change=self._note_change
        )
        self._transfers = Transfers(
            memory,
            self.process,
            config.buffer,
            threads=THREADS,
            on_codes=self._note_codes,
            on_late=self._note_late,
        )
        self._forms: dict[NamespaceId, ObjectForm] = {}
        self._owner: TierOwner = UNOWNED
        self._ended: list[Finished] = []
        self._jobs = 0
        self._fetches = 0
        self._publishing_chunks = 0
        self._questions = 0
        self._moving_bytes = 0
        self._counts: Counter[str] = Counter()
        self._is_closed = False
        self.policy_stats: Callable[[], dict[str, int]] = dict  # counters of what decides which chunks are published
        self.on_room: Callable[[], None] = lambda: None  # more can be published than before

    def __repr__(self) -> str:
        return f"<StoreTier {self.process!r} {self._transfers!r}>"

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:  # noqa: ARG002 - nothing is restored
        """See `Tier`."""
        self._owner = owner
        self.process.start()

    async def close(self) -> bool:
        """See `Tier`."""
        self._is_closed = True
        has_ended = await self.process.close()
        await asyncio.get_running_loop().run_in_executor(None, self._transfers.close)
        self._transfers.end_all(Outcome.CANCELLED, "cancelled")
        self._bad_chunk_log.close()
        self._owner.on_completed()
        return has_ended

    @property
    def is_usable(self) -> bool:
        """Whether requests are sent now."""
        may_try = self._breaker.state is BreakerState.CLOSED or self._breaker.retry_s <= 0
        return not self._is_closed and self.process.is_serving and may_try

    @property
    def can_publish(self) -> bool:
        """Whether `publish` would start something."""
        return self.is_usable and self._publishing_chunks < PUBLISHED_CHUNKS_MAX

    async def find_readable(
        self, columns: Sequence[tuple[Namespace, KeyColumn]], timeout_s: float, *, are_alone: bool = False
    ) -> bytes:
        """For each of these chunks 1 where the store has it and it can be read now, else 0, as far as is known after this time
        and `answer_timeout` at most. One question at most; of a chain not for what follows a chunk that it is known to lack,
        unless the chunks `are_alone`."""
        can_read = [self._transfers.fits(self._form_of(namespace)) for namespace, _ in columns]
        readable = [column for column, may in zip(columns, can_read, strict=True) if may]
        await self._learn(readable, timeout_s, are_alone=are_alone)
        now_ns, is_usable = self._clock.now_ns(), self.is_usable
        pairs = zip(columns, can_read, strict=True)
        return bytes(
            may and is_usable and bool(self._presence.of(key, now_ns)) for (_, keys), may in pairs for key in keys
        )

    def ask_published(self, namespace: Namespace, keys: KeyColumn, on_answer: Callable[[bytes], None]) -> None:
        """Which of these chunks the store has, 1 for each, whenever it answers: nobody waits for that. It says nothing about
        the store to engines, and nothing of what it lacks is remembered. REQUIRES: `can_publish`."""

        def take(codes: Codes) -> None:
            is_answer = codes is not None and len(codes) == len(keys)
            on_answer(bytes(code == 1 for code in codes) if is_answer and codes is not None else bytes(len(keys)))

        form = self._form_of(namespace)
        self.process.send_request((wire.EXIST, [form.name_of(key) for key in keys], [], []), take)

    def find(self, namespace: Namespace, keys: KeyColumn, first: int) -> RemoteRun:
        """See `Remote`: what the store has answered for a moment ago."""
        if not self.is_usable or not self._transfers.fits(self._form_of(namespace)):
            return RemoteRun(first)
        return RemoteRun(first + self._presence.leading(keys[first:], self._clock.now_ns()))

    def find_at(self, asker: Asker, keys: KeyColumn, first: int) -> RemoteRun:  # noqa: ARG002 - a store is no node
        """See `Remote`."""
        return RemoteRun(first)

    def find_each(self, namespace: Namespace, keys: KeyColumn) -> list[tuple[str, list[int]]]:
        """See `Remote`."""
        if not self.is_usable or not self._transfers.fits(self._form_of(namespace)):
            return []
        now_ns = self._clock.now_ns()
        known = [number for number, key in enumerate(keys) if self._presence.of(key, now_ns)]
        return [("", known)] if known else []

    def read(self, namespace: Namespace, moves: Moves, order: PullOrder) -> JobId:  # noqa: ARG002 - objects have no order
        """See `Remote`."""
        permit = self._breaker.ask_permit() if self.is_usable and self._fetches < FETCHES_MAX else None
        if permit is None:
            return NOT_STARTED
        self._jobs += 1
        self._fetches += 1
        job, form = JobId(self._jobs), self._form_of(namespace)
        transfer = Transfer(
            form, moves, False, permit, lambda *ended: self._end_fetched(transfer, Finished(job, *ended))
        )
        self._begin(transfer)
        return job

    def publish(self, namespace: Namespace, moves: Moves, on_ended: OnEnded) -> bool:
        """Start to put chunks of the arena into the store. Their slots are protected until each has ended. False: nothing was
        started, and `on_ended` is never called."""
        form = self._form_of(namespace)
        permit = self._breaker.ask_permit() if self.can_publish and self._transfers.fits(form) else None
        if permit is None:
            return False
        self._publishing_chunks += len(moves)
        transfer = Transfer(form, moves, True, permit, partial(self._end_published, form, on_ended))
        self._begin(transfer)
        return True

    def completed(self) -> list[Finished]:
        """See `Tier`."""
        taken, self._ended = self._ended, []
        return taken

    def stats(self) -> Counters:
        """See `Tier`."""
        return {
            f"{NAME}.state": self._state,
            **{f"{NAME}.{name}": self._counts[name] for name in COUNTED},
            f"{NAME}.process_starts": self.process.lives,
            f"{NAME}.suspensions": self._breaker.opened,
            **{f"{NAME}.{name}": count for name, count in self.policy_stats().items()},
        }

    def info(self) -> Info:
        """See `Tier`."""
        config = self._config
        return {
            "store_master": config.master,
            "store_state": self._state,
            "store_protocol": config.protocol,
            "store_segment_bytes": config.segment,
            "store_publish": config.publish,
            **({"store_error": self.process.error} if self.process.error else {}),
        }

    def verify(self) -> list[str]:
        """See `Tier`."""
        return self._transfers.verify()

    def problems(self) -> list[str]:
        """See `Tier`."""
        return []

    def shortcomings(self) -> list[str]:
        """See `Tier`: a store that is away comes back by itself, and nothing here depends on it."""
        return []

    @property
    def _state(self) -> str:
        if not self.process.is_serving:
            return "away"
        return "ok" if self._breaker.state is BreakerState.CLOSED else "suspended"

    def _form_of(self, namespace: Namespace) -> ObjectForm:
        form = self._forms.get(namespace.id)
        if form is None or form.namespace is not namespace:
            if len(self._forms) >= FORMS_MAX:
                self._forms.clear()
            form = self._forms[namespace.id] = ObjectForm(namespace)
        return form

    async def _learn(
        self, columns: Sequence[tuple[Namespace, KeyColumn]], timeout_s: float, *, are_alone: bool
    ) -> None:
        """Ask for those of these chunks of which nothing is known, and wait for the answer while there is time."""
        now_ns = self._clock.now_ns()
        unknown: list[bytes] = []
        names: list[str] = []
        for namespace, keys in columns:
            form, first = self._form_of(namespace), len(unknown)
            for key in keys:
                is_there = self._presence.of(key, now_ns)
                if is_there is None:
                    unknown.append(key)
                elif not is_there and namespace.layout.is_chained and not are_alone:
                    break
            names += [form.name_of(key) for key in unknown[first:]]
        may_ask = unknown and self.is_usable and self._questions < QUESTIONS_MAX
        permit = self._breaker.ask_permit() if may_ask else None
        if permit is None:
            return
        loop = asyncio.get_running_loop()
        question = _Question(unknown, permit, loop.create_future())
        self._questions += 1
        self._counts["queries"] += 1
        # The store is judged by its own time: whoever asks may have less, or leave.
        question.timer = loop.call_later(self._config.answer_timeout, self._note_unanswered, question)
        self.process.send_request((wire.EXIST, names, [], []), partial(self._take_found, question))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(question.answered, min(timeout_s, self._config.answer_timeout))

    def _note_unanswered(self, question: "_Question") -> None:
        question.is_late = True
        self._counts["late_answers"] += 1
        self._breaker.fail(question.permit)

    def _begin(self, transfer: Transfer) -> None:
        """Start a transfer, which has the time of those before it too."""
        self._moving_bytes += transfer.left * transfer.form.object_bytes
        self._transfers.begin_transfer(transfer, self._config.transfer_timeout + self._moving_bytes / LEAST_BYTES_PER_S)

    def _take_found(self, question: "_Question", codes: Codes) -> None:
        """The answer to a question. A late one is no success, and its news count all the same."""
        self._questions -= 1
        if question.timer is not None:
            question.timer.cancel()
        keys = question.keys
        if codes is not None and len(codes) == len(keys):
            if any(code < 0 for code in codes):
                self._breaker.fail(question.permit)
            elif not question.is_late:
                self._breaker.succeed(question.permit)
            now_ns = self._clock.now_ns()
            there_ns, absent_ns = now_ns + int(THERE_S * NS_PER_S), now_ns + int(self._config.miss_ttl * NS_PER_S)
            for key, code in zip(keys, codes, strict=True):
                if code >= 0:
                    self._presence.note_answer(key, there_ns if code == 1 else absent_ns, is_there=code == 1)
        if not question.answered.done():
            question.answered.set_result(None)

    def _end_fetched(self, transfer: Transfer, finished: Finished) -> None:
        key, outcome = transfer.moves.keys[finished.chunk], finished.outcome
        self._moving_bytes -= transfer.form.object_bytes
        if outcome is Outcome.DONE:
            self._counts["read_bytes"] += transfer.form.object_bytes
        elif outcome is not Outcome.CANCELLED:
            is_wrong = outcome is Outcome.BAD_SOURCE
            self._counts["wrong_objects" if is_wrong else "gone_objects"] += 1
            absent_s = WRONG_S if is_wrong else self._config.miss_ttl
            self._presence.note_answer(key, self._clock.now_ns() + int(absent_s * NS_PER_S), is_there=False)
            if is_wrong:
                self._bad_chunk_log.note_bad_chunk(key, "other bytes", f"object {transfer.form.name_of(key)}")
        self._ended.append(finished)
        self._fetches -= not transfer.left
        self._owner.on_completed()

    def _end_published(self, form: ObjectForm, on_ended: OnEnded, *ended: Any) -> None:
        chunk, outcome, fault = ended
        self._publishing_chunks -= 1
        self._moving_bytes -= form.object_bytes
        if outcome is Outcome.DONE:
            self._counts["published_chunks"] += 1
            self._counts["published_bytes"] += form.object_bytes
        elif outcome is not Outcome.CANCELLED:
            self._counts["unpublished_full" if fault == f"code{NO_ROOM}" else "unpublished_failed"] += 1
        on_ended(chunk, outcome, fault)
        self.on_room()

    def _note_change(self) -> None:
        self._presence.clear()
        if self.process.is_serving:
            self._breaker.reset()
        self._transfers.note_change()
        self.on_room()

    def _note_codes(self, permit: Permit, codes: list[int]) -> None:
        """Judge the store by an answer: only a master that is away is its fault, other codes are about objects."""
        is_away = any(code in AWAY for code in codes)
        (self._breaker.fail if is_away else self._breaker.succeed)(permit)

    def _note_late(self, permit: Permit) -> None:
        self._counts["late_transfers"] += 1
        self._breaker.fail(permit)
