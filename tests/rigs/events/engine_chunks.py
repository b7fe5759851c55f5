"""Reports of engines about chunks of their own, made by hand for a journal."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.ids import ConnectionId
from kvpool.journal.engine_chunks import EngineChunk, Source
from kvpool.key_column import KeyColumn
from kvpool.keys import split_scope
from tests.rigs.events.journal_rig import Rig, key, words_of

ONE, OTHER, AGAIN = Source(ConnectionId(1), 0), Source(ConnectionId(2), 0), Source(ConnectionId(1), 1)


@dataclass
class Reported:
    """A report as the handler makes it."""

    removed: KeyColumn
    stored: Sequence[EngineChunk]


def chunks_of(names: list[int]) -> list[EngineChunk]:
    """The chunks of a chain, as an engine would report them."""
    chain = [names[: at + 1] for at in range(len(names))]
    split = [split_scope(words_of(each), 32) for each in chain]
    return [
        EngineChunk(key(each), key(each[:-1]) if each[1:] else b"", tokens, scope)
        for each, (tokens, scope) in zip(chain, split, strict=True)
    ]


def has(rig: Rig, names: list[int], source: Source = ONE) -> list[int]:
    """A source reports a chain: the states."""
    while rig.journal.is_behind:
        rig.journal.take_changes()
    return list(rig.journal.take_report(source, rig.namespace.id, Reported(KeyColumn(b""), chunks_of(names))))


def drops(rig: Rig, chains: list[list[int]], source: Source = ONE) -> None:
    """A source has dropped the last chunk of each chain."""
    while rig.journal.is_behind:
        rig.journal.take_changes()
    rig.journal.take_report(source, rig.namespace.id, Reported(KeyColumn.of(key(names) for names in chains), ()))
