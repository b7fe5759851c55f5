"""Adapter that LMCache's factory makes: its tasks over ObjectStores.

Imports lmcache; nothing else in `kvpool_client` imports this module. LMCache's store and prefetch threads submit tasks, which
return at once: what shared memory answers is answered there, all else runs on threads of the adapter's, and LMCache is woken by
the descriptor of its kind. LMCache has no deadlines, so every task ends by one of its own, or as soon as its line is full.

Objects are answered one by one: what was not loaded and verified is a miss, and LMCache's engine computes it. A store counts as
done when all of its objects are in the pool. The pool evicts by itself and deletes no single object for a client: `delete` does
nothing, no keys are listed, and LMCache is not notified of what is stored, since it would not be of what is evicted.
Threads: any.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvpool.clock import Deadline
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.job_line import JobLine
from kvpool_client.lmcache.locks import Locks
from kvpool_client.lmcache.object_layout import SEVERAL, Form, form_of, form_of_object, is_serialized
from kvpool_client.lmcache.object_names import by_chunk, names_of
from kvpool_client.lmcache.object_store import ObjectStore
from kvpool_client.lmcache.object_stores import ObjectStores
from kvpool_client.lmcache.settings import Settings
from kvpool_client.lmcache.task_results import TaskResults
from kvpool_client.named_keys import Names
from kvpool_client.verbs.lease import Lease

_log = logging.getLogger(__name__)
LOOKUPS_MAX = 1024
# Stores and loads that wait: LMCache has their objects pinned in its L1 meanwhile (guess).
TRANSFERS_MAX = 256
# Loads at once: one that waits for a disk or another node holds up none that is in DRAM (guess).
LOAD_THREADS = 4
FORMS_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Part:
    """Objects of one model and form: which of a task's they are. `form` None: nothing is known of them."""

    model: str
    form: Form | None
    places: npt.NDArray[np.int64]


class KVPoolAdapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache's class is untyped here
    """See `kvpool_client.lmcache`. Configured by `adapter_params`; raises ConfigError where they are wrong."""

    def __init__(
        self,
        adapter_params: Mapping[str, object],
        l1_memory_desc: object = None,  # noqa: ARG002  # LMCache passes it by this name
    ) -> None:
        """`l1_memory_desc`: LMCache's L1, of which nothing needs to be registered."""
        super().__init__()
        settings = Settings.read(adapter_params)
        self._settings = settings
        self._guard = FailureGuard(_log)
        self._object_stores = ObjectStores(settings, self._guard)
        self._locks = Locks(settings.lock_timeout_s)
        self._forms: dict[tuple[str, int, int], Form] = {}  # of each model, world and group the last one that was moved
        # What LMCache describes of each; SEVERAL where that was not always the same.
        self._described: dict[tuple[str, int, int], Form] = {}
        self._stored: TaskResults[Any] = TaskResults(create_event_notifier())
        self._looked_up: TaskResults[Any] = TaskResults(create_event_notifier())
        self._loaded: TaskResults[Any] = TaskResults(create_event_notifier())
        self._lookups = JobLine("kvpool-lookup", self._guard, jobs_max=LOOKUPS_MAX)
        self._loads = JobLine("kvpool-load", self._guard, jobs_max=TRANSFERS_MAX, threads=LOAD_THREADS)
        self._stores = JobLine("kvpool-store", self._guard, jobs_max=TRANSFERS_MAX)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<KVPoolAdapter {self._object_stores!r}>"

    def get_store_event_fd(self) -> int:
        """The descriptor of stores."""
        return self._stored.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        """The descriptor of lookups."""
        return self._looked_up.descriptor

    def get_load_event_fd(self) -> int:
        """The descriptor of loads."""
        return self._loaded.descriptor

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects; the task's id."""
        task, deadline = self._stored.begin(), Deadline(self._settings.task_timeout_s)
        self._stores.submit("store", partial(self._store, keys, objects, deadline), partial(self._end_store, task))
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """How stores have ended since."""
        return self._stored.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Look objects up and lock those that are there; the task's id. What is nowhere is answered at once."""
        task, deadline = self._looked_up.begin(), Deadline(self._settings.timeout_s)
        found = self._guard.call("lookup", None, self._probe, keys, group_layout_descs)
        if isinstance(found, np.ndarray):
            self._end_lookup(task, len(keys), found)
        else:
            run = partial(self._lock, keys, group_layout_descs, deadline)
            self._lookups.submit("lookup", run, partial(self._end_lookup, task, len(keys)))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """What a lookup has found and locked, a Bitmap, once; None while it has not ended."""
        return self._looked_up.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """End one lock of each key. Never waits."""
        self._guard.call("unlock", None, self._locks.unlock, keys)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load objects; the task's id."""
        task, deadline = self._loaded.begin(), Deadline(self._settings.task_timeout_s)
        run = partial(self._load, keys, objects, deadline)
        self._loads.submit("load", run, partial(self._end_load, task, len(keys)))
        return task

    def query_load_result(self, task_id: int) -> Any:
        """What a load has brought, a Bitmap, once; None while it has not ended."""
        return self._loaded.take(task_id)

    def get_memory_tags(self) -> Any:
        """Storage of this host, whatever tier and node the bytes come from."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags  # not in 0.5.6

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.LOCAL)

    def report_status(self) -> dict[str, object]:
        """Healthy as long as it answers, as it does without a daemon; beside that its counters, of each model and form, and
        tasks that are open."""
        return {
            "is_healthy": not self._is_closed,
            "type": type(self).__name__,
            "is_connected": self._object_stores.is_connected,
            "open_lookups": len(self._lookups),
            "open_loads": len(self._loads),
            "open_stores": len(self._stores),
            "locks": len(self._locks),
            **self._guard.counts(),
            **self._object_stores.stats(),
        }

    def close(self) -> None:
        """End the connections and every task; nothing reads or writes LMCache's memory afterwards. Idempotent."""
        self._is_closed = True
        self._object_stores.close()
        for line in (self._lookups, self._loads, self._stores):
            line.close()
        self._locks.close()
        for results in (self._stored, self._looked_up, self._loaded):
            results.close()

    def _probe(self, keys: Sequence[Any], descs: Mapping[int, Any]) -> npt.NDArray[np.int64] | None:
        """What a lookup finds, where no request is needed for that; else None."""
        probed: list[tuple[ObjectStore, Any, _Part]] = []
        names = names_of(keys)
        for part in self._parts_of(keys, descs):
            if part.form is None:
                continue
            store = self._object_stores.find(part.model, part.form)
            if store is None:
                return None
            levels = store.probe(names[part.places])
            if store.must_ask(levels):
                return None
            probed.append((store, levels, part))
        for store, levels, _ in probed:
            store.note_lookup(levels)
        return _joined([part.places[levels > 0] for _, levels, part in probed])

    def _lock(self, keys: Sequence[Any], descs: Mapping[int, Any], deadline: Deadline) -> npt.NDArray[np.int64]:
        names, leases, found = names_of(keys), list[Lease](), list[npt.NDArray[np.int64]]()
        for part in self._parts_of(keys, descs):
            if part.form is None or deadline.has_passed():
                continue
            store = self._object_stores.open(part.model, part.form, len(part.places), deadline)
            if store is not None:
                locked = store.lock(names[part.places], deadline)
                leases += locked.leases
                found.append(part.places[locked.found])
        places = _joined(found)
        self._locks.add_lock([keys[place] for place in places.tolist()], leases)
        return places

    def _load(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> npt.NDArray[np.int64]:
        found = []
        for store, places, names, memories in self._moves(keys, objects, deadline):
            found.append(places[store.load(names, memories, deadline)])
        places = _joined(found)
        self._guard.call("notify", None, self._notify_keys_accessed, [keys[place] for place in places.tolist()])
        return places

    def _store(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> tuple[bool, int]:
        left, stored_bytes = len(keys), 0
        for store, places, names, memories in self._moves(keys, objects, deadline):
            is_whole, stored = store.save(names, memories, deadline)
            left -= len(places) if is_whole else 0
            stored_bytes += stored * store.object_bytes
        return left == 0, stored_bytes

    def _moves(
        self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline
    ) -> Iterator[tuple[ObjectStore, npt.NDArray[np.int64], Names, list[Any]]]:
        """The stores of these objects, and of each which of them are its own, with their names."""
        names, places_of = names_of(keys), dict[tuple[str, Form], list[int]]()
        forms = [self._form_of(key, memory) for key, memory in zip(keys, objects, strict=True)]
        for place in by_chunk(keys):
            places_of.setdefault((keys[place].model_name, forms[place]), []).append(place)
            self._note_form(keys[place], forms[place])
        for (model, form), chosen in places_of.items():
            store = self._object_stores.open(model, form, len(chosen), deadline)
            if store is None:
                continue
            places = np.array(chosen, np.int64)
            yield store, places, names[places], [objects[place] for place in chosen]

    def _parts_of(self, keys: Sequence[Any], descs: Mapping[int, Any]) -> list[_Part]:
        """Keys by their model and form: that of the last objects of their group that were moved, else the one that LMCache
        describes, which is not that of objects that it serializes."""
        places_of: dict[tuple[str, int, int], list[int]] = {}
        for place in by_chunk(keys):
            key = keys[place]
            places_of.setdefault(_kind_of(key), []).append(place)
        joined: dict[tuple[str, Form | None], list[int]] = {}
        for kind, places in places_of.items():
            form = self._forms.get(kind)
            described = form_of(descs[kind[2]]) if kind[2] in descs else None
            if described is not None:
                self._note_description(kind, described)
            if form is None:
                form = described
            elif is_serialized(form):
                form = form._replace(origin=self._described.get(kind))
            joined.setdefault((kind[0], form), []).extend(places)
        return [_Part(model, form, np.array(places, np.int64)) for (model, form), places in joined.items()]

    def _note_form(self, key: Any, form: Form) -> None:
        if len(self._forms) >= FORMS_MAX:
            self._forms = {}
        self._forms[_kind_of(key)] = form

    def _note_description(self, kind: tuple[str, int, int], described: Form) -> None:
        if len(self._described) >= FORMS_MAX:
            self._described = {}
        if self._described.setdefault(kind, described) != described:
            self._described[kind] = SEVERAL

    def _form_of(self, key: Any, memory: Any) -> Form:
        """That of an object that is moved."""
        form = form_of_object(memory)
        return form._replace(origin=self._described.get(_kind_of(key))) if is_serialized(form) else form

    def _end_store(self, task: int, outcome: tuple[bool, int] | None) -> None:
        self._stored.put(task, L2StoreResult(*(outcome or (False, 0))))

    def _end_lookup(self, task: int, keys: int, places: npt.NDArray[np.int64] | None) -> None:
        self._looked_up.put(task, _bitmap(keys, places))

    def _end_load(self, task: int, keys: int, places: npt.NDArray[np.int64] | None) -> None:
        self._loaded.put(task, _bitmap(keys, places))


def _kind_of(key: Any) -> tuple[str, int, int]:
    """Model, world and group: objects of one kind have one form."""
    return key.model_name, key.kv_rank >> 24, key.object_group_id


def _joined(places: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """All of these places, in order."""
    return np.sort(np.concatenate([np.zeros(0, np.int64), *places]))


def _bitmap(keys: int, places: npt.NDArray[np.int64] | None) -> Any:
    found = Bitmap(keys)
    for place in () if places is None else places.tolist():
        found.set(place)
    return found
