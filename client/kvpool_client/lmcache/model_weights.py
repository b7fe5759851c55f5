"""Model weights: which weights each model has that LMCache serves; looked at on threads beside LMCache's, again and again.

    unknown ──look──► known, or being read ──look, as long as it is asked for──► known
       │                                       └──they are others──► refused until LMCache starts again
       └──nothing identifies them, or they cannot be looked at──► refused ──RETRY_S──► unknown

LMCache lives longer than its engines: one that starts again may have loaded other weights from the same place. So what was
found counts for LOOK_AGAIN_S, less than an engine needs to start, and then whoever asks waits for another look. Where files do
not answer, that holds up nobody for longer than LOOK_WAIT_S, once: a model has one look at a time.

Any thread; `is_fresh` never waits. Lock: `_changing` guards the models and what is known of each, never held while files are
looked at.
"""

import logging
import os
import threading
from dataclasses import dataclass, field

from kvpool.clock import Deadline
from kvpool.errors import LayoutMismatch
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.weights import READING, Revision, Weights, weights_of
from kvpool_client.engines.weights_reading import WeightsReader, WeightsReading

_log = logging.getLogger(__name__)
LOOK_AGAIN_S = 0.1
RETRY_S = 30.0
LOOK_WAIT_S = 0.2
MODELS_MAX = 256
# LMCache appends how a rank's context is split to the model's name behind this.
_DECORATION = "##"
_REMEDY = "set revision in adapter_params to a name that changes whenever the weights do"
_OTHERS = "others: {} is not what it was when LMCache started to serve this model: start LMCache again, or set revision"
_LOOKING = "looking: the files of the weights do not answer; nothing is loaded or saved until they do"
_TOO_MANY = f"models: more than {MODELS_MAX} are served: run another LMCache for some of them"


@dataclass(slots=True, eq=False)
class _Model:
    """What is known of one. `until`: when the last look no longer counts; `look`: of the one under way, set at its end;
    `patience`: how long others wait for that; `is_final`: no further look."""

    weights: Weights | None = None
    revision: Revision | None = None
    refusal: str = ""
    is_final: bool = False
    until: Deadline = field(default_factory=lambda: Deadline(0.0))
    look: threading.Event | None = None
    patience: Deadline = field(default_factory=lambda: Deadline(0.0))


class ModelWeights:
    """See the module. `named`: the operator's name for the weights of all models, which is not looked at; empty: none."""

    def __init__(self, named: str, guard: FailureGuard) -> None:
        self._guard = guard
        self._named = Revision({}, weights=named).find() if named else None
        self._reader = WeightsReader(DigestMemory.of_user(os.environ), _log)
        self._changing = threading.Lock()
        self._models: dict[str, _Model] = {}  # guarded by _changing, as what they have

    def __repr__(self) -> str:
        return f"<ModelWeights of {len(self._models)} models>"

    def is_fresh(self, model: str) -> bool:
        """Whether the weights were found, and need no look now. Never waits."""
        if self._named is not None:
            return True
        known = self._models.get(model)
        return known is not None and not known.refusal and not known.until.has_passed()

    def identify(self, model: str, deadline: Deadline) -> tuple[str, str]:
        """What names the weights, and empty; or empty, and why nothing does. May wait for a look."""
        if self._named is not None:
            return self._named, ""
        known = self._looked_at(model)
        if known is None:
            return "", _TOO_MANY
        look = known.look
        if look is not None:
            look.wait(min(deadline.remaining_s(), known.patience.remaining_s()))
        with self._changing:
            if known.look is not None:
                return "", _LOOKING
            revision, refusal = known.revision, known.refusal
        if refusal or revision is None:
            return "", refusal
        try:
            found = revision.find()
        except LayoutMismatch as error:
            return "", _refusal_of(error)
        return (found, "") if found is not None else ("", READING)

    def counts(self) -> dict[str, dict[str, int]]:
        """How far the weights of each model are read."""
        with self._changing:
            revisions = {model: known.revision for model, known in self._models.items()}
        return {model: counts for model, each in revisions.items() if each is not None and (counts := each.counts())}

    def stop(self) -> None:
        """End the reading. A look ends when the files answer."""
        self._reader.stop()

    def _looked_at(self, model: str) -> _Model | None:
        """What is known of it; a look was begun where one is due. None: there are too many."""
        with self._changing:
            known = self._models.get(model)
            if known is None:
                if len(self._models) >= MODELS_MAX and not self._forget_refused():
                    return None
                known = self._models[model] = _Model()
            if known.look is None and not known.is_final and known.until.has_passed():
                known.look, known.patience = threading.Event(), Deadline(LOOK_WAIT_S)
                thread = threading.Thread(target=self._look, args=(model, known), name="kvpool-look", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads for this user
                    self._end_look(known, f"weights: {error}")
        return known

    def _forget_refused(self) -> bool:
        """Make room for one: the oldest one that is refused is looked at anew when it is asked for again."""
        oldest = next((name for name, each in self._models.items() if each.refusal and each.look is None), None)
        if oldest is not None:
            del self._models[oldest]
        return oldest is not None

    def _look(self, model: str, known: _Model) -> None:
        """A look's thread."""
        refusal, is_final = self._guard.call(
            "look", (_refusal_of("a look has failed"), False), self._outcome, model, known
        )
        with self._changing:
            self._end_look(known, refusal, is_final=is_final)

    def _outcome(self, model: str, known: _Model) -> tuple[str, bool]:
        """Why the weights are refused, or empty; and whether they are for good."""
        try:
            if known.weights is None:
                self._find(model, known)
            elif changed := _first_changed(model, known.weights):
                return _OTHERS.format(changed), True
            elif known.revision is not None:
                try:
                    known.revision.find()
                except LayoutMismatch:  # could not be read
                    self._find(model, known)
        except (LayoutMismatch, OSError) as error:
            return _refusal_of(error), False
        return "", False

    def _find(self, model: str, known: _Model) -> None:
        """Identify the weights for the first time. Raises LayoutMismatch, OSError."""
        weights = weights_of(_place_of(model), "", os.environ)
        revision = Revision({}, weights=weights)
        revision.begin_reading(self._reader)
        known.weights, known.revision = weights, revision

    def _end_look(self, known: _Model, refusal: str, *, is_final: bool = False) -> None:
        """REQUIRES: _changing."""
        known.refusal, known.is_final = refusal, is_final
        known.until = Deadline(RETRY_S if refusal else LOOK_AGAIN_S)
        look, known.look = known.look, None
        if look is not None:
            look.set()


def _first_changed(model: str, weights: Weights) -> str:
    """What of the weights is not what it was; empty where all is. Raises LayoutMismatch, OSError."""
    if isinstance(weights, WeightsReading):
        return weights.first_changed()
    found = weights_of(_place_of(model), "", os.environ)
    return "" if found == weights else _place_of(model)


def _place_of(model: str) -> str:
    return model.partition(_DECORATION)[0]


def _refusal_of(error: object) -> str:
    return f"weights: {error}: {_REMEDY}"
