"""Hints of an orchestrator (KvHintsEnvelope of vLLM, SGLang and Dynamo), parsed into requests of a pool.

    envelope := {protocol_version, message_id, actions: [{action_id, action_type, action_version, payload}]}

    kv.retain    {directives: [{start, end, priority, duration} | {covers_output: true, priority, duration}], scope}
                 or one directive as the payload itself, its duration also as ttl_seconds
    kv.pin       {start, end, duration}: priority 100 for a bounded time
    kv.prefetch  {start, end}: announced, which brings the prefix up to `end` into DRAM
    kv.demote    {start, end}: written to the SSD tier, first to leave DRAM
    kv.share     needs another node: rejected

All fields of a payload but a retain's priority are optional; ranges are tokens of the request that the hint came with. Nothing
here raises because of an envelope's content: a bad envelope, and each bad action, is rejected with its reason. Schedulers read
envelopes of anybody who sends requests, so every part is bounded before it is parsed: actions, directives, fields, text. Pure;
any thread.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvpool.errors import InvalidArgument
from kvpool.states import PRIORITY_MAX, TokenRange
from kvpool_client.retention import check_retention

ACTIONS_MAX = 64
# In all actions together, and as many ranges beside the envelope: 5 µs each (measured), so that the worst request costs a
# scheduler about two milliseconds.
DIRECTIVES_MAX = 128
ENVELOPE_BYTES_MAX = 64 << 10
# More fields than any payload or directive has.
FIELDS_MAX = 16
# Of a value in a reason.
SHOWN_CHARACTERS = 80
ID_CHARACTERS_MAX = 512
MAJOR_VERSIONS = ("0", "1")
# The duration of a pin without one, and the longest: no chunk may be pinned for ever at the cost of all others.
PIN_S = 60.0
PIN_S_MAX = 3600.0

ACCEPTED, CLIPPED, REJECTED = "accepted", "clipped", "rejected"
RETAIN, PIN, PREFETCH, DEMOTE = "retain", "pin", "prefetch", "demote"
_VERBS = (RETAIN, PIN, PREFETCH, DEMOTE)
_NOT_SERVED = {
    "share": "a node's pool moves nothing to other nodes",
    "fetch": "a node's pool fetches nothing from other nodes",
}
_TARGETS_REFUSED = {
    "block_hashes": "the pool cannot find chunks by an engine's block hashes, expected token ranges",
    "session_id": "the pool has no sessions, expected token ranges",
    "session": "the pool has no sessions, expected token ranges",
}
_DURATIONS = ("duration", "duration_s", "ttl_seconds")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one action. `status`: accepted | clipped | rejected; `reason`: why it is not simply accepted."""

    action_id: str
    action_type: str
    status: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """One valid action. `ranges`: what it covers; `output`: retention of the output, if it covers that (start unused)."""

    action_id: str
    action_type: str
    verb: str
    ranges: tuple[TokenRange, ...]
    output: TokenRange | None = None
    note: str = ""

    def ended(self, status: str, reason: str = "") -> Outcome:
        """Its outcome."""
        return Outcome(self.action_id, self.action_type, status, "; ".join(filter(None, (self.note, reason))))


@dataclass(frozen=True, slots=True)
class Hints:
    """A parsed envelope: its actions in order; those that were rejected stand there as outcomes."""

    message_id: str
    actions: tuple[Action | Outcome, ...]

    @property
    def retention(self) -> tuple[TokenRange, ...]:
        """Retention for a save of the request's chunks: earlier actions win."""
        return tuple(entry for action in self._keeping for entry in action.ranges)

    @property
    def output(self) -> TokenRange | None:
        """Retention of the output: priority and duration of the first action that covers it."""
        return next((action.output for action in self._keeping if action.output is not None), None)

    @property
    def _keeping(self) -> list[Action]:
        return [action for action in self.actions if isinstance(action, Action) and action.verb in (RETAIN, PIN)]


@dataclass(frozen=True, slots=True)
class HintReport:
    """Result of `Pool.hint` for the envelope `message_id`: the `outcomes` of its actions, in order, and the `retention`,
    `decode_priority` and `decode_duration_s` for later saves of the same request, as `Pool.save` takes them."""

    message_id: str
    outcomes: tuple[Outcome, ...]
    retention: tuple[TokenRange, ...] = ()
    decode_priority: int | None = None
    decode_duration_s: float | None = None


class _Bad(Exception):
    """Reason for which a part of an envelope is rejected. Never leaves this module."""


class _Allowance:
    """The number of directives that may still be read."""

    def __init__(self) -> None:
        self._left = DIRECTIVES_MAX

    def take_directives(self, count: int) -> None:
        """Take `count` directives off the allowance, valid or not; raises where too few are left."""
        if count > self._left:
            raise _Bad(f"{count} directives where {self._left} are left, expected at most {DIRECTIVES_MAX} in all")
        self._left -= count


def parse_hints(envelope: object) -> Hints:
    """Read an envelope: a mapping, an object with its fields as attributes, JSON, or Hints read before. See the module."""
    if isinstance(envelope, Hints):
        return envelope
    try:
        decoded = _decoded(envelope)
        _check_version("protocol_version", _field(decoded, "protocol_version"))
        message_id = _text(_field(decoded, "message_id"), "message_id")
        actions = _field(decoded, "actions")
        if isinstance(actions, (str, bytes)) or not isinstance(actions, Sequence) or len(actions) > ACTIONS_MAX:
            raise _Bad(f"actions is {_shown(actions)}, expected a list of at most {ACTIONS_MAX}")
    except _Bad as bad:
        return Hints("", (Outcome("", "", REJECTED, f"envelope: {bad}"),))
    allowance = _Allowance()
    return Hints(message_id, tuple(_action(entry, allowance) for entry in actions))


def hints_of_transfer_params(
    params: object, envelope: object = None
) -> tuple[Hints, tuple[TokenRange, ...], TokenRange | None]:
    """Hints in a request's `kv_transfer_params`: an envelope (`kv_hints`, `kv_hint`), and retention beside it.

        {kv_hints: envelope, retention: [{start, end, priority, duration}], decode_priority, decode_duration_s}

    `envelope`: one that the request has outside of them; then theirs is not read. Answers the hints, the ranges for saves
    (those beside the envelope first), and the retention of the output. A mistake beside the envelope is an outcome of the
    hints.
    """
    params = params if isinstance(params, Mapping) else {}
    inside = (params[name] for name in ("kv_hints", "kv_hint") if params.get(name) is not None)
    given = envelope if envelope is not None else next(inside, None)
    hints = parse_hints(given) if given is not None else Hints("", ())
    ranges: tuple[TokenRange, ...] = ()
    output: TokenRange | None = None
    try:
        ranges, _ = _directives(params.get("retention") or [], _Allowance())
        priority, duration_s = params.get("decode_priority"), params.get("decode_duration_s")
        if priority is not None or duration_s is not None:
            output = _checked(TokenRange(0, None, priority, duration_s))  # type: ignore[arg-type]  # checked there
    except _Bad as bad:
        hints = replace(hints, actions=(Outcome("", "retention", REJECTED, str(bad)), *hints.actions))
    return hints, (*ranges, *hints.retention), output or hints.output


def _decoded(envelope: object) -> object:
    if not isinstance(envelope, (str, bytes)):
        return envelope
    if len(envelope) > ENVELOPE_BYTES_MAX:
        raise _Bad(f"{len(envelope)} bytes of JSON, expected at most {ENVELOPE_BYTES_MAX}")
    try:
        return json.loads(envelope)
    except (ValueError, RecursionError) as error:
        raise _Bad(f"no JSON: {_shown(str(error))}") from None


def _action(entry: object, allowance: _Allowance) -> Action | Outcome:
    action_id = action_type = ""
    try:
        action_id = _text(_field(entry, "action_id"), "action_id")
        action_type = _text(_field(entry, "action_type"), "action_type")
        _check_version("action_version", _field(entry, "action_version"))
        payload = _field(entry, "payload", {})
        if not isinstance(payload, Mapping) or len(payload) > FIELDS_MAX:
            raise _Bad(f"payload is {_shown(payload)}, expected a map of at most {FIELDS_MAX} fields")
        verb = action_type.lower().removeprefix("kv.")
        if verb in _NOT_SERVED:
            raise _Bad(_NOT_SERVED[verb])
        if verb not in _VERBS:
            raise _Bad(f"action_type is {_shown(action_type)}, expected kv.retain, kv.pin, kv.prefetch or kv.demote")
        for name, reason in _TARGETS_REFUSED.items():
            if name in payload:
                raise _Bad(reason)
        if verb == RETAIN:
            ranges, output = _retained(payload, allowance)
            return Action(action_id, action_type, verb, ranges, output)
        if verb == PIN:
            return _pin(action_id, action_type, payload)
        return Action(action_id, action_type, verb, (_span(payload, ("start", "end")),))
    except _Bad as bad:
        return Outcome(action_id, action_type, REJECTED, str(bad))


def _retained(payload: Mapping[str, object], allowance: _Allowance) -> tuple[tuple[TokenRange, ...], TokenRange | None]:
    if "directives" not in payload:
        return _directives([{name: value for name, value in payload.items() if name != "scope"}], allowance)
    extra = sorted(str(name) for name in payload if name not in ("directives", "scope"))
    if extra:
        raise _Bad(f"payload has {_shown(extra)} beside its directives")
    return _directives(payload["directives"], allowance)


def _directives(given: object, allowance: _Allowance) -> tuple[tuple[TokenRange, ...], TokenRange | None]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise _Bad(f"directives is {_shown(given)}, expected a list of at most {DIRECTIVES_MAX}")
    allowance.take_directives(len(given))
    ranges: list[TokenRange] = []
    output: TokenRange | None = None
    for directive in given:
        if not isinstance(directive, Mapping) or len(directive) > FIELDS_MAX:
            raise _Bad(f"directive is {_shown(directive)}, expected a map of at most {FIELDS_MAX} fields")
        if "priority" not in directive:
            raise _Bad(f"directive {_shown(dict(directive))} has no priority")
        covers_output = directive.get("covers_output", False)
        if not isinstance(covers_output, bool):
            raise _Bad(f"covers_output is {_shown(covers_output)}, expected true or false")
        if covers_output:
            entry = _span(directive, ("covers_output", "priority", *_DURATIONS))
            output = output or entry
        else:
            ranges.append(_span(directive, ("covers_output", "start", "end", "priority", *_DURATIONS)))
    return tuple(ranges), output


def _pin(action_id: str, action_type: str, payload: Mapping[str, object]) -> Action:
    entry = _span(payload, ("start", "end", *_DURATIONS))
    duration_s = PIN_S if entry.duration_s is None else entry.duration_s
    note = f"duration {duration_s:g} s is cut to {PIN_S_MAX:g}" if duration_s > PIN_S_MAX else ""
    pinned = replace(entry, priority=PRIORITY_MAX, duration_s=min(duration_s, PIN_S_MAX))
    return Action(action_id, action_type, PIN, (pinned,), None, note)


def _span(given: Mapping[str, object], names: tuple[str, ...]) -> TokenRange:
    extra = sorted(str(name) for name in given if name not in names)
    if extra:
        raise _Bad(f"{_shown(extra)} is not a field of this action, expected {', '.join(names)}")
    durations = [given[name] for name in _DURATIONS if given.get(name) is not None]
    if len(durations) > 1:
        raise _Bad("its duration is given twice")
    fields = {name: given[name] for name in ("start", "end", "priority") if name in given}
    duration_s = durations[0] if durations else None
    return _checked(TokenRange(**{"start": 0, **fields, "duration_s": duration_s}))  # type: ignore[arg-type]  # checked there


def _checked(entry: TokenRange) -> TokenRange:
    for name, value in (
        ("start", entry.start), ("end", entry.end), ("priority", entry.priority), ("duration", entry.duration_s)
    ):  # fmt: skip
        if not _is_small(value):
            raise _Bad(f"{name} is {_shown(value)}, expected a number")
    try:
        check_retention([entry])
    except InvalidArgument as error:
        raise _Bad(_shown(str(error).removeprefix("retention[0]."), 160)) from None
    return entry


def _field(record: object, name: str, default: object = None) -> object:
    value = record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)
    value = default if value is None else value
    if value is None:
        raise _Bad(f"{name} is missing")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= ID_CHARACTERS_MAX:
        raise _Bad(f"{name} is {_shown(value)}, expected text of at most {ID_CHARACTERS_MAX} characters")
    return value


def _check_version(name: str, value: object) -> None:
    if _text(value, name).partition(".")[0] not in MAJOR_VERSIONS:
        raise _Bad(f"{name} is {_shown(value)}, expected 0.x or 1.x")


def _shown(value: object, most: int = SHOWN_CHARACTERS) -> str:
    text = value if isinstance(value, str) else repr(value) if _is_small(value) else type(value).__name__
    return text if len(text) <= most else f"{text[:most]}…"


def _is_small(value: object) -> bool:
    """Whether its repr can be made without much work."""
    if isinstance(value, (list, dict)):
        entries = (*value, *value.values()) if isinstance(value, dict) and len(value) <= 8 else value
        return len(value) <= 8 and all(not isinstance(entry, (list, dict)) and _is_small(entry) for entry in entries)
    if isinstance(value, str):
        return len(value) <= SHOWN_CHARACTERS
    if isinstance(value, int):
        return value.bit_length() < 256
    return value is None or isinstance(value, float)
