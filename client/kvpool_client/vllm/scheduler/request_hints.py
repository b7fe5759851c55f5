"""Hints of one request: its `kv_hints` and `kv_transfer_params`, read once, and what is answered.

    {"kv_hints": envelope, "retention": [{start, end, priority, duration}], "decode_priority", "decode_duration_s",
     "save": "prompt" | "all" | true | false, "load": true | false | "wait", "owner": node}

An envelope that vLLM itself was given with the request (`kv_hints`) is read instead of one in the parameters.

They come from the sender of the request, so they are checked and never raise: a mistake is an outcome with its reason, and the
request is served without it. Saves carry the retention of their own chunks; `hint_sender.py` sends what concerns chunks that
are stored already. Immutable but for `HintReply`; any thread.
"""

import reprlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from kvpool.protocol.records import peers as pm
from kvpool.states import TokenRange
from kvpool_client.hint_envelope import DEMOTE, REJECTED, Action, Hints, Outcome, hints_of_transfer_params
from kvpool_client.vllm.plan import SaveRetention
from kvpool_client.vllm.surface import EngineRequest

# Key of the answer in the parameters that come back with a request's output. Not the key of an envelope: proxies pass these
# parameters on to the next engine.
ANSWER = "kvpool_hints"
# Fields beside an envelope count as an action without an id.
BESIDE = "retention"
Outcomes = tuple[Outcome, ...]
EVERY_TOKEN = 1 << 62
# Values of a request's `save` and `load`, and their meaning; true is the same as no value.
SAVES: Mapping[object, str] = {"prompt": "prompt", "all": "all", True: "", False: "none"}
LOADS: Mapping[object, str] = {True: "", False: "none", "wait": "wait"}


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Hints of one request. `ranges` and `output`: for its saves; `has_own`: some of them stand beside the envelope.

    `save`: which of its chunks to save, "prompt", "all", "none", or empty. `load`: "none" to load none, "wait" where the sender
    knows that all of the prompt is being saved, or empty. `owner`: the node that has what no other is known to have, or empty.
    """

    hints: Hints
    ranges: tuple[TokenRange, ...]
    output: TokenRange | None
    prompt_tokens: int
    has_own: bool
    save: str = ""
    load: str = ""
    owner: str = ""

    def __bool__(self) -> bool:
        """Whether there are any hints, valid or not."""
        return bool(self.hints.actions) or self.has_own

    def save_tokens(self, configured: str, prompt_tokens: int) -> int:
        """How many tokens of a request with such a prompt may be saved, where the operator has `configured` "prompt" or "all".

        A request with retention for its output wants the output saved.
        """
        chosen = self.save or ("all" if self.output is not None else configured)
        return {"none": 0, "prompt": prompt_tokens, "all": EVERY_TOKEN}[chosen]

    @property
    def at_once(self) -> Hints:
        """The hints to send when the request arrives."""
        return self._only(is_demotion=False)

    @property
    def at_the_end(self) -> Hints:
        """The hints to send when the request has ended: its chunks will not be requested soon."""
        return self._only(is_demotion=True)

    def retention_of(self, first: int, end: int) -> SaveRetention | None:
        """The retention of a save of tokens `first` up to `end`."""
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
    """Reply to a request's hints: `answer` has the outcomes of those that were sent to the daemon."""

    def __init__(self, request_hints: RequestHints, answer: Future[Outcomes]) -> None:
        self._request_hints = request_hints
        self._answer = answer

    def __repr__(self) -> str:
        return f"<HintReply {'answered' if self._answer.done() else 'out'}>"

    def to_params(self) -> dict[str, Any]:
        """The reply in the parameters of the request's output; never waits."""
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


def has_hints(request: EngineRequest) -> bool:
    """Whether a request may have any."""
    return getattr(request, "kv_hints", None) is not None or getattr(request, "kv_transfer_params", None) is not None


def request_hints_of(request: EngineRequest) -> RequestHints:
    """The hints of a request."""
    if not has_hints(request):
        return NO_HINTS
    given = getattr(request, "kv_transfer_params", None)
    params: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    hints, ranges, output = hints_of_transfer_params(params, getattr(request, "kv_hints", None))
    if given is not None and params is not given:
        wrong = Outcome("", BESIDE, REJECTED, f"kv_transfer_params is {type(given).__name__}, expected a map")
        hints = replace(hints, actions=(*hints.actions, wrong))
    save, save_fault = _switch(params, "save", SAVES)
    load, load_fault = _switch(params, "load", LOADS)
    owner, owner_fault = _owner(params)
    hints = replace(hints, actions=(*hints.actions, *save_fault, *load_fault, *owner_fault))
    has_own = len(ranges) > len(hints.retention) or (output is not None and output is not hints.output)
    return RequestHints(hints, ranges, output, int(request.num_prompt_tokens), has_own, save, load, owner)


def _switch(params: Mapping[str, Any], name: str, known: Mapping[object, str]) -> tuple[str, tuple[Outcome, ...]]:
    """The value that a request chooses, and the fault where it is invalid."""
    text = params.get(name)
    if text is None:
        return "", ()
    if isinstance(text, (str, bool)) and text in known:
        return known[text], ()
    choices = ", ".join(repr(choice) for choice in known)
    return "", (Outcome("", name, REJECTED, f"{name} is {reprlib.repr(text)}, expected one of {choices}"),)


def _owner(params: Mapping[str, Any]) -> tuple[str, tuple[Outcome, ...]]:
    """The node that a request names, and the fault where that is no name."""
    text = params.get("owner")
    if text is None:
        return "", ()
    if isinstance(text, str) and pm.is_node_name(text):
        return text, ()
    expected = f"the name of a node, of at most {pm.OWNER_BYTES_MAX} bytes"
    return "", (Outcome("", "owner", REJECTED, f"owner is {reprlib.repr(text)}, expected {expected}"),)


def _is_demotion(entry: Action | Outcome) -> bool:
    return isinstance(entry, Action) and entry.verb == DEMOTE


def _as_dict(outcome: Outcome) -> dict[str, str]:
    return {
        "action_id": outcome.action_id,
        "action_type": outcome.action_type,
        "status": outcome.status,
        "reason": outcome.reason,
    }
