"""Frames of the local protocol, and messages between nodes, as text: every record with an example's bytes.

    1 Hello magic:bytes version:int role:str model:str layout:list     a kind, its record, its fields in order
        3e000000970100…                                                the frame of the example

An example's values follow from its fields' types and places alone. `python -m tests.golden.wire` writes the files.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import kvpool.protocol
from kvpool.peers.control import records as peer
from kvpool.peers.control.wire import encode_message
from kvpool.protocol.records import messages as m

SEQUENCE = 7
FILE = Path(__file__).parent / "protocol_1.txt"
PEER_FILE = Path(__file__).parent / f"peer_protocol_{peer.NEWEST_VERSION}.txt"


def records() -> list[type[Any]]:
    """Every kind of frame, by its number."""
    found = set()
    for module in pkgutil.walk_packages(kvpool.protocol.__path__, "kvpool.protocol."):
        named = vars(importlib.import_module(module.name)).values()
        found |= {value for value in named if isinstance(value, type) and hasattr(value, "KIND")}
    return sorted(found, key=lambda record: int(record.KIND))


def peer_records() -> list[type[Any]]:
    """Every kind of message between nodes, by its number."""
    found = [value for value in vars(peer).values() if isinstance(getattr(value, "KIND", None), int)]
    return sorted(found, key=lambda record: int(record.KIND))


def peer_message(record: type[Any]) -> bytes:
    """The message of a record's example."""
    return encode_message(example_of(record), SEQUENCE)


def field_types(record: type[Any]) -> dict[str, type[Any]]:
    """A record's fields in order, with the type that each has on the wire."""
    hints = get_type_hints(record)
    return {field.name: _bare(hints[field.name]) for field in fields(record)}


def head_of(record: type[Any]) -> str:
    """The line that names a record's kind and fields."""
    named = [f"{name}:{kind.__name__}" for name, kind in field_types(record).items()]
    return " ".join([str(record.KIND), record.__name__, *named])


def example_of(record: type[Any]) -> Any:
    """A record with a value of its own in each field."""
    return record(*(_value_of(kind, place) for place, kind in enumerate(field_types(record).values())))


def golden_frames(file: Path = FILE) -> dict[str, tuple[str, bytes]]:
    """By record: its head and the bytes of its example, as the file has them."""
    lines = file.read_text().splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return {head.split()[1]: (head, bytes.fromhex(body.strip())) for head, body in pairs}


def written(frames: Iterator[tuple[str, bytes]]) -> str:
    """Heads and frames as a file has them."""
    return "".join(f"{head}\n    {frame.hex()}\n" for head, frame in frames)


def _bare(hint: Any) -> type[Any]:
    origin = getattr(hint, "__origin__", hint)
    assert isinstance(origin, type)
    return origin


def _value_of(kind: type[Any], place: int) -> object:
    number = 0x0101 * (place + 1)
    values: dict[type[Any], object] = {
        bool: True,
        int: number,
        float: place + 0.5,
        bytes: bytes(range(place, place + 8)),
        str: f"field {place}",
        list: [number, "é", b"\xff"],
        dict: {"name": number},
    }
    return values[kind]


if __name__ == "__main__":
    FILE.write_text(written((head_of(record), m.encode(example_of(record), SEQUENCE)) for record in records()))
    PEER_FILE.write_text(written((head_of(record), peer_message(record)) for record in peer_records()))
