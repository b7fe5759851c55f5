"""Results of the verbs. Miss, pending and declined are results here, never exceptions. Immutable; any thread."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.states import PEER, RetainState, SaveState
from kvpool_client.connection.peer_pace import PeerPace
from kvpool_client.key_chain import KeyChain

STORED_STATES = (SaveState.STORED, SaveState.PRESENT, SaveState.PART)
# Their numbers alone: columns of bytes have those.
_STORED, _PRESENT, _PART = map(int, STORED_STATES)
_RESERVED, _CLIPPED = int(SaveState.RESERVED), int(RetainState.CLIPPED)
LEVELS_HERE = bytes(range(PEER))  # of chunks that are on this node
# By number; OTHER, which is a declined chunk, for a state that only a later version of the daemon has.
SAVE_STATES = tuple(next((state for state in SaveState if state == code), SaveState.OTHER) for code in range(256))
_KNOWN_STATES = bytes(SAVE_STATES)
_REASONS = tuple(state.reason for state in SAVE_STATES)
_WORDS = tuple(state.reason if state in STORED_STATES else "declined" for state in SAVE_STATES)
_RETAIN_STATES = {int(state): state for state in RetainState}


@dataclass(slots=True, eq=False)
class Hit:
    """The longest run of present chunks from the root of a prompt: what `Pool.lookup` answers. True where it has a chunk.

    `chunks` chunks, which cover the first `tokens` tokens of the `keys` that were looked up. `levels`: a byte for each chunk,
    its fastest level (0 HBM, 1 DRAM, 2 SSD, 3 peer, 4 store), of which `tiers` is an array. `peer_pace`: of the node that has
    the last chunk, where that is another one whose pace was measured. `owner`: the node that is asked for what is not known to
    be present, if one was named. `full_chunks`: what the full groups of the layout alone have; where that is more than
    `chunks`, windows and states stored at that end would make it a hit. A hit is a hint: only `acquire` gives a right. Nothing
    changes one.
    """

    chunks: int
    tokens: int
    levels: bytes
    keys: KeyChain = field(repr=False)
    peer_pace: PeerPace | None = None
    owner: str = ""
    full_chunks: int = 0

    def __bool__(self) -> bool:
        return self.chunks > 0

    @property
    def tiers(self) -> npt.NDArray[np.uint8]:
        """The fastest level of each chunk, uint8 [chunks]: a `kvpool_client.Level`."""
        return np.frombuffer(self.levels, np.uint8)

    @property
    def chunks_here(self) -> int:
        """How many leading chunks are on this node. What another node has is fetched with a lease, or is a miss then."""
        return self.chunks - len(self.levels.lstrip(LEVELS_HERE))


def known_states(states: bytes) -> bytes:
    """A column of SaveStates of the daemon's as this version knows them: OTHER for those that only a later one has."""
    return states.translate(_KNOWN_STATES)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load (`Load.wait`): how many leading chunks are verified in engine memory, counted from the root, the
    `tokens` that they cover, and why it stopped there.

    `reason`: complete | gone | checksum | timeout | io | disconnected | cancelled. `groups`: of a layout with groups the result
    of each: up to which chunk it has what it was to load. `states`: of a set the reason of each key, `absent` for one that was
    not leased, or `skipped` for one that was left out; `chunks` counts those that are complete, and `reason` is that of the
    first one that is loaded and is not.
    """

    chunks: int
    tokens: int
    reason: str
    groups: "tuple[LoadResult, ...]" = ()
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Result of a save (`Save.commit`), by chunk. `stored + present + part + declined` is the number of chunks asked.

    `states[i]`: stored | present | part | declined. Present: it was stored before, or by another save meanwhile. Part: what
    this save has of the chunk is stored, and it is found as soon as what is missing is: a chunk before it that another save is
    writing, or, of a Pool with a share, other ranks' parts. If that never comes, the chunk is lost. `reasons` counts the
    declined ones by reason: pending (another save is writing it, and stores it unless that fails), no-parent,
    full, share, not-ready, stopping, expired, disconnected, timeout, too-long, aborted, checksum where the daemon has stored
    other bytes than were announced to it, and other for a reason that only a later version has. `clipped`: how many of those
    not declined have the default priority although the save asked for a higher one, because the share of chunks above the
    default is used up. `groups`: of a layout with groups the result of each, over the chunks that it was to store, in order.
    `codes`: a `SaveState` of each chunk, u8.
    """

    stored: int
    present: int
    declined: int
    states: tuple[str, ...]
    reasons: Mapping[str, int]
    clipped: int = 0
    part: int = 0
    groups: "tuple[SaveResult, ...]" = ()
    codes: bytes = field(default=b"", compare=False, repr=False)

    def reason_of(self, chunk: int) -> str:
        """Why a chunk was declined, as in `reasons`; empty for one that was not."""
        code = self.codes[chunk]
        return "" if code in STORED_STATES else _REASONS[code]

    @classmethod
    def joined(cls, groups: "Sequence[SaveResult]") -> "SaveResult":
        """The result over the chunks of all groups of a layout."""
        reasons: dict[str, int] = {}
        for result in groups:
            for reason, count in result.reasons.items():
                reasons[reason] = reasons.get(reason, 0) + count
        return cls(
            sum(result.stored for result in groups),
            sum(result.present for result in groups),
            sum(result.declined for result in groups),
            tuple(state for result in groups for state in result.states),
            reasons,
            sum(result.clipped for result in groups),
            sum(result.part for result in groups),
            tuple(groups),
            b"".join([result.codes for result in groups]),
        )

    @classmethod
    def of(cls, states: Iterable[int], retained: bytes = b"") -> "SaveResult":
        """The result of a save whose chunks ended in `states`, a SaveState each; `retained`: a RetainState for each of the
        first ones."""
        codes = bytes(states)
        assert _RESERVED not in codes
        stored, present, part = codes.count(_STORED), codes.count(_PRESENT), codes.count(_PART)
        declined, reasons = len(codes) - stored - present - part, {}
        if declined:
            reasons = {_REASONS[code]: codes.count(code) for code in dict.fromkeys(codes) if code not in STORED_STATES}
        clipped = 0
        if _CLIPPED in retained:
            both = zip(codes, retained, strict=False)
            clipped = sum([text == _CLIPPED and code in STORED_STATES for code, text in both])
        words = tuple([_WORDS[code] for code in codes])
        return cls(stored, present, declined, words, reasons, clipped, part, codes=codes)


@dataclass(frozen=True, slots=True)
class RetainResult:
    """Result of `Pool.retain` and `Pool.demote`. `accepted + clipped + absent` is the number of chunks it covers.

    `states[i]`: accepted | clipped | absent, or empty where the request does not cover chunk i. Clipped: at the default
    priority, because the share of chunks above the default is used up. Absent: not stored, or the daemon is away.
    """

    accepted: int
    clipped: int
    absent: int
    states: tuple[str, ...]

    @classmethod
    def of(cls, chunks: int, covered: Sequence[int], text: bytes) -> "RetainResult":
        """The result over `chunks` chunks, of which the covered ones have these `states`."""
        states = [""] * chunks
        counts = dict.fromkeys(RetainState, 0)
        for chunk, code in zip(covered, text, strict=True):
            state = _RETAIN_STATES.get(code, RetainState.ABSENT)
            states[chunk] = state.name.lower()
            counts[state] += 1
        accepted, clipped, absent = counts.values()
        return cls(accepted, clipped, absent, tuple(states))


@dataclass(frozen=True, slots=True)
class AnnounceResult:
    """Result of `Pool.announce`. `announced + clipped + absent` is the number of chunks it named.

    Announced: leading chunks that are in DRAM, being promoted, or next when there is room. Clipped: stored, but beyond the
    share that may be announced. Absent: not stored, or the daemon is away.
    """

    announced: int
    clipped: int
    absent: int
