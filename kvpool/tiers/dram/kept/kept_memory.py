"""Kept memory: what of this life outlives it, and what it has of the life before.

    find ──former memory, or a cold start and why──► (the start may be refused) ──► drop the rest ──► begin
     ──namespaces, holders──► hand over ──► kept ──► ended
                                            ▲  │ its keeper has gone, or does not answer
                                            └──┘ give again

The former life's files stay with the keeper until all of this life's are there: whoever dies in between has left one whole
set. A keeper that cannot be asked is forsaken: another life's memory must not come back after this one. From `hand_over` on the
life may change the arena, and not before. What cannot be kept costs the next life its start, and this one nothing: it is logged
once, and shown.

Control thread only. Invariant: while `is_kept`, the keeper has the arena, the life page, and index, records and book of this
life; every namespace with chunks and every connection that may write is in the book.
"""

import asyncio
import logging
import os
from dataclasses import dataclass

import kvpool_native
from kvpool import failpoint
from kvpool.clock import NS_PER_S, Clock
from kvpool.config.config import Config
from kvpool.index.holders import Holder, process_of
from kvpool.index.namespaces import Namespace
from kvpool.tiers.dram.kept.book import PLACES_MAX, Book, BookFull, note_attempts, revoke_book
from kvpool.tiers.dram.kept.former import ColdStart, FormerMemory, Terms, files_in_book, find_former, lives_in, terms_of
from kvpool.tiers.dram.kept.keeper import ARENA, BOOK, INDEX, LIFE_PAGE, RECORDS, Keeper, KeeperFault, name_of
from kvpool.tiers.dram.kept.life_page import LifePage

log = logging.getLogger(__name__)

BLOCK_BYTES = 512  # of st_blocks


@dataclass(frozen=True, slots=True)
class LifeFiles:
    """Files of a life's memory, beside its book."""

    arena: kvpool_native.Mapping
    life_page: LifePage
    index: kvpool_native.Mapping
    records: kvpool_native.Mapping


class KeptMemory:
    """See the module. `former`: the memory to be taken over, until `hand_over`; `reason`: why there is none, or empty."""

    def __init__(
        self, keeper: Keeper | None, domain_tag: bytes, clock: Clock, *, why_nobody: str = "", why_cold: str = ""
    ) -> None:
        """`why_nobody`: why there is no keeper; `why_cold`: why this life goes on from no other one. Empty: for nothing."""
        self._keeper = keeper
        self._domain_tag = domain_tag
        self._clock = clock
        self._terms: Terms = {}
        self._book: Book | None = None
        self._given: dict[str, int] = {}  # names and descriptors of this life's memory
        self._to_give: list[str] = []  # of these, what the keeper does not have
        self._lasting: list[str] = []  # names of the former life's at the keeper
        self._since_ns = 0
        self._why_cold = why_cold
        self._why_ended = ""  # why nobody is to keep this life's, though there is a keeper
        self._found: dict[str, int] = {}  # what the keeper has, until `drop_unused`
        self._former_book: int | None = None  # until the end of `hand_over`
        self._is_forsaken = False
        self._taken = ""
        self.life = 0
        self.first_holder = 1
        self.former: FormerMemory | None = None
        self.reason = ""
        self.is_kept = False
        self.why_unkept = why_nobody

    def __repr__(self) -> str:
        return f"<KeptMemory life {self.life}, {'kept' if self.is_kept else self.why_unkept or 'not yet kept'}>"

    @property
    def is_wanted(self) -> bool:
        """Whether there is somebody to keep it."""
        return self._keeper is not None

    def find_memory(self, config: Config, geometry: kvpool_native.DirectoryGeometry) -> FormerMemory | None:
        """Find the memory of the former life. Nothing of it is dropped or changed: the start may still be refused. Raises
        OSError where this process has no room to map it."""
        self.life = 1
        if self._keeper is None:
            self.reason = self.why_unkept
            return None
        try:
            self._terms = terms_of(config, geometry, self._domain_tag)
        except OSError as error:
            self._why_ended = f"what a next life must compare cannot be read: {error}"
        try:
            self._found = self._keeper.take_memory()
            self.life = max(lives_in(self._found), default=0) + 1
            if reason := self._why_ended or (self._found and self._why_cold):
                raise ColdStart(reason)
            self.former = find_former(self._found, self._terms, geometry)
        except KeeperFault as error:
            self._is_forsaken = True
            self.reason = f"{self._keeper.name}: {error}"
        except ColdStart as error:
            self.reason = str(error)
        if self.former is not None:
            self.first_holder = self.former.book.first_unused
        return self.former

    def leave_found(self) -> None:
        """Neither take over nor drop what was found."""
        for descriptor in self._found.values():
            os.close(descriptor)
        self._found = {}

    @property
    def bytes_to_drop(self) -> int:
        """Bytes of memory that `drop_unused` frees."""
        kept = self._names_of_former()
        sizes = {
            os.fstat(found).st_ino: os.fstat(found).st_blocks for name, found in self._found.items() if name not in kept
        }
        return sum(sizes.values()) * BLOCK_BYTES

    def drop_unused(self) -> None:
        """Drop what is found and not taken over, before any other memory is used. A keeper that cannot be asked is forsaken."""
        kept, found = self._names_of_former(), self._found
        self._lasting = [name for name in kept if name not in (ARENA, LIFE_PAGE)]
        self._found = {}
        for name, descriptor in found.items():
            if name in kept and name.startswith(BOOK):
                self._former_book = descriptor  # for `begin_takeover`
                continue
            if name.startswith(BOOK):
                revoke_book(descriptor)  # its memory goes out of date, even if the keeper should keep it
            os.close(descriptor)
        if self._keeper is not None and self._is_forsaken:
            log.warning("memory of an earlier life may be taken until its keeper ends: %s", self.reason)
            self._keeper.forsake()
        self._drop([name for name in found if name not in kept])
        if self._why_ended:
            self._keeper, self.why_unkept = None, self._why_ended
        if self.reason:
            is_lost = bool(found) and self.former is None
            log.log(logging.WARNING if is_lost else logging.INFO, "dram begins empty: %s", self.reason)

    def begin_takeover(self) -> None:
        """Count this life among those that may die of what they take over, from now to the end of `hand_over`."""
        if self._former_book is not None and self.former is not None:
            note_attempts(self._former_book, self.former.book.attempts + 1)

    def give_attempt_back(self) -> None:
        """This life ends before the end of `hand_over`, and not of what it takes over. Safe in a signal's handler."""
        if self._former_book is not None and self.former is not None:
            note_attempts(self._former_book, self.former.book.attempts)

    def begin_life(self, epoch: bytes, files: LifeFiles, places: int) -> None:
        """Begin the book of this life. `places`: how many connections may write at a time."""
        former, own = self.former, process_of(os.getpid())
        self._since_ns = self._clock.now_ns() if former is None else int(former.book.head["since_ns"])
        head = {
            "terms": self._terms,
            "files": files_in_book(files.arena.fd, files.life_page.fd, files.index.fd, files.records.fd),
            "process": [own.pid, own.start],
            "epoch": epoch,
            "since_ns": self._since_ns,
        }
        try:
            self._book = Book(head, min(places, PLACES_MAX), self.first_holder - 1)
        except (OSError, BookFull) as error:
            self.end(f"there is no memory for its book: {error}")
            return
        lasting = [] if former is not None and not self._is_forsaken else [ARENA, LIFE_PAGE]
        own_files = {INDEX: files.index.fd, RECORDS: files.records.fd, BOOK: self._book.descriptor}
        self._given = {ARENA: files.arena.fd, LIFE_PAGE: files.life_page.fd} | {
            name_of(kind, self.life): descriptor for kind, descriptor in own_files.items()
        }
        self._to_give = [*lasting, *(name_of(kind, self.life) for kind in own_files)]

    def note_taken(self, taken: str) -> None:
        """What was taken over, and of which life, on one line."""
        self._taken = taken
        log.info("dram goes on from %s", self._taken)

    def note_namespace(self, namespace: Namespace) -> None:
        """A namespace is new, and has no chunks yet."""
        if self._book is not None:
            try:
                self._book.add_namespace(namespace.id, namespace.model, namespace.layout)
            except BookFull:
                self.end("its book has no room for a further namespace")

    def forget_namespace(self, namespace: Namespace) -> None:
        """A namespace without chunks is one no more."""
        if self._book is not None:
            try:
                self._book.remove_namespace(namespace.id)
            except BookFull:
                self.end("its book has no room for a further entry")

    def note_holder(self, holder: Holder) -> None:
        """A connection may write from now on."""
        if self._book is not None:
            try:
                self._book.enter_holder(holder)
            except BookFull:
                self.end("its book has no room for a further connection")

    def forget_holder(self, number: int) -> None:
        """A connection can write no more."""
        if self._book is not None:
            self._book.remove_holder(number)

    def hand_over(self) -> None:
        """Have the keeper keep this life's memory in place of the former one's, which nobody needs any more after that."""
        if self._keeper is None or self._book is None:
            return
        self._book.mark_complete()
        failpoint.reach("daemon.keep.before_give")
        try:
            for name in self._to_give:
                self._keeper.give_memory(name, self._given[name])
                failpoint.reach("daemon.keep.given")
            if not self._is_forsaken:
                self._keeper.drop_memory(self._lasting)
        except KeeperFault as error:
            if self._keeper.forsake():
                log.warning("dram is kept by nobody yet: %s", error)
                self.note_lost(str(error))
            else:
                self.end(str(error))
        else:
            self.is_kept = True
        failpoint.reach("daemon.keep.after_drop")
        self._end_takeover()

    def _end_takeover(self) -> None:
        book, self.former, self._former_book = self._former_book, None, None
        if book is not None:
            os.close(book)

    async def give_again(self) -> bool:
        """Have another keeper keep this life's memory, whose keeper has gone; whether it does. Not twice at a time. REQUIRES:
        `can_be_kept`."""
        keeper = self._keeper
        assert keeper is not None
        try:
            await asyncio.get_running_loop().run_in_executor(None, _give_all, keeper, dict(self._given))
        except KeeperFault as error:
            keeper.forsake()
            self.note_lost(str(error))
            return False
        if self._book is None:  # it was ended meanwhile
            self.drop()
            return False
        self.is_kept, self._since_ns, self.why_unkept = True, self._clock.now_ns(), ""
        return True

    @property
    def can_be_kept(self) -> bool:
        """Whether this life's memory is kept, or another keeper could have it."""
        return self._keeper is not None and self._book is not None

    def note_lost(self, reason: str) -> None:
        """The keeper has gone, and what it had of this life with it."""
        self.is_kept, self.why_unkept = False, reason

    def end(self, reason: str) -> None:
        """Keep this life's memory no more: what the keeper has is dropped. Logged once."""
        log.warning("dram is not kept for the next start: %s", reason)
        self.drop()
        self._book = None
        self._end_takeover()
        self.note_lost(reason)

    def drop(self) -> None:
        """Have the keeper drop everything of this life and the former one, which nobody may believe any more if it does not."""
        if self._book is not None:
            revoke_book(self._book.descriptor)
        if self.life:
            self._drop([*self._names_of(self.life), *self._lasting])
        self.is_kept = False

    def why_it_may_end(self, *, is_restart: bool) -> str:
        """Why this life's memory may not outlive a stop; see `Keeper`."""
        if self._keeper is None or not self.is_kept:
            return f"nobody keeps it: {self.why_unkept or 'not yet'}"
        reason = self._keeper.why_it_may_end(is_restart=is_restart)
        return f"{self._keeper.name} may not outlive this stop with it: {reason}" if reason else ""

    @property
    def keeper_name(self) -> str:
        """Who keeps it, for people; empty for nobody."""
        return "" if self._keeper is None else self._keeper.name

    def report(self) -> dict[str, str | int | float]:
        """For operators: who keeps it and since when, and what became of the former life's."""
        kept_by = self.keeper_name if self.is_kept else f"nobody: {self.why_unkept or 'not yet'}"
        kept_for_s = (self._clock.now_ns() - self._since_ns) / NS_PER_S if self.is_kept else 0.0
        return {
            "dram_kept_by": kept_by,
            "dram_kept_for_s": round(kept_for_s, 3),
            "dram_life": self.life,
            "dram_began": f"from {self._taken}" if self._taken else f"empty: {self.reason or 'nothing was kept'}",
        }

    def _names_of(self, life: int) -> list[str]:
        """The book first: without it the others are nobody's."""
        return [*(name_of(kind, life) for kind in (BOOK, RECORDS, INDEX)), LIFE_PAGE, ARENA]

    def _names_of_former(self) -> list[str]:
        return [] if self.former is None else self._names_of(self.former.number)

    def _drop(self, names: list[str]) -> None:
        if self._keeper is None or not names:
            return
        name = self._keeper.name  # which the process has no more when it does not answer
        try:
            self._keeper.drop_memory(names)
        except KeeperFault as error:
            log.warning(
                "%s may still have memory of this daemon or an earlier one, which its end frees: %s", name, error
            )
            self._is_forsaken = self._keeper.forsake()


def _give_all(keeper: Keeper, files: dict[str, int]) -> None:
    """Have a keeper have these files and no others. Any thread; raises KeeperFault."""
    found = keeper.take_memory()
    for descriptor in found.values():
        os.close(descriptor)
    keeper.drop_memory(found)
    for name, descriptor in files.items():
        keeper.give_memory(name, descriptor)
