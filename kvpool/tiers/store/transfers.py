"""Transfers: chunks on their way between the arena and the shared store, through the memory that the store process has too.

    fetch     WAITING ──room──► ASKED ──its bytes are here──► COPYING ──header and checksums fit──► DONE
    publish   WAITING ──room──► COPYING ──checksums fit──► ASKED ──stored──► DONE
    any but COPYING ──its deadline, a refusal, the process ended──► ended

A chunk that is copied is copied to its end, whatever happens meanwhile: its slot in the arena is protected until it has ended.
What was asked for keeps its range of the memory until the process has answered or ended, because the library may write there
that long. Checksums are of the bytes that the copy stored, on both ways.

Loop thread only, but for the copies. Invariants: each chunk ends exactly once; a range is given back once, to the ranges of the
life that it is from.
"""

import asyncio
import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np

import kvpool_native
from kvpool.peers.circuit_breaker import Permit
from kvpool.tiers.base import ArenaMemory, Moves, Outcome
from kvpool.tiers.store import wire
from kvpool.tiers.store.objects import ObjectForm
from kvpool.transfer.child.process import ChildProcess, Codes
from kvpool.transfer.ranges import Ranges

# Chunks and bytes of one request, and requests without an answer: one is under way while another is copied. The library is no
# faster with more than a MiB at once (measured), and whoever loads follows request by request.
BATCH_CHUNKS = 16
BATCH_BYTES = 4 << 20
REQUESTS_MAX = 8


class Stage(Enum):
    """Where a chunk is; see the module."""

    WAITING = 0
    ASKED = 1
    COPYING = 2
    ENDED = 3


# Called for each chunk of a transfer once: its number, how it ended, and a word for what went wrong.
OnEnded = Callable[[int, Outcome, str], None]


@dataclass(slots=True, eq=False)
class Transfer:
    """Some chunks of a namespace that are fetched, or published. `permit`: of its requests."""

    form: ObjectForm
    moves: Moves
    is_publish: bool
    permit: Permit
    on_ended: OnEnded
    stages: list[Stage] = field(init=False)
    deadline: asyncio.TimerHandle | None = None
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.stages = [Stage.WAITING] * len(self.moves)
        self.left = len(self.moves)


@dataclass(frozen=True, slots=True)
class _Place:
    """A chunk's range in the memory of one life of the process."""

    transfer: Transfer
    chunk: int
    offset: int
    ranges: Ranges
    memory: kvpool_native.Mapping


# Judges the store by an answer to a request with this permit.
OnCodes = Callable[[Permit, list[int]], None]


class Transfers:
    """See the module. `on_codes` sees the codes of each answer, `on_late` is called where a deadline has passed."""

    def __init__(
        self,
        memory: ArenaMemory,
        process: ChildProcess,
        buffer_bytes: int,
        *,
        threads: int,
        on_codes: OnCodes,
        on_late: Callable[[Permit], None],
    ) -> None:
        self._arena = memory.arena
        self._index = kvpool_native.IndexView(memory.index)
        self._landings = kvpool_native.LandingBoard(memory.index)
        self._process = process
        self._half = buffer_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self._threads = ThreadPoolExecutor(threads, "kvpool-store")
        self._on_codes = on_codes
        self._on_late = on_late
        self._fetch_ranges, self._publish_ranges = self._new_ranges()
        self._waiting: tuple[deque[Transfer], deque[Transfer]] = (deque(), deque())
        self._under_way: set[Transfer] = set()
        self._asked = [0, 0]

    def __repr__(self) -> str:
        return f"<Transfers {len(self._under_way)} under way>"

    def __len__(self) -> int:
        return len(self._under_way)

    def fits(self, form: ObjectForm) -> bool:
        """Whether such chunks can pass at all."""
        return self._fetch_ranges.fits(form.object_bytes)

    def begin_transfer(self, transfer: Transfer, timeout_s: float) -> None:
        """Start a transfer, which ends within the time, but for chunks that are being copied then."""
        loop = asyncio.get_running_loop()
        transfer.deadline = loop.call_later(timeout_s, self._end_late, transfer)
        self._under_way.add(transfer)
        self._waiting[transfer.is_publish].append(transfer)
        self._go_on()

    def note_change(self) -> None:
        """The process serves, or does not any longer: each life has memory of its own."""
        self._fetch_ranges, self._publish_ranges = self._new_ranges()
        if self._process.is_serving:
            self._go_on()
        else:
            self.end_all(Outcome.FAILED, "away")

    def end_all(self, outcome: Outcome, fault: str) -> None:
        """End every chunk that is not being copied."""
        for transfer in list(self._under_way):
            self._end_rest(transfer, outcome, fault)

    def close(self) -> None:
        """Wait for the copies. Any thread; nothing is begun any more."""
        self._threads.shutdown()

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        wrong = [one for one in self._under_way if one.left != sum(stage is not Stage.ENDED for stage in one.stages)]
        return [f"store: {len(wrong)} transfers have another number of chunks left than was counted"] if wrong else []

    def _new_ranges(self) -> tuple[Ranges, Ranges]:
        return Ranges(0, self._half), Ranges(self._half, self._half)

    def _go_on(self) -> None:
        """Begin what there is room for."""
        for is_publish, waiting in enumerate(self._waiting):
            while waiting and self._process.is_serving and self._asked[is_publish] < REQUESTS_MAX:
                transfer = waiting[0]
                places = self._place_next(transfer, self._publish_ranges if is_publish else self._fetch_ranges)
                if Stage.WAITING not in transfer.stages:
                    waiting.popleft()
                elif not places:
                    break  # no room until others have ended
                if places and is_publish:
                    self._copy_out(places)
                elif places:
                    self._ask(places)

    def _place_next(self, transfer: Transfer, ranges: Ranges) -> list[_Place]:
        """Ranges for the next chunks of a transfer, as many as one request takes."""
        places: list[_Place] = []
        size, memory = transfer.form.object_bytes, self._process.memory
        assert memory is not None
        most = max(1, min(BATCH_CHUNKS, BATCH_BYTES // size))
        for chunk, stage in enumerate(transfer.stages):
            if stage is not Stage.WAITING or len(places) == most:
                continue
            offset = ranges.take_range(size)
            if offset is None:
                break
            transfer.stages[chunk] = Stage.ASKED
            places.append(_Place(transfer, chunk, offset, ranges, memory))
        return places

    def _ask(self, places: list[_Place]) -> None:
        """Have the process move objects to or from these places."""
        transfer = places[0].transfer
        if places[0].memory is not self._process.memory or not self._process.is_serving:
            for place in places:
                self._end(place, Outcome.FAILED, "away")
            return
        self._asked[transfer.is_publish] += 1
        verb = wire.PUT if transfer.is_publish else wire.GET
        names = [transfer.form.name_of(transfer.moves.keys[place.chunk]) for place in places]
        offsets, sizes = [place.offset for place in places], [transfer.form.object_bytes] * len(places)
        self._process.send_request((verb, names, offsets, sizes), partial(self._take_answer, places))

    def _take_answer(self, places: list[_Place], codes: Codes) -> None:
        transfer = places[0].transfer
        self._asked[transfer.is_publish] -= 1
        good = 0 if transfer.is_publish else transfer.form.object_bytes
        found = codes if codes is not None and len(codes) == len(places) else [-1] * len(places)
        if codes is not None:
            self._on_codes(transfer.permit, codes)
        fetched = []
        for place, code in zip(places, found, strict=True):
            if transfer.stages[place.chunk] is Stage.ENDED:  # too late for it: now its range is free
                place.ranges.give(place.offset, transfer.form.object_bytes)
            elif code != good:
                self._end(place, Outcome.FAILED, "away" if codes is None else f"code{code}")
            elif transfer.is_publish:
                self._end(place, Outcome.DONE, "")
            else:
                fetched.append(place)
        if fetched:
            self._copy_in(fetched)
        self._go_on()

    def _copy_in(self, places: list[_Place]) -> None:
        for place in places:
            place.transfer.stages[place.chunk] = Stage.COPYING
            self._on_thread(partial(self._fetch_one, place), partial(self._end_fetched, place))

    def _end_fetched(self, place: _Place, is_right: bool) -> None:
        self._end(place, Outcome.DONE if is_right else Outcome.BAD_SOURCE, "" if is_right else "wrong")
        self._go_on()

    def _copy_out(self, places: list[_Place]) -> None:
        copied: list[_Place] = []
        left = [len(places)]
        self._asked[True] += 1  # the copy counts as a request: it holds ranges

        def take(place: _Place, is_right: bool) -> None:
            left[0] -= 1
            if is_right:
                place.transfer.stages[place.chunk] = Stage.ASKED
                copied.append(place)
            else:
                self._end(place, Outcome.BAD_SOURCE, "checksum")
            if not left[0]:
                self._asked[True] -= 1
                if copied:
                    self._ask(copied)
                self._go_on()

        for place in places:
            place.transfer.stages[place.chunk] = Stage.COPYING
            self._on_thread(partial(self._publish_one, place), partial(take, place))

    def _on_thread(self, work: Callable[[], bool], then: Callable[[bool], None]) -> None:
        loop = asyncio.get_running_loop()
        task = self._threads.submit(work)
        task.add_done_callback(lambda done: loop.call_soon_threadsafe(then, done.exception() is None and done.result()))

    def _fetch_one(self, place: _Place) -> bool:
        """Copy an object's extents into the slot and announce them, if they are this chunk's. On a thread."""
        form, moves, chunk = place.transfer.form, place.transfer.moves, place.chunk
        page = place.memory.view()[place.offset : place.offset + form.header_bytes].tobytes()
        expected = form.checksums_in(page, moves.keys[chunk])
        if not expected:
            return False
        target = np.array([moves.arena_offsets[chunk]], "<u8").tobytes()
        source = place.offset + form.header_bytes
        found = kvpool_native.copy_extents(self._arena, target, place.memory, source, form.extents, form.extent_bytes)
        if found != expected:
            return False
        self._landings.land(moves.arena_slots[chunk], 0, found)
        return True

    def _publish_one(self, place: _Place) -> bool:
        """Copy a chunk with its header into the memory, if it has its checksums. On a thread."""
        form, moves, chunk = place.transfer.form, place.transfer.moves, place.chunk
        target = np.array([place.offset + form.header_bytes], "<u8").tobytes()
        found = kvpool_native.copy_extents(
            place.memory, target, self._arena, moves.arena_offsets[chunk], form.extents, form.extent_bytes
        )
        expected = np.array(
            [self._index.checksum_at(moves.arena_slots[chunk], extent) for extent in range(form.extents)], "<u4"
        )
        if found != expected.tobytes():
            return False
        header = np.frombuffer(form.header_of(moves.keys[chunk], found), np.uint8)
        place.memory.view()[place.offset : place.offset + form.header_bytes] = header
        return True

    def _end(self, place: _Place, outcome: Outcome, fault: str) -> None:
        """A chunk that has a range ends, and nobody writes there any more."""
        place.ranges.give(place.offset, place.transfer.form.object_bytes)
        self._report(place.transfer, place.chunk, outcome, fault)

    def _end_late(self, transfer: Transfer) -> None:
        self._on_late(transfer.permit)
        self._end_rest(transfer, Outcome.FAILED, "late")

    def _end_rest(self, transfer: Transfer, outcome: Outcome, fault: str) -> None:
        """End the chunks that are not being copied; what was asked for keeps its ranges."""
        for chunk, stage in enumerate(transfer.stages):
            if stage in (Stage.WAITING, Stage.ASKED):
                self._report(transfer, chunk, outcome, fault)

    def _report(self, transfer: Transfer, chunk: int, outcome: Outcome, fault: str) -> None:
        if transfer.stages[chunk] is Stage.ENDED:
            return
        transfer.stages[chunk] = Stage.ENDED
        transfer.left -= 1
        if not transfer.left:
            self._under_way.discard(transfer)
            if transfer in self._waiting[transfer.is_publish]:
                self._waiting[transfer.is_publish].remove(transfer)
            if transfer.deadline is not None:
                transfer.deadline.cancel()
        if outcome is not Outcome.DONE and not transfer.is_publish:
            self._landings.fail(transfer.moves.arena_slots[chunk])
        transfer.on_ended(chunk, outcome, fault)
