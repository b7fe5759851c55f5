"""Options that were given a value and do nothing, because what they belong to is off. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Switch:
    """An option, the value with which others do nothing, and those others: whole sections, or names after a section."""

    option: str
    off: object
    idle: tuple[str, ...]
    because: str


_PUBLISHED = (
    "topic",
    "format",
    "ownership",
    "block_tokens",
    "queue_messages",
    "replay_messages",
    "republish_interval",
    "insecure",
    "keys",
    "allow",
)
_SWITCHES = (
    _Switch("ssd.capacity", 0, ("ssd.",), "ssd.capacity is 0: there is no SSD tier"),
    _Switch("hbm.device", "off", ("hbm.",), "hbm.device is off: there is no device tier"),
    _Switch("peer.listen", None, ("peer.",), "peer.listen is off: this node has no peers"),
    _Switch("peer.transport", "off", ("peer.",), "peer.transport is off: this node has no peers"),
    _Switch(
        "peer.rdma_devices",
        "",
        ("peer.rdma_",),
        "peer.rdma_devices is empty and peer.transport is neither rdma nor nixl",
    ),
    _Switch("store.master", "", ("store.",), "store.master is empty: there is no shared store"),
    _Switch(
        "events.publish",
        None,
        tuple(f"events.{name}" for name in _PUBLISHED),
        "events.publish is off: nothing is published",
    ),
    _Switch("events.replay", None, ("events.replay_messages",), "events.replay is off"),
    _Switch(
        "server.write_mode", "in-place", ("server.staging",), "server.write_mode is in-place: saves are not staged"
    ),
    _Switch("server.keep_memory", "off", ("server.keep_for",), "server.keep_memory is off: nobody keeps it"),
    _Switch("server.keep_token_ids", False, ("dram.token_ids",), "server.keep_token_ids is false: there are none"),
    _Switch("dram.prefault", False, ("dram.prefault_threads",), "dram.prefault is false"),
)


def idle_options(changed: Mapping[str, Any], parsed: Mapping[str, Any]) -> Iterator[str]:
    """A line for each option that does nothing: `changed` has those without their defaults, as given, `parsed` all values."""
    for name in changed:
        switch = next((one for one in _SWITCHES if _is_idle(name, one, parsed)), None)
        if switch is not None:
            yield f"{name} is {changed[name]!r}, which does nothing because {switch.because}"


def _is_idle(name: str, switch: _Switch, parsed: Mapping[str, Any]) -> bool:
    is_off_itself = any(one.option == name and parsed[name] == one.off for one in _SWITCHES)
    if (
        is_off_itself
        or name == switch.option
        or parsed[switch.option] != switch.off
        or not name.startswith(switch.idle)
    ):
        return False
    return not (switch.option == "peer.rdma_devices" and parsed["peer.transport"] in ("rdma", "nixl"))
