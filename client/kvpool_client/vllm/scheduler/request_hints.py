"""Hints of one request: its `kv_transfer_params`, read once, and what is answered.

    {"kv_hints": envelope, "retention": [{start, end, priority, duration}], "decode_priority", "decode_duration_s",
     "save": "prompt" | "all" | true | false, "load": true | false | "wait"}

They come from whoever sends the request, so nothing in them is believed and nothing in them raises: what is wrong is an
outcome with its reason, and the request is served as if it had not been said. Saves carry what concerns their own chunks; what
concerns chunks that are stored already is sent by `hint_sender.py`. Immutable but for `HintReply`; any thread.
"""

import reprlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from kvpool.types import TokenRange
from kvpool_client.hints.envelope import DEMOTE, REJECTED, Action, Hints, Outcome, hints_of_transfer_params
from kvpool_client.vllm.plan import SaveRetention
from kvpool_client.vllm.surface import EngineRequest

# Where the answer stands in the parameters that come back with a request's output. Not the name of an envelope: proxies hand
# these parameters on to the next engine.
ANSWER = "kvpool_hints"
# What a request says beside an envelope is an action without an id.
BESIDE = "retention"
Outcomes = tuple[Outcome, ...]
EVERY_TOKEN = 1 << 62
# What a request may say of its saves and loads, and what that means; true is as if nothing had been said.
SAVES: Mapping[object, str] = {"prompt": "prompt", "all": "all", True: "", False: "none"}
LOADS: Mapping[object, str] = {True: "", False: "none", "wait": "wait"}


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What one request wishes. `ranges` and `output`: for its saves; `has_own`: some of them were said beside the envelope.

    `save`: which of its chunks to save, "prompt", "all", "none", or nothing where it is not said. `load`: "none" where none are
    loaded, "wait" where whoever sends the request knows that all of its prompt is being saved, or nothing.
    """

    hints: Hints
    ranges: tuple[TokenRange, ...]
    output: TokenRange | None
    prompt_tokens: int
    has_own: bool
    save: str = ""
    load: str = ""

    def __bool__(self) -> bool:
        """Whether anything was said, right or wrong."""
        return bool(self.hints.actions) or self.has_own

    def save_tokens(self, configured: str, prompt_tokens: int) -> int:
        """How many tokens of a request with such a prompt may be saved, where the operator has `configured` "prompt" or "all".

        Who says how long to keep what is generated wants it saved.
        """
        chosen = self.save or ("all" if self.output is not None else configured)
        return {"none": 0, "prompt": prompt_tokens, "all": EVERY_TOKEN}[chosen]

    @property
    def at_once(self) -> Hints:
        """What the daemon is told when the request arrives."""
        return self._only(is_demotion=False)

    @property
    def at_the_end(self) -> Hints:
        """What the daemon is told when the request has ended: its chunks will not be asked for soon."""
        return self._only(is_demotion=True)

    def retention_of(self, first: int, end: int) -> SaveRetention | None:
        """What a save of tokens `first` up to `end` is given."""
        touching = tuple(
            entry for entry in self.ranges if entry.start < end and (entry.end is None or entry.end > first)
        )
        output = self.output if end > self.prompt_tokens else None
        if not touching and output is None:
            return None
        return self._retention(touching, output)

    def retention_of_all(self) -> SaveRetention:
        """The same for all chunks of the request."""
        return self._retention(self.ranges, self.output)

    def _retention(self, ranges: tuple[TokenRange, ...], output: TokenRange | None) -> SaveRetention:
        if output is None:
            return SaveRetention(ranges, self.prompt_tokens)
        return SaveRetention(ranges, self.prompt_tokens, output.priority, output.duration_s)

    def _only(self, *, is_demotion: bool) -> Hints:
        actions = tuple(entry for entry in self.hints.actions if _is_demotion(entry) == is_demotion)
        return replace(self.hints, actions=actions)


NO_HINTS = RequestHints(Hints("", ()), (), None, 0, has_own=False)


class HintReply:
    """What becomes of a request's wishes: `answer` has the outcomes of what the daemon was told."""

    def __init__(self, request_hints: RequestHints, answer: Future[Outcomes]) -> None:
        self._request_hints = request_hints
        self._answer = answer

    def __repr__(self) -> str:
        return f"<HintReply {'answered' if self._answer.done() else 'out'}>"

    def to_params(self) -> dict[str, Any]:
        """The answer as it comes back with the request's output; waits for nothing."""
        is_there = self._answer.done() and not self._answer.cancelled()
        known = list(self._answer.result()) if is_there else []
        outcomes = []
        for entry in self._request_hints.hints.actions:
            if isinstance(entry, Action) and _is_demotion(entry):
                outcomes.append(entry.ended("accepted", "carried out when the request has ended"))
            elif known:
                outcomes.append(known.pop(0))
            else:
                outcomes.append(entry.ended("unknown", NO_ANSWER) if isinstance(entry, Action) else entry)
        outcomes += known or [Outcome("", BESIDE, "unknown", NO_ANSWER)] * self._request_hints.has_own
        message_id = self._request_hints.hints.message_id
        return {ANSWER: {"message_id": message_id, "outcomes": [_as_dict(entry) for entry in outcomes]}}


NO_ANSWER = "the daemon has not answered yet"


def request_hints_of(request: EngineRequest) -> RequestHints:
    """What a request wishes."""
    params = getattr(request, "kv_transfer_params", None)
    if params is None:
        return NO_HINTS
    if not isinstance(params, Mapping):
        wrong = Outcome("", BESIDE, REJECTED, f"kv_transfer_params is {type(params).__name__}, expected a map")
        return replace(NO_HINTS, hints=Hints("", (wrong,)))
    hints, ranges, output = hints_of_transfer_params(params)
    save, save_fault = _switch(params, "save", SAVES)
    load, load_fault = _switch(params, "load", LOADS)
    hints = replace(hints, actions=(*hints.actions, *save_fault, *load_fault))
    has_own = len(ranges) > len(hints.retention) or (output is not None and output is not hints.output)
    return RequestHints(hints, ranges, output, int(request.num_prompt_tokens), has_own, save, load)


def _switch(params: Mapping[str, Any], name: str, known: Mapping[object, str]) -> tuple[str, tuple[Outcome, ...]]:
    """What a request chooses, and what is wrong with how it says that."""
    said = params.get(name)
    if said is None:
        return "", ()
    if isinstance(said, (str, bool)) and said in known:
        return known[said], ()
    choices = ", ".join(repr(choice) for choice in known)
    return "", (Outcome("", name, REJECTED, f"{name} is {reprlib.repr(said)}, expected one of {choices}"),)


def _is_demotion(entry: Action | Outcome) -> bool:
    return isinstance(entry, Action) and entry.verb == DEMOTE


def _as_dict(outcome: Outcome) -> dict[str, str]:
    return {
        "action_id": outcome.action_id,
        "action_type": outcome.action_type,
        "status": outcome.status,
        "reason": outcome.reason,
    }
