"""Section `events` of the configuration: its options, their record, and the checks between them. See `config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.config.addresses import ZmqAddress, parse_zmq
from kvpool.config.options import Option, choice_option, count_option, duration_option, flag_option, size_option
from kvpool.config.path_options import readable_file, secret_file, topic
from kvpool.errors import InvalidArgument

# Connections of one socket at most: of routers, and of those that connected a moment ago, a quarter of them from one source:
# as many as there can be routers. Each takes a descriptor, and the duplicate by which it is watched another.
ROUTERS_MAX = 64
STRANGERS_MAX = 4 * ROUTERS_MAX


# Models with an endpoint of their own: each has a thread, and the memory of a publisher.
MODELS_MAX = 16


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Where the events of one model are published, and of no other. `model`: its name, with or without its revision."""

    model: str
    publish: ZmqAddress
    replay: ZmqAddress | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.publish}{f' {self.replay}' if self.replay else ''}"


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Section `events`; sizes in bytes. `models`: those with endpoints of their own. `block_tokens` 0: a chunk is one block."""

    publish: ZmqAddress | None
    replay: ZmqAddress | None
    models: tuple[ModelEndpoint, ...]
    topic: str
    format: str
    ownership: bool
    block_tokens: int
    buffer: int
    history_chunks: int
    queue_messages: int
    replay_messages: int
    republish_interval: float
    insecure: bool
    keys: str
    allow: str

    @property
    def descriptors(self) -> int:
        """What routers' connections may take."""
        sockets = (self.publish is not None) + (self.replay is not None)
        sockets += sum(1 + (one.replay is not None) for one in self.models)
        return sockets * 2 * (ROUTERS_MAX + STRANGERS_MAX)

    @property
    def endpoints(self) -> list[tuple[str, str]]:
        """Every endpoint, with the option that has it before it."""
        own = [("events.publish", self.publish), ("events.replay", self.replay)]
        named = [*own, *(("events.models", address) for one in self.models for address in (one.publish, one.replay))]
        return [(option, address.endpoint) for option, address in named if address is not None]

    @property
    def files(self) -> list[tuple[str, str]]:
        """Paths of the sockets in the file system, each with the option that has it."""
        return [(option, one.removeprefix("ipc://")) for option, one in self.endpoints if one.startswith("ipc://")]


def check_events(parsed: Mapping[str, Any], faults: list[str]) -> None:
    """Add the faults of these options' values together."""
    if bool(parsed["events.keys"]) != bool(parsed["events.allow"]):
        faults.append("events.keys and events.allow: expected both or none")
    if parsed["events.replay"] and not parsed["events.publish"]:
        faults.append(f"events.replay is {parsed['events.replay']}, expected off because events.publish is")
    models: tuple[ModelEndpoint, ...] = parsed["events.models"]
    if models and not parsed["events.publish"]:
        faults.append(f"events.models is {models[0]}, expected none because events.publish is off")
    for name, address in addresses_of(parsed):
        fault = address.fault_without_keys(parsed["events.insecure"]) if address else ""
        if fault and not parsed["events.keys"]:
            faults.append(f"{name} is {address}, {fault}")


def addresses_of(parsed: Mapping[str, Any]) -> list[tuple[str, ZmqAddress]]:
    """Every address of the section, with the option that has it."""
    named = [(name, parsed[name]) for name in ("events.publish", "events.replay")]
    named += [("events.models", address) for one in parsed["events.models"] for address in (one.publish, one.replay)]
    return [(name, address) for name, address in named if address]


def _parse_models(value: Any) -> tuple[ModelEndpoint, ...]:
    """`MODEL PUBLISH [REPLAY], …`. Raises InvalidArgument or ValueError."""
    entries = [entry.split() for entry in value.split(",")] if isinstance(value, str) and value.strip() else []
    models = []
    for entry in entries:
        addresses = [parse_zmq(text) for text in entry[1:]]
        if len(entry) not in (2, 3) or None in addresses:
            raise InvalidArgument(" ".join(entry))
        models.append(ModelEndpoint(entry[0], *(address for address in addresses if address is not None)))
    names = [one.model for one in models]
    if not (isinstance(value, str) and len(set(names)) == len(names) <= MODELS_MAX):
        raise InvalidArgument(repr(value))
    return tuple(models)


_ZMQ_EXPECTED = (
    '"ipc:///run/kvpool/events", with CURVE keys an address of a host such as "tcp://192.0.2.7:5557", or "off"'
)

EVENT_OPTIONS: dict[str, Option] = {
    "events.publish": Option(parse_zmq, "off", _ZMQ_EXPECTED),
    "events.replay": Option(parse_zmq, "off", _ZMQ_EXPECTED),
    "events.models": Option(
        _parse_models,
        "",
        f"up to {MODELS_MAX} different models with one address or two each: MODEL PUBLISH [REPLAY], … (empty: none)",
    ),
    "events.topic": Option(
        topic, "kv@{host}@{model}", "printable text in which only {host}, {model} and {name} stand in braces"
    ),
    "events.format": choice_option("map", "positional"),
    "events.ownership": flag_option("false"),
    "events.block_tokens": count_option(0, 4096, 0),
    "events.buffer": size_option("64KiB", "16GiB", "16MiB"),
    "events.history_chunks": count_option(16, 10_000_000, 65_536),
    "events.queue_messages": count_option(1, 1_000_000, 1000),
    "events.replay_messages": count_option(1, 1_000_000, 1000),
    "events.republish_interval": duration_option("0s", "1d", "1m"),
    "events.insecure": flag_option("false"),
    "events.keys": Option(
        secret_file, "", "a regular file of the daemon's user with rights 0600 or less (empty: no keys)"
    ),
    "events.allow": Option(readable_file, "", "a file of public keys, one to a line (empty: no keys)"),
}
