"""Object stores: where the objects of each model and form that LMCache serves are, made when the first of them is named.

LMCache's keys name models, not weights. So a model's weights are identified (`model_weights`), or named by the operator's
`revision`; where neither is, nothing of the model is stored or found. Objects of another form have another size, hence a
namespace and connection of their own.

Nothing here raises into LMCache. Any thread; `find` never waits. Lock: `_opening` is held while a store is made.
"""

import threading

from kvpool.clock import Deadline
from kvpool_client.engines.failure_guard import ENGINE_FAILURES, FailureGuard
from kvpool_client.engines.refusals import Refusals
from kvpool_client.lmcache.model_weights import RETRY_S, ModelWeights
from kvpool_client.lmcache.object_layout import SEVERAL, Form, is_ambiguous, words_of
from kvpool_client.lmcache.object_store import ObjectStore
from kvpool_client.lmcache.settings import Settings

# More than the forms of a few models; each is a connection and some threads (guess).
STORES_MAX = 64
_TOO_MANY = (
    f"stores: objects of more than {STORES_MAX} models and forms are served: run another LMCache for some of the models"
)
_FORMAT = (
    "format: LMCache names 8-bit KV of every format, and what it serializes, torch.uint8: set revision in adapter_params to a "
    "name that changes with the KV cache's data type and the serde, as with the weights"
)
_ORIGIN = (
    "serde: it is not known what serialized objects were made of, expected KV of one shape and type for each model and group "
    "of layers: run another LMCache for the other one"
)
_CLOSED = "closed: the adapter is closed"


class ObjectStores:
    """See the module."""

    def __init__(self, settings: Settings, guard: FailureGuard) -> None:
        self._settings = settings
        self._guard = guard
        self._refusals = Refusals("lmcache")
        self._weights = ModelWeights(settings.revision, guard)
        self._opening = threading.Lock()
        # Until when each is refused, the oldest first, and why; guarded by _opening.
        self._refused: dict[tuple[str, Form], tuple[Deadline, str]] = {}
        self._stores: dict[tuple[str, Form], ObjectStore] = {}  # changed under _opening
        self._is_closed = False  # guarded by _opening

    def __repr__(self) -> str:
        return f"<ObjectStores {list(self._stores.values())}>"

    def find(self, model: str, form: Form) -> ObjectStore | None:
        """The store of such objects, if it was opened before and its weights need no look now. Never waits."""
        return self._stores.get((model, form)) if self._weights.is_fresh(model) else None

    def open(self, model: str, form: Form, objects: int, deadline: Deadline) -> ObjectStore | None:
        """The store of such objects; None where they are refused, `objects` of them, or the weights are not known yet. May wait
        for one that is just being opened, and for a look at the weights until `deadline`."""
        store = self.find(model, form)
        if store is not None:
            return store
        revision, refusal = "", self._fault_of(form)
        if not refusal:
            revision, refusal = self._weights.identify(model, deadline)
        if not refusal:
            with self._opening:
                refusal = self._open(model, form, revision)
        if refusal:
            self._refusals.count(refusal, objects)
            self._guard.warn_once(f"nothing of {model!r} is stored or found: {refusal}")
            return None
        return self._stores.get((model, form))

    def stats(self) -> dict[str, object]:
        """What each store counts, refusals, and how far weights are read."""
        stores = list(self._stores.items())
        found: dict[str, object] = {f"{model} {words_of(form)}": store.stats() for (model, form), store in stores}
        for model, counts in self._weights.counts().items():
            found[f"{model} weights"] = counts
        return {**found, **self._refusals.counts()}

    @property
    def is_connected(self) -> bool:
        """Whether a daemon serves all that were opened; not before one was."""
        stores = list(self._stores.values())
        return bool(stores) and all(store.is_connected for store in stores)

    def close(self) -> None:
        """End all connections, and with them what is under way. Idempotent."""
        with self._opening:
            self._is_closed = True
            stores = list(self._stores.values())
        self._weights.stop()
        for store in stores:
            store.close()

    def _fault_of(self, form: Form) -> str:
        """Why objects of this form cannot be distinguished from others; empty where they can."""
        if is_ambiguous(form) and not self._settings.revision:
            return _FORMAT
        return _ORIGIN if form.origin is SEVERAL else ""

    def _open(self, model: str, form: Form, revision: str) -> str:
        """Open the store; why it was not, empty where it is open. REQUIRES: _opening."""
        kind = model, form
        if kind in self._stores:
            return ""
        if self._is_closed:
            return _CLOSED
        until, refusal = self._refused.get(kind, (None, ""))
        if until is not None and not until.has_passed():
            return refusal
        if len(self._stores) >= STORES_MAX:
            return _TOO_MANY
        self._refused.pop(kind, None)
        try:
            self._stores[kind] = ObjectStore(self._settings, form, self._guard, model=model, revision=revision)
        except ENGINE_FAILURES as error:
            if len(self._refused) >= STORES_MAX:
                del self._refused[next(iter(self._refused))]
            self._refused[kind] = Deadline(RETRY_S), f"layout: {error}"
            return self._refused[kind][1]
        return ""
