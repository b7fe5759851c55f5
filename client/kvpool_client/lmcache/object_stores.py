"""Object stores: where the objects of each model and form that LMCache serves are, made when the first of them is named.

LMCache's keys name models, not weights. So a model's weights are identified from its name, a path or a model of the Hub, as
this machine has it, or by the operator's `revision`; where neither does, nothing of the model is stored or found. Objects of
another form have another size, hence a namespace and connection of their own.

Nothing here raises into LMCache. Any thread; `find` never waits. Lock: `_opening` is held while a store is made.
"""

import logging
import os
import threading

from kvpool.errors import LayoutMismatch
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.refusals import Refusals
from kvpool_client.engines.weights import READING, Revision, weights_of
from kvpool_client.engines.weights_reading import WeightsReader
from kvpool_client.lmcache.object_layout import Form
from kvpool_client.lmcache.object_store import ObjectStore
from kvpool_client.lmcache.settings import Settings

_log = logging.getLogger(__name__)
# More than the forms of a few models; each is a connection and some threads (guess).
STORES_MAX = 64
# LMCache appends how a rank's context is split to the model's name behind this.
_DECORATION = "##"
_REMEDY = "set revision in adapter_params to a name that changes whenever the weights do"
_TOO_MANY = (
    f"stores: objects of more than {STORES_MAX} models and forms are served: run another LMCache for some of the models"
)
_CLOSED = "closed: the adapter is closed"


class ObjectStores:
    """See the module."""

    def __init__(self, settings: Settings, guard: FailureGuard) -> None:
        self._settings = settings
        self._guard = guard
        self._refusals = Refusals("lmcache")
        self._reader = WeightsReader(DigestMemory.of_user(os.environ), _log)
        self._opening = threading.Lock()
        self._revisions: dict[str, Revision] = {}  # guarded by _opening
        self._refused: dict[tuple[str, Form | None], str] = {}  # guarded by _opening
        self._stores: dict[tuple[str, Form], ObjectStore] = {}  # changed under _opening
        self._is_closed = False  # guarded by _opening

    def __repr__(self) -> str:
        return f"<ObjectStores {list(self._stores.values())}>"

    def find(self, model: str, form: Form) -> ObjectStore | None:
        """The store of such objects, if it was opened before. Never waits."""
        return self._stores.get((model, form))

    def open(self, model: str, form: Form, objects: int) -> ObjectStore | None:
        """The store of such objects; None where they are refused, `objects` of them, or the weights are not known yet. May wait
        for one that is just being opened."""
        store = self.find(model, form)
        if store is not None:
            return store
        with self._opening:
            refusal = self._open(model, form)
        if refusal:
            self._refusals.count(refusal, objects)
            self._guard.warn_once(f"nothing of {model!r} is stored or found: {refusal}")
        return self.find(model, form)

    def stats(self) -> dict[str, object]:
        """What each store counts, refusals, and how far weights are read."""
        stores = list(self._stores.items())
        found: dict[str, object] = {
            f"{model} {store.object_bytes} bytes": store.stats() for (model, _), store in stores
        }
        for model, revision in list(self._revisions.items()):
            if counts := revision.counts():
                found[f"{model} weights"] = counts
        return {**found, **self._refusals.counts()}

    @property
    def is_connected(self) -> bool:
        """Whether a daemon serves all that were opened."""
        return all(store.is_connected for store in list(self._stores.values()))

    def close(self) -> None:
        """End all connections, and with them what is under way. Idempotent."""
        with self._opening:
            self._is_closed = True
            stores = list(self._stores.values())
        self._reader.stop()
        for store in stores:
            store.close()

    def _open(self, model: str, form: Form) -> str:
        """Open the store; why it was not, empty where it is open. REQUIRES: _opening."""
        if self.find(model, form) is not None:
            return ""
        if self._is_closed:
            return _CLOSED
        refusal = self._refused.get((model, None)) or self._refused.get((model, form), "")
        if refusal:
            return refusal
        if len(self._stores) >= STORES_MAX:
            return _TOO_MANY
        try:
            revision = self._revision_of(model)
        except (LayoutMismatch, OSError) as error:
            refusal = self._refused[model, None] = f"weights: {error}: {_REMEDY}"
            return refusal
        if revision is None:
            return READING
        try:
            self._stores[model, form] = ObjectStore(self._settings, form, self._guard, model=model, revision=revision)
        except ENGINE_FAILURES as error:
            refusal = self._refused[model, form] = f"layout: {error}"
        return refusal

    def _revision_of(self, model: str) -> str | None:
        """What names the weights; None while they are read. Raises LayoutMismatch, OSError."""
        revision = self._revisions.get(model)
        if revision is None:
            place = model.partition(_DECORATION)[0]
            weights = self._settings.revision or weights_of(place, "", os.environ)
            revision = self._revisions[model] = Revision({}, weights=weights)
            revision.begin_reading(self._reader)
        return revision.find()
