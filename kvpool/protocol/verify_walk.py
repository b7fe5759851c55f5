"""Walk over chunk records, for checks of their bytes: a tier's level and the index of a record in its directory, one word each.

A full check requests all records in order, a sample drawn ones; both go slice by slice, so that no request takes long and a
check ends with its connection. Chunks stored during a check may be left out. Any thread.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, SupportsInt

from kvpool.errors import ProtocolError, Refused
from kvpool.packed_numbers import U64_BYTES, pack_u64, u64_of
from kvpool.protocol.records.messages import RECORDS_MAX
from kvpool.states import Level

_LEVEL_SHIFT = 32
_NUMBERS = 1 << 31

# Requests one slice of records, `chunks` at most: the fields of the answer to `VerifyBytes`.
AskSlice = Callable[[bytes, int], Mapping[str, Any]]
# Called after each slice with the chunks read so far.
Advance = Callable[[int], None]
# A random number from the first one up to the second, exclusively.
Draw = Callable[[int, int], SupportsInt]
# By tier: its `level`, `chunks`, and `places` (the number of records), as the answer to `Check` has them.
Tiers = Mapping[str, Mapping[str, int]]


def pack(records: list[int]) -> bytes:
    """The column of words."""
    return pack_u64(records)


def unpack(column: bytes) -> list[tuple[Level, int]]:
    """The records of a column. Raises ProtocolError."""
    if len(column) % U64_BYTES or len(column) > RECORDS_MAX * U64_BYTES:
        raise ProtocolError(f"places column has {len(column)} bytes, expected 8 each for at most {RECORDS_MAX} places")
    records = [divmod(word, 1 << _LEVEL_SHIFT) for word in u64_of(column)]
    if any(level not in list(Level) or number >= _NUMBERS for level, number in records):
        raise ProtocolError("a place is in no tier that has records")
    return [(Level(level), number) for level, number in records]


def every(tiers: Tiers) -> Iterator[int]:
    """All records, tier after tier."""
    for name, counts in tiers.items():
        level = _level_of(name, counts)
        yield from (_word(level, number) for number in range(counts["entries"]))


def drawn(tiers: Tiers, draw: Draw) -> Iterator[int]:
    """All records in a random order, uniformly where `draw` is. Takes memory only for those that are drawn."""
    total = sum(counts["entries"] for counts in tiers.values())
    swapped: dict[int, int] = {}
    for position in range(total):
        other = int(draw(position, total))
        chosen = swapped.get(other, other)
        swapped[other] = swapped.pop(position, position)
        for name, counts in tiers.items():
            if chosen < counts["entries"]:
                yield _word(_level_of(name, counts), chosen)
                break
            chosen -= counts["entries"]


def read_all(
    ask: AskSlice, records: Iterator[int], chunks_max: int, on_slice: Advance = lambda _chunks: None
) -> dict[str, Any]:
    """Have chunks read slice by slice: how many were `verified`, their `bytes`, and the `corrupt` ones.

    `refusal`: why it ended early, if it did.
    """
    found: dict[str, Any] = {"verified": 0, "bytes": 0, "corrupt": [], "refusal": ""}
    batch = list(islice(records, RECORDS_MAX))
    while batch and found["verified"] < chunks_max:
        try:
            answer = ask(pack(batch), min(chunks_max - found["verified"], RECORDS_MAX))
        except Refused as error:
            return {**found, "refusal": str(error)}
        found["verified"] += answer["chunks"]
        found["bytes"] += answer["bytes"]
        found["corrupt"] += answer["bad"]
        on_slice(found["verified"])
        batch = list(islice(chain(batch[answer["looked_at"] :], records), RECORDS_MAX))
    return found


def problems_of(found: Mapping[str, Any], digits: int | None = None) -> list[str]:
    """A line for each bad chunk that `read_all` found, with `digits` of its key (all by default), and for its refusal."""
    lines = [_describe(bad, digits) for bad in found["corrupt"]]
    return lines + ([f"not everything was read: {found['refusal']}"] if found["refusal"] else [])


def _describe(bad: Mapping[str, Any], digits: int | None) -> str:
    followers = f" with {bad['dropped'] - 1} that follow it" if bad["dropped"] > 1 else ""
    went = f", dropped{followers}" if bad["dropped"] else ""
    where = f" in {bad['where']}" if bad.get("where") else ""
    return f"{bad['tier']}: chunk {bad['key'][:digits]}: {bad['fault'].replace('_', ' ')}{where}{went}"


def _level_of(name: str, counts: Mapping[str, int]) -> int:
    """A tier's level: of a daemon that does not report it, by the name."""
    return counts["level"] if "level" in counts else Level[name.upper()]


def _word(level: int, number: int) -> int:
    return level << _LEVEL_SHIFT | number
