"""Page store: the pages of one of SGLang's pools, on the host or on the device, found, loaded and saved in kvpool.

The parts of a page (K and V, or states and convolutions) lie at strides of their own in memory. Those of one stride are
stored together, in a namespace with a connection of its own: mostly all of them, two or three for states of Mamba. A page is
there when every part of it is. SGLang asks for host pools one by one, and puts together what they have (`hit_policy`).

Nothing here raises into SGLang: what fails is a miss, counted, logged once. Any thread; SGLang calls from its prefetch and
backup threads.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvpool.errors import LayoutMismatch
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.flushing import flush_model
from kvpool_client.engines.job_line import JobLine
from kvpool_client.engines.refusals import Refusals
from kvpool_client.engines.weights import READING, Revision
from kvpool_client.sglang.host_pages import KV, PoolPages, Shard, describe_host_pool
from kvpool_client.sglang.names import unidentified
from kvpool_client.sglang.part_store import Levels, PartStore
from kvpool_client.sglang.promises import PagePromise
from kvpool_client.sglang.settings import Settings

_log = logging.getLogger(__name__)


class PageStore:
    """One rank's pages of one host pool. Until `register` has accepted it, everything is a miss."""

    def __init__(
        self,
        settings: Settings,
        shard: Shard,
        revision: Revision | None,
        *,
        refusal: str = "",
        name: str = KV,
        line: JobLine | None = None,
    ) -> None:
        """`revision`: what names the weights. `refusal`: why nothing may be stored for this engine; empty where it may.
        `name`: SGLang's name of the host pool. `line`: connects once pages are registered, where no call of SGLang's may."""
        self._settings = settings
        self._revision = revision
        self._name = name
        self._refusal = refusal
        self._refusals = Refusals("sglang")
        self._shard = shard
        self._guard = FailureGuard(_log)
        self._host_pool: Any = None  # keeps the host memory alive
        self._page_tokens = 1
        self._parts: tuple[PartStore, ...] = ()
        self._described: tuple[PoolPages, ...] = ()
        self._is_beginning = threading.Lock()
        self._publishing = threading.Lock()  # guards what `_parts` are of: they and the revision change together
        self._leaving: list[PartStore] = []  # guarded by _publishing: those of another name
        self._line = line
        self._is_connecting = False  # a job of the line's waits for its turn

    def __repr__(self) -> str:
        return f"<PageStore {self._name} {list(self._parts)}>"

    @property
    def model(self) -> str:
        """The model's name in the daemon's pool; empty while it is not known."""
        revision = self._found_revision()
        return replace(self._settings, revision=revision).identity if revision else ""

    @property
    def refusal(self) -> str:
        """Why nothing of this host pool is stored or found; empty where it is."""
        return self._refusal

    def register(self, host_pool: Any) -> None:
        """Take SGLang's host pool and connect, as soon as the model has a name. With a pool that cannot be described,
        everything stays a miss."""
        try:
            described = () if self._refusal else describe_host_pool(host_pool, self._shard, self._name)
        except ENGINE_FAILURES as error:
            self._refuse_layout(error)
            return
        self.register_pages(described, host_pool)

    def register_pages(self, described: tuple[PoolPages, ...], owner: object) -> None:
        """Take pages that are described, and connect as soon as the model has a name. `owner` keeps their memory."""
        if self._refusal:
            self._guard.warn_once(f"kvpool shares nothing with this engine: {self._refusal}")
            return
        self._close_parts()
        self._host_pool, self._described = owner, described
        self._connect()

    def rename(self, revision: Revision) -> None:
        """The weights have changed: what was stored is another model's."""
        with self._publishing:
            self._leaving += self._parts
            self._parts, self._revision = (), revision
        self._begin_connecting()

    def count_present(self, keys: Sequence[str]) -> int:
        """How many leading pages the pool has. No request, but one for each page that a shared store is asked for."""
        if self._is_refused(len(keys)):
            return 0
        pages = len(keys)
        for part in self._parts:
            pages = part.count_present(keys[:pages])
        return pages

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which pages the pool has, for host pools that need the last ones alone."""
        if self._is_refused(len(keys)):
            return [False] * len(keys)
        found = [part.present(keys) for part in self._parts]
        return [all(of_page) for of_page in zip(*found, strict=True)]

    def levels(self, keys: Sequence[str], *, is_counted: bool) -> Levels:
        """The slowest level of each page's parts, 0 for a page that is not whole. No request."""
        if self._is_refused(len(keys)):
            return np.zeros(len(keys), np.uint8)
        found = np.stack([part.levels(keys, is_counted=is_counted) for part in self._parts])
        return np.where(found.all(axis=0), found.max(axis=0), 0).astype(np.uint8)

    def promise(self, keys: Sequence[str]) -> PagePromise:
        """Lease what is there of these pages; what is in lower tiers and on other nodes is on its way then. A request for each
        part, and for each 4096 pages."""
        parts = [(part, part.lease_batches(keys)) for part in self._parts]
        return PagePromise(keys, parts)

    def page_numbers(self, indices: object, pages: int) -> list[int]:
        """See `PoolPages`; what is registered decides. Raises LayoutMismatch."""
        if not self._described:
            raise LayoutMismatch("no pages are registered")
        return self._described[0].page_numbers(indices, pages)

    def load(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Copy pages into host memory; which leading ones are in place and verified. The rest of the pages is undefined."""
        parts = () if self._is_refused(len(keys)) else self._parts
        good = len(keys) if parts else 0
        for part in parts:
            slots = host_indices if good == len(keys) else host_indices[: good * self._page_tokens]
            good = sum(part.load(keys[:good], slots))
            if not good:
                break
        return [number < good for number in range(len(keys))]

    def save(
        self, keys: Sequence[str], host_indices: Any, extra_info: object = None, *, revision: Revision | None = None
    ) -> list[bool]:
        """Store pages from host memory; which of them are in the pool now, or just being stored by another writer.

        `extra_info`: SGLang's; hints in it set the retention of pages. `revision`: the weights that have computed them, if they
        may have got another name meanwhile.
        """
        if not self._shard.is_writer:
            return [True] * len(keys)
        is_refused = self._is_refused(len(keys))
        with self._publishing:
            parts = self._parts if revision is None or revision is self._revision else ()
        if is_refused or not parts:
            return [False] * len(keys)
        stored = [part.save(keys, host_indices, extra_info) for part in parts]
        return [all(of_page) for of_page in zip(*stored, strict=True)]

    def clear(self) -> bool:
        """Drop every chunk of this model, all ranks' and all engines', as SGLang's own backends do."""
        model = self.model
        if not model:
            self._guard.miss("clear", self._refusal or READING)
            return False
        failure = flush_model(self._settings.socket, model, self._settings.timeout_s)
        if failure:
            self._guard.miss("clear", failure)
        return not failure

    def stats(self) -> dict[str, int | float | str]:
        """Pages moved and refused, failures by call, and the Pools' own counters."""
        found: dict[str, int | float | str] = {}
        for part in self._parts:
            for name, value in part.stats().items():
                found[name] = _joined(name, found[name], value) if name in found else value
        return {**found, **self._refusals.counts(), **self._guard.counts()}

    def close(self) -> None:
        """End the connections. Idempotent; everything is a miss afterwards."""
        self._described = ()
        self._close_parts()

    def _close_parts(self) -> None:
        with self._publishing:
            self._leaving += self._parts
            self._parts = ()
        self._close_leaving()

    def _close_leaving(self) -> None:
        with self._publishing:
            leaving, self._leaving = self._leaving, []
        for part in leaving:
            part.close()

    def refuse(self, call: str, refusal: str, pages: int) -> None:
        """`call` is answered by a miss because of `refusal`, which names its remedy."""
        self._refusals.count(refusal, pages)
        self._guard.miss(call, refusal)

    def _is_refused(self, pages: int) -> bool:
        if not self._parts and self._described:
            self._begin_connecting()
        if not self._parts:
            refusal = self._refusal or (READING if self._described else "")
            if refusal:
                self._refusals.count(refusal, pages)
        return not self._parts

    def _begin_connecting(self) -> None:
        """Connect, on the line where there is one: one job waits at most, which finds the name that is the last one then."""
        if self._line is None:
            self._connect()
        elif not self._is_connecting:
            self._is_connecting = True
            if not self._line.submit("connect", self._connect_in_turn, lambda _: None):
                self._is_connecting = False

    def _connect_in_turn(self) -> None:
        self._is_connecting = False
        self._connect()

    def _connect(self) -> None:
        """Connect, if the model has a name by now; one thread does, for others everything is a miss meanwhile."""
        self._close_leaving()
        named_by = self._revision
        revision = self._found_revision()
        if revision is None or not self._is_beginning.acquire(blocking=False):
            return
        described, made = self._described, list[PartStore]()
        try:
            if self._parts:
                return
            for pages in described:
                made.append(PartStore(replace(self._settings, revision=revision), pages, self._guard))
                self._page_tokens = pages.page_tokens
            with self._publishing:
                if self._described is described and self._revision is named_by:
                    self._parts, made = tuple(made), []
        except ENGINE_FAILURES as error:
            self._refuse_layout(error)
        finally:
            self._is_beginning.release()
            for part in made:  # it has failed, or the store was closed or renamed meanwhile
                part.close()

    def _found_revision(self) -> str | None:
        """The revision; None while it is not known. A failure to find it is the refusal from then on."""
        try:
            return self._revision.find() if self._revision is not None else None
        except LayoutMismatch as error:
            if not self._refusal:
                self._refusal = unidentified(error, self._settings.source)
                self._guard.warn_once(f"kvpool shares nothing with this engine: {self._refusal}")
            return None

    def _refuse_layout(self, error: Exception) -> None:
        self._refusal = f"layout: {error}"
        self._guard.miss("register", f"kvpool shares nothing with this engine: {error}")


def _joined(name: str, one: int | float | str, other: int | float | str) -> int | float | str:
    """A counter of two parts: of pages those that both have, of failures the worse, else the sum."""
    if isinstance(one, str) or isinstance(other, str):
        return one or other
    if name in ("connected", "loaded_pages", "saved_pages", "present_pages"):
        return min(one, other)
    return max(one, other) if name in ("declined_pages", "clipped_pages") or name.startswith("late_") else one + other
