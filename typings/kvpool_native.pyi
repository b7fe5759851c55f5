"""
Native core of kvpool: key hashing, shared index, slot arena, checksummed copies.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray


class RowLayout:
    """Fields of a row that crosses packed, in their order, without holes."""

    @property
    def bytes(self) -> int:
        """Of a whole row."""

    @property
    def names(self) -> list[str]: ...

    @property
    def formats(self) -> list[str]:
        """As numpy writes them."""

    @property
    def offsets(self) -> list[int]:
        """In bytes."""

MOVE_ROW: RowLayout = ...

RESTORE_ROW: RowLayout = ...

CATALOGUE_ROW: RowLayout = ...

CHANGE_ROW: RowLayout = ...

DEVICE_MOVE_ROW: RowLayout = ...

class MalformedFrame(ValueError):
    pass

def encode_record(kind: int, sequence: int, record: object, names: tuple[str, ...]) -> bytes:
    """
    The frame of a record's fields, by their names: numbers of 64 bits, floats, text, bytes, and lists, tuples and maps of such.
    AssertionError for one that is too long.
    """

class FrameSocket:
    """
    A client's end of the daemon's socket: sends frames, and receives those that answer them. One thread at a time.
    OSError where the socket fails, is closed (ConnectionResetError) or time runs out (TimeoutError), MalformedFrame for
    what is no frame: after each the socket is of no use. Signals' handlers run meanwhile. GIL released over waits.
    """

    def __init__(self, fd: int) -> None:
        """Of a connected stream socket, which somebody else closes."""

    def ask(self, kind: int, sequence: int, record: object, names: tuple[str, ...], timeout_s: float, descriptors: int = 0) -> bytes:
        """
        Sends a frame as `encode_record` makes it, and returns the body of the next one, with which so many descriptors may come.
        """

    def receive(self, timeout_s: float, descriptors: int = 0) -> bytes:
        """The body of the next frame."""

    def send(self, frames: bytes, timeout_s: float) -> None:
        """Sends whole frames."""

    def post(self, frames: bytes) -> bool:
        """
        Sends whole frames without waiting. False where the socket is full: then nothing was sent.
        """

    def take_descriptors(self) -> list[int]:
        """
        Those that came with the latest answer, once; the caller closes them. What nobody takes is closed.
        """

    def forget(self) -> None:
        """The socket is closed, or about to be. Any thread."""

@overload
def hash_leaves(tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], chunk_tokens: int) -> bytes:
    """
    Leaves of the full chunks of int32 or int64 tokens, 32 bytes each. GIL released over many.
    """

@overload
def hash_leaves(tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], chunk_tokens: int) -> bytes: ...

@overload
def hash_chunks(tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], chunk_tokens: int, parents: tuple[bytes, ...]) -> tuple[bytes, tuple[bytes, ...]]:
    """
    (leaves, keys): `hash_leaves` and, behind each parent, `chain_keys`; of one in the time of the first. GIL released over many.
    """

@overload
def hash_chunks(tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], chunk_tokens: int, parents: tuple[bytes, ...]) -> tuple[bytes, tuple[bytes, ...]]: ...

def chain_keys(parents: bytes, leaves: bytes) -> bytes:
    """
    Keys of the chunks that follow each of the packed `parents`: those of one behind those of another. GIL released over many.
    """

def name_keys(roots: bytes, names: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order='C', device='cpu', writable=False)]) -> bytes:
    """
    Keys of chunks without a parent by an engine's names, uint8 [names, 32], behind each of the packed `roots`: those of one behind those of another. GIL released over many.
    """

def mix_leaf(leaf: bytes, payload: bytes) -> bytes:
    """A leaf with content mixed in."""

def derive_root(fields: list[bytes]) -> bytes:
    """A root over length-prefixed fields."""

def blake3(data: bytes) -> bytes:
    """Plain BLAKE3 of 32 bytes. GIL released."""

def blake3_each(values: list[bytes]) -> bytes:
    """The plain BLAKE3 of each, 32 bytes one after the other."""

def hash_lanes() -> str:
    """Vector width of leaf hashing: avx512, avx2 or scalar."""

OWNERS_PER_CHUNK: int = 4

class RemoteIndex:
    """
    Which other node has which chunk, by fingerprint: written by the daemon alone.
    """

    def __init__(self, mapping: Mapping, buckets: int, epoch: bytes, seed: bytes = ...) -> None:
        """Formats a new region. `seed` places the keys; empty: drawn."""

    @staticmethod
    def buckets_for(pairs: int) -> int:
        """Buckets that hold so many pairs of chunk and owner."""

    @staticmethod
    def bytes_of(buckets: int) -> int:
        """Bytes of a region with so many buckets."""

    def add_owner(self) -> int | None:
        """A number; None where all are in use, or their entries not emptied yet."""

    def retire(self, owner: int) -> None:
        """Nobody finds a chunk of this owner any more."""

    def set_pace(self, owner: int, ns_per_mib: int, latency_us: int) -> None:
        """Readers see how long this owner's chunks take."""

    def insert(self, owner: int, keys: bytes) -> None: ...

    def remove(self, owner: int, keys: bytes) -> None:
        """Pairs that are not there are ignored."""

    def runs(self, keys: bytes, first: int = 0) -> list[tuple[int, int]]:
        """
        (owner, chunks) for each live owner of key `first`: how many keys from there on it has; the longest run first.
        """

    def keys_by_owner(self, keys: bytes) -> list[tuple[int, list[int]]]:
        """
        (owner, indexes) for each live owner of any of these keys, by the first one that it has: which of them it has.
        """

    def sweep(self, buckets: int) -> bool:
        """Empties entries of ended owners; whether any are left."""

    def count_of(self, owner: int) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def dead(self) -> int:
        """Entries of ended owners, not emptied yet."""

    @property
    def capacity(self) -> int: ...

    @property
    def evicted(self) -> int: ...

    def verify(self) -> list[str]:
        """Recounts everything: broken invariants, one line each."""

    def verify_part(self, position: int, limit: int) -> tuple[int, list[str]]:
        """
        (next, broken): each entry by itself in `limit` buckets; next is 0 at the end.
        """

class RemoteView:
    """Read side of the remote index; what it has is a hint."""

    def __init__(self, mapping: Mapping) -> None: ...

    def has(self, key: bytes) -> bool: ...

    def pace_of(self, key: bytes) -> tuple[int, int]:
        """
        (nanoseconds for each MiB, microseconds before): of the fastest owner; (0, 0) where none is known.
        """

    @property
    def epoch(self) -> bytes: ...

def keep_freed_memory(kept_bytes: int, block_bytes: int) -> bool:
    """
    Has the process keep freed memory for blocks of so many bytes at most; False where the C library has no such setting.
    """

def place_on_nodes(mapping: Mapping, nodes: Sequence[int], *, in_turns: bool) -> int:
    """Where new pages come from; 0 or an errno."""

class Mapping:
    """A shared memory region, mapped for as long as this object lives."""

    @staticmethod
    def create(name: str, size: int, hugetlb: bool = False) -> Mapping:
        """A new zeroed region, sealed against resizing. Raises OSError."""

    @staticmethod
    def attach(fd: int, size: int, writable: bool) -> Mapping:
        """Maps another process's region; the descriptor is duplicated."""

    def populate(self, offset: int, length: int) -> None:
        """Brings pages into memory, bytes unchanged. GIL released."""

    def collapse(self, offset: int, length: int) -> bool:
        """Asks for huge pages; returns whether they were made. GIL released."""

    def seal_read_only(self) -> None:
        """No new writable mapping from now on; existing ones keep their rights."""

    def view(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        All bytes as a numpy array that keeps the region mapped; do not write if not writable.
        """

    @property
    def fd(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def writable(self) -> bool: ...

    def __repr__(self) -> str: ...

class HitNeeds:
    """
    What a hit needs of each column of a prompt's keys. Immutable; any thread.
    """

    def __init__(self, runs: Sequence[int], elsewhere_max: int) -> None:
        """
        `runs`: how many chunks before its end, of each column; 0: all, as a chain. `elsewhere_max`: so many chunks of columns that
        are no chains may be on other nodes; a hit with more of them is sought among this node's chunks.
        """

    def keys_of(self, columns: tuple[bytes, ...], end: int, leaves: bool) -> bytes:
        """
        The keys that a hit of `end` chunks needs of each column, one column's behind another's; `leaves`: of a chain the last one
        alone.
        """

    @property
    def runs(self) -> list[int]: ...

class LifePage:
    """Which life of the daemon may give the arena's slots away."""

    def __init__(self, mapping: Mapping) -> None: ...

    @property
    def life(self) -> int:
        """0: no life has begun."""

    def begin(self, life: int) -> None:
        """From now on the slots are this life's."""

class IndexView:
    """Read side of the shared index; a hit is a hint with a generation."""

    def __init__(self, mapping: Mapping, remote: RemoteView | None = None, life_page: LifePage | None = None, life: int = 0) -> None:
        """
        `remote`: where chunks are looked up that this node has not. `life_page`: where a later life of the daemon that has taken the
        arena over says so; the index is that of the life of number `life`.
        """

    def lookup(self, keys: bytes, most: int = 4294967295) -> bytes:
        """
        The level of each chunk of the run of readable chunks from the first key on, of the first `most` at most. GIL released over many.
        """

    def probe(self, roots: bytes, names: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order='C', device='cpu', writable=False)]) -> bytes:
        """
        Of each chunk without a parent that an engine names, uint8 [names, 32], behind packed roots of ranks: the fastest level from DRAM on, of the rank where that is slowest; 0 where some rank has it not. GIL released over many.
        """

    def last_run(self, keys: bytes, end: int, length: int, here: bool = True) -> tuple[int, bytes]:
        """
        (end, levels): the largest end up to this one before which so many chunks in a row, or all, are readable, and the level of each of them; here: on this node, otherwise on another one, too. GIL released.
        """

    def find_hit(self, needs: HitNeeds, columns: tuple[bytes, ...], end: int, here: bool = False) -> tuple[bytes, int]:
        """
        (levels, chained): the level of each chunk of the longest hit of `end` chunks at most, the slowest among the columns that need
        it, and how far the chains alone reach; here: of this node's chunks alone. GIL released over many.
        """

    def is_being_written(self, key: bytes) -> bool:
        """
        Whether somebody is saving the chunk, or it is on its way from another tier.
        """

    def generation_at(self, slot: int) -> int:
        """
        Of the readable chunk in a slot; 0 where there is none. A slot: its region in the upper half, its number in the lower.
        """

    def count_current(self, slots: bytes, generations: bytes) -> int:
        """
        How many leading slots, u64, still have these generations, u64: what was read of their chunks before counts.
        """

    def landed_at(self, slot: int) -> int:
        """
        How many extents of the chunk in a slot are in place; bit 31: no more come.
        """

    def checksum_at(self, slot: int, extent: int) -> int: ...

    def covers(self, slot: int, extents: int) -> bool:
        """
        Whether the slot and checksums of so many extents have words in the index.
        """

    @property
    def is_taken_over(self) -> bool:
        """Whether a later life of the daemon has the arena."""

    @property
    def count(self) -> int: ...

    @property
    def epoch(self) -> bytes: ...

class LandingBoard:
    """
    Where a tier announces the extents of chunks that it brings into the arena.
    """

    def __init__(self, index: Mapping) -> None: ...

    def land(self, slot: int, first: int, checksums: bytes) -> None:
        """
        Extents `first` and on of the chunk being promoted into this slot are in place, with these CRC-32C, u32; in their order.
        """

    def fail(self, slot: int) -> None:
        """No more extents of this chunk come."""

DEFAULT_PRIORITY: int = 35

TOKEN_IDS_MAX: int = 4096

ARENA_BYTES_MAX: int = 4398046511104

FILES_BYTES_MAX: int = 70368744177664

class DirectoryGeometry:
    """Sizes of a directory, before memory is mapped."""

    @staticmethod
    def plan(capacity: int, segment_bytes: int, max_chunks: int, further_entries: int = 0, device: DirectoryGeometry | None = None) -> DirectoryGeometry:
        """
        Of a tier whose slots clients map. `device`: the geometry of the copies whose slots' words its index has too.
        """

    @staticmethod
    def plan_device(capacity: int, segment_bytes: int, max_chunks: int) -> DirectoryGeometry:
        """
        Of copies in the memory of a device: whole segments of this size, which are `arena_bytes` together, no more than the capacity.
        """

    @staticmethod
    def plan_files(segment_bytes: int, segments: int, max_chunks: int) -> DirectoryGeometry: ...

    @property
    def capacity(self) -> int: ...

    @property
    def max_chunks(self) -> int: ...

    @property
    def segment_bytes(self) -> int: ...

    @property
    def segments(self) -> int: ...

    @property
    def arena_bytes(self) -> int: ...

    @property
    def index_bytes(self) -> int: ...

    @property
    def records_bytes(self) -> int:
        """Of the region for records that are to outlive the process."""

class Directory:
    """What is stored, where, for whom. Control thread only."""

    def __init__(self, arena: Mapping | None, index: Mapping, geometry: DirectoryGeometry, epoch: bytes, policy: str = 'lru', seed: bytes = ..., records: Mapping | None = None) -> None: ...

    @staticmethod
    def of_files(geometry: DirectoryGeometry, policy: str = 'lru', level: int = 2) -> Directory:
        """
        The directory of a tier in files, which no client looks into; `level`: of that tier.
        """

    @staticmethod
    def of_copies(originals: Directory, geometry: DirectoryGeometry, policy: str = 'lru', seed: bytes = ...) -> Directory:
        """
        Copies in the memory of a device (level 0) of chunks that another directory has READY. They are reserved and committed
        here, by `sources` of that directory; a chunk that leaves it takes its copy along, and a use of it there is one here.
        The other's geometry was planned with this one. The same namespaces are to be added to both.
        """

    @property
    def level(self) -> int:
        """The number of its tier."""

    def add_class(self, chunk_bytes: int, extents: int, has_place_below: bool = True, instead: int | None = None) -> int:
        """
        The size class of such chunks, new or not. `instead`: a class without chunks that becomes it.
        """

    def add_namespace(self) -> int: ...

    def set_chunk_tokens(self, namespace: int, tokens: int) -> None:
        """
        How many token ids each chunk of a namespace has, which `runs_of` reports.
        """

    def mark_segment_ready(self, segment: int) -> None: ...

    def tokens_of(self, key: bytes) -> bytes:
        """Token ids of a chunk, i32; empty where none are known here."""

    def limit_token_ids(self, bytes: int) -> None:
        """
        At most so many bytes of token ids from now on; chunks beyond that are stored without them, and counted.
        """

    def stats(self) -> dict[str, Any]: ...

    @property
    def evicted_chunks(self) -> int:
        """How many have left the pool; `stats` has it too, with all else."""

    def bound_chains(self, chunks: int) -> None:
        """No chain gets more chunks than this from now on."""

    def records(self, cursor: int, limit: int, end: int = 4294967295) -> PinnedRecords:
        """A page of the chunks that are stored, from a cursor on, pinned."""

    class CopyRoom:
        """Room for a copy of records: see `copy_for_child`."""

        def __init__(self, max_chunks: int, places: int) -> None:
            """
            With pages for so many records, of so many that there may be. Any thread.
            """

    def verify(self, with_shared: bool = True) -> list[str]:
        """
        One line per broken invariant. Without what clients map, which a forked child does not have.
        """

    def copy_for_child(self, room: Directory.CopyRoom | None = None) -> None:
        """
        Copies records that are kept, which a child that is forked next does not have: its `verify` looks at the copy.
        """

    def forget_copy(self) -> None:
        """Ends the copy of `copy_for_child`, in the parent."""

    def verify_shared(self, cursor: int, limit: int) -> tuple[int, list[str]]:
        """(cursor to go on from or 0, lines): what clients map, a part at once."""

    def acquire(self, namespace: int, keys: bytes, now_ns: int = 0, parent: bytes = ...) -> Held:
        """
        Holds the longest stored prefix; behind a parent that the caller holds: of what follows it, and of that alone.
        """

    def extend(self, hold: int, keys: bytes, now_ns: int = 0) -> int:
        """
        Adds what is stored of the keys behind a hold's last chunk to it: how many chunks.
        """

    def count_whole(self, holds: Sequence[int]) -> list[int]:
        """How many leading chunks of each hold are not dropped."""

    def shorten(self, hold: int, chunks: int, now_ns: int) -> bool:
        """Leaves a hold its leading chunks."""

    def hold_chain(self, namespaces: Sequence[int], leaves: bytes, chunks: int, holder: int | None, now_ns: int) -> list[int]:
        """
        Holds, on each rank, the chain of so many chunks that ends in its key of `leaves`, counted for a holder; none unless all of
        them are here whole, and allowed.
        """

    def hold_each(self, namespaces: Sequence[int], keys: Sequence[bytes], places: Sequence[Sequence[int]], holder: int | None, now_ns: int) -> list[HeldSet]:
        """
        A hold on what is here of these parts of a set, each a column of keys of one namespace, with the place of each in the set,
        counted for a holder. What it may not protect of all parts together is left out, the last places first.
        """

    def join_sets(self, ranks: Sequence[Sequence[HeldSet]], count: int, is_last_newest: bool, now_ns: int) -> JoinedSet:
        """
        One hold on each rank in place of those of parts of a set of so many keys: on what all ranks hold and nobody has dropped
        since; the rest is released. Released together, the last key of them is used last if `is_last_newest`, else the first one.
        """

    def join_holds(self, holds: Sequence[int]) -> int:
        """
        One hold in place of several on chunks without a parent, of one namespace; it counts for whom the first one does.
        """

    def duplicate(self, holds: Sequence[int]) -> list[int]:
        """A new hold on the same chunks for each of these."""

    def columns(self, holds: Sequence[int]) -> HoldColumns:
        """Where the chunks of holds and pins lie, of one after the other."""

    def copies(self, holds: Sequence[int]) -> HoldColumns:
        """
        Where their copies lie, in the memory of a device; generation 0 and level 255: there is none.
        """

    def key_of(self, hold: int, position: int) -> bytes:
        """The key of one chunk of a hold."""

    def release(self, hold: int, now_ns: int) -> bool:
        """Ends a hold; False where it is unknown."""

    def release_part(self, hold: int, limit: int, now_ns: int) -> int:
        """
        The same for its last `limit` chunks: how many they are; fewer: it has ended.
        """

    def reserve(self, namespace: int, size_class: int, parent: bytes, keys: bytes, now_ns: int, holder: int | None = None, first: int = 0, limit: int = 18446744073709551615, may_wait: bool = False, is_kept: bool = False, is_joint: bool = False) -> Reserved:
        """
        Slots for the keys from `first` on; parent b"" is the root. `holder`: whom it counts for, see `affordable`. Fewer
        states than keys: the `limit` was reached, or (`may_wait`) the next chunk would be NOT_READY; then `reserve_more`
        goes on. `is_kept`: what is there stays held until the reservation is ended, though nothing is to be written. `is_joint`:
        others than the holder write too: a later life may give the slots to nobody before all of them have ended.
        """

    def reserve_more(self, reservation: int, keys: bytes, now_ns: int, first: int = 0, limit: int = 18446744073709551615, may_wait: bool = False, is_run: bool = False, is_joint: bool = False) -> Reserved:
        """
        The same for keys that follow a reservation's last chunk. `is_run`: no other reservation's chunk is to be between those
        of this one: it is pending without a slot, and ends the run. `is_joint`: as in `reserve`.
        """

    def commit(self, reservation: int, first: int, checksums: bytes, now_ns: int = 0, tokens: bytes = ..., sources: bytes = ..., source_level: int = 1, scope: bytes = ..., row: int = 0, rows: int = 18446744073709551615) -> bytes:
        """
        States u8 per chunk; `first` counts reserved chunks; checksums u32 [chunk][extent]; token ids i32
        [chunk][token], or none; `sources`, of a lower tier or copies: the generations u64 that the tier of
        `source_level`, from which the chunks were copied, must still have. `scope`: stored behind the ids of each. Of the
        columns those `rows` from `row` on.
        """

    def land_saved(self, reservation: int, first: int, count: int, first_extent: int, checksums: bytes) -> bool:
        """
        Further extents of reserved chunks lie in their slots, for who follows them: u32 [chunk][extent]. False where the
        reservation is unknown or has expired.
        """

    def follow_saves(self, namespace: int, parent: bytes, keys: bytes) -> HoldColumns:
        """
        Where the chunks lie that are being saved after a parent, to be followed; nothing is held.
        """

    def end_reservation(self, reservation: int, now_ns: int) -> bool: ...

    def end_part(self, reservation: int, limit: int, now_ns: int) -> bool:
        """The same as end_reservation for `limit` chunks; whether it has ended."""

    def expire_part(self, reservation: int, limit: int, now_ns: int) -> bool:
        """
        Takes `limit` chunks out of sight, whose slots nobody gets before the reservation ends; whether all of them are.
        """

    @property
    def used_bytes(self) -> int:
        """Payload of all slots in use; `stats` has it too, with all else."""

    def drop(self, key: bytes, generation: int) -> int:
        """
        Takes a bad chunk and its descendants out, where it has this generation and has landed; returns how many went.
        """

    def discard(self, key: bytes) -> int:
        """
        Takes a good chunk and its descendants out, counted as flushed; returns how many went.
        """

    def restore_former(self, index: Mapping, records: Mapping, namespaces: Sequence[int | None], now_ns: int) -> FormerCounts:
        """
        Takes over what a former life has left in the same arena: chunks, and slots that somebody may still write to.
        `namespaces[former number]`: the number here, or None. GIL released.
        """

    def withheld(self) -> list[Withheld]:
        """What writers of a former life may still write to, by holder."""

    def release_withheld(self, holder: int) -> int:
        """
        The writers of a holder of a former life have ended; returns how many slots are free again.
        """

    def rename_withheld(self, holder: int, instead: int) -> None:
        """What is withheld for a holder is withheld for another one from now on."""

    def promote(self, namespace: int, size_class: int, parent: bytes, keys: bytes, now_ns: int, source_levels: bytes = ..., source_generations: bytes = ..., checksums: bytes = ..., is_external: bool = False, are_alone: bool = False) -> Reserved:
        """
        Slots to read lower tiers' chunks into; RESERVED ones are to be
        read. The hold ends by `release`. Of each chunk, where named: the level u8 that it comes from, its generation u64
        there, and u32 [chunk][extent] what its extents must be; else the uppermost tier that has it. `is_external`: the levels
        are of tiers without a directory here, such as a peer's: whether they have a chunk is known when it has come.
        Chunks that `are_alone` have no parent, and each is answered for itself.
        """

    def landed(self, key: bytes, generation: int, tokens: bytes = ...) -> bool:
        """
        Makes a promoted chunk an ordinary one; False where it has gone meanwhile. `tokens`: its token ids, i32.
        """

    def name_tokens(self, namespace: int, keys: bytes, tokens: bytes) -> tuple[int, bool]:
        """
        Gives consecutive chunks that came without their token ids these, i32, and reports them as arrived once more:
        (done, is_waiting), how many leading ones have them now, and whether the next one is on its way.
        """

    def has_landed(self, key: bytes, generation: int) -> bool:
        """
        Whether all extents of a promoted chunk have landed; True also for a chunk that is not being promoted, and in a tier
        without memory.
        """

    def fail_landing(self, key: bytes, generation: int, fault: int) -> None:
        """
        Takes a promoted chunk that did not come out, with what follows it. `fault`: 0 the source's, which alone drops it
        there too, 1 of the way to it, 2 of the memory here.
        """

    def admit(self, admitted: int, least_chance: float = 0.0) -> None:
        """
        These chunks are written to the lower tier from now on (0 all, 1 those with at least this chance of a use and those
        touched twice, 2 those touched twice, 3 none), with what precedes them; others may be evicted unsaved.
        """

    def knows_chances(self) -> bool:
        """Whether the policy has learned how likely chunks are to be used again."""

    def forget_written(self, cursor: int, looks: int) -> int:
        """
        What was evicted from the lower tier since its last use may be written there once more: of the records from the
        cursor (0: the start) on, no more than `looks`. Where to go on, 0 at the end.
        """

    def remember_evicted(self, chunks: int) -> None:
        """
        Remembers evicted chunks, about so many: one that comes again counts as touched before. To be called once.
        """

    @property
    def unsaved_bytes(self) -> int:
        """
        Bytes in use that cannot be evicted without a write before: not those of idle chunks that are saved or being saved.
        """

    def count_unsaved(self) -> int:
        """Stored chunks that every lower tier lacks."""

    def keys_of(self, holds: Sequence[int]) -> bytes:
        """The keys of holds and pins, of one after the other, packed."""

    def protect_unsaved(self, is_protected: bool) -> None:
        """
        While True nothing is evicted that no other tier has: NOT_READY instead.
        """

    def restore(self, rows: bytes, now_ns: int = 0) -> bytes:
        """
        Rows in the format of `RESTORE_ROW`, ancestors first, the most recent first. A column of u8: 1 where the chunk was restored.
        """

    def finish_restore(self, generation: int = 0) -> None:
        """
        Generations go on behind this one, or behind the greatest that was restored.
        """

    def begin_count(self) -> None:
        """`counted` counts from now on."""

    @property
    def counted(self) -> int:
        """Chunks here that were reserved since the last `begin_count`."""

    def take_departed(self) -> bytes:
        """The keys that left this lower tier since the last call, packed."""

    def pin_unsaved(self, scan: int, order: int) -> Pinned:
        """
        Pins chunks of one chain that every lower tier lacks, ending in one of the first `scan` chunks; order 0: the coldest
        first, 1: the newest, 2: the worthiest.
        """

    def pin_unsaved_prefix(self, namespace: int, keys: bytes, parent: bytes = ...) -> Pinned:
        """
        The same of the longest stored prefix, or of what follows a parent; worth it or not.
        """

    def pin_unsaved_hold(self, hold: int, position: int) -> Pinned:
        """
        The same of one chunk of a hold or a reservation, and what precedes it; none where it is unknown.
        """

    def last_unsaved(self, hold: int, end: int = 18446744073709551615) -> int | None:
        """
        Where a hold or a reservation has its last stored chunk before `end` that every lower tier lacks.
        """

    def unsaved_holders(self) -> list[int]:
        """The holds and reservations of chunks that every lower tier lacks."""

    def pin_chunk(self, hold: int, position: int) -> int:
        """Pins one chunk of a hold; 0 where it is gone."""

    def pin_key(self, namespace: int, key: bytes) -> int:
        """
        Pins a chunk of a namespace; 0 where it is not stored here. Does not count as a use.
        """

    def pin_keys(self, namespace: int, keys: bytes) -> int:
        """One such pin on all of these that are stored here; 0 where none is."""

    def unpin(self, pin: int) -> bool:
        """Ends a pin: its chunks count as unused. False where it is unknown."""

    def cap_retained(self, share: float) -> None:
        """
        At most this share of the capacity is retained above the default priority from now on.
        """

    def retain(self, namespace: int, keys: bytes, priorities: bytes, durations_ms: bytes, now_ns: int) -> bytes:
        """
        Retains chunks, stored or being written, with priorities (u8) for durations (u32, 0: for good) after their last
        use, here and in lower tiers. Keys from the root on. A column of u8: 0 accepted, 1 clipped to the default,
        2 absent.
        """

    def retention(self, key: bytes) -> tuple[int, int] | None:
        """(priority, duration_ms) of a chunk; None where it is not here."""

    def retentions(self, hold: int) -> tuple[bytes, bytes]:
        """(priorities u8, durations_ms u32) of the chunks of a hold."""

    def next_expiry_ns(self) -> int | None:
        """
        When `expire_retention` is to be called next; None: no priority can expire.
        """

    def take_expired(self) -> bytes:
        """
        The keys of which the priority has expired in this lower tier since the last call, packed.
        """

    def expire_retention(self, now_ns: int) -> None:
        """
        Ends the priorities whose duration is over: they fall back to the default, a bounded number in each call.
        """

    def share_among_holders(self, share: float, user_share: float = 1.0) -> None:
        """
        A holder protects at most this share of what the others leave of the capacity from eviction, and a user with all of
        its holders at most the other share.
        """

    def limit_user(self, user: int, share: float) -> None:
        """
        This user with all its holders protects at most this share instead, and each of them its share of that.
        """

    def join_user(self, holder: int, user: int) -> None:
        """What the holder protects counts for the user too, from now on."""

    def leave_user(self, holder: int) -> None:
        """The holder has ended: what it protects counts until it is given back."""

    def affordable(self, holder: int, holds: Sequence[int], of: Sequence[int], wanted: int) -> int:
        """
        How many leading chunks of `wanted`, of each chain, the holder may protect. `holds`: what of each chain is here, 0 for
        nothing; `of`: the size class of its chunks. What it protects already costs nothing.
        """

    def charge(self, holds: Sequence[int], holder: int) -> bool:
        """
        Counts holds for a holder until they end; False where one is unknown or counts already.
        """

    def holders(self) -> list[HolderUse]:
        """What each holder protects from eviction."""

    def is_empty_namespace(self, namespace: int) -> bool:
        """Whether no chunk of it is here in any state."""

    def held_namespaces(self) -> list[NamespaceUse]:
        """Those of which there are chunks that cannot go."""

    def report_to(self, feed: ChangeFeed) -> None:
        """Reports every change to the feed from now on."""

    def runs_of(self, rows: bytes, payload_max: int) -> list[ChangeRun]:
        """
        Rows of the feed as runs that one event reports each. Raises ValueError for rows that are none, KeyError for a namespace
        that is not known.
        """

    def list_chunks(self, cursor: int, limit: int) -> tuple[int, bytes]:
        """
        (next cursor or 0, rows as the feed has them): the chunks that are here, as they are now.
        """

    def find(self, key: bytes) -> bytes:
        """A row of the chunk, empty where it is not here."""

    def place_of(self, key: bytes) -> tuple[int, int]:
        """
        (offset, generation) of the chunk's slot, as of now; generation 0: it is not here.
        """

class StoredRecord:
    """A chunk that is stored, as of when it was asked for."""

    @property
    def key(self) -> bytes: ...

    @property
    def offset(self) -> int:
        """Of its slot, in the tier's memory or files."""

    @property
    def generation(self) -> int:
        """Of its slot."""

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def extents(self) -> int: ...

    @property
    def namespace(self) -> int: ...

class PinnedRecords:
    """A page of a directory's chunks, which have a pin."""

    @property
    def next(self) -> int:
        """The cursor to go on from; 0: the end was reached."""

    @property
    def pin(self) -> int:
        """Ends by `unpin`; 0: there are no records."""

    @property
    def records(self) -> list[StoredRecord]: ...

class HeldSet:
    """A hold on chunks of a set."""

    @property
    def id(self) -> int:
        """Ends by `release`; 0: nothing is held."""

    @property
    def places(self) -> list[int]:
        """Of its chunks, which of the set's keys each is."""

class JoinedSet:
    """A hold on each rank on the same chunks of a set."""

    @property
    def holds(self) -> list[int]:
        """Each ends by `release`; none where nothing is held."""

    @property
    def places(self) -> list[int]:
        """Of their chunks, in their order, which of the set's keys each is."""

class Held:
    """A hold on leading chunks of a chain."""

    @property
    def id(self) -> int:
        """Ends by `release`; 0: nothing is held."""

    @property
    def chunks(self) -> int:
        """How many are held."""

class HoldColumns:
    """A row for each chunk of holds or pins, by column."""

    @property
    def offsets(self) -> bytes:
        """Of the slots, u64."""

    @property
    def generations(self) -> bytes:
        """Of the slots, u64."""

    @property
    def levels(self) -> bytes:
        """
        Of the fastest tier that has the chunk, u8; 255: the chunk was dropped.
        """

    @property
    def slots(self) -> bytes:
        """
        u64: the region in the upper half, the slot's number there in the lower; none where no client looks into the tier.
        """

class Reserved:
    """
    Answer to a reservation: a row for each key that was looked at, by column.
    """

    @property
    def id(self) -> int:
        """
        Of the reservation, or of a promotion's hold; 0: there is nothing to end.
        """

    @property
    def states(self) -> bytes:
        """What became of each key, u8: a `SaveState`."""

    @property
    def offsets(self) -> bytes:
        """Of the slots, u64; 0 where declined."""

    @property
    def generations(self) -> bytes:
        """Of the slots, u64; 0 where declined."""

    @property
    def slots(self) -> bytes:
        """As in `HoldColumns`, u64; anything where declined."""

class Withheld:
    """Slots that a holder of a former life may still write to."""

    @property
    def holder(self) -> int:
        """
        0: the former daemon itself; 2**32 - 1: several, or nobody in particular.
        """

    @property
    def slots(self) -> int: ...

    @property
    def bytes(self) -> int: ...

class FormerCounts:
    """What became of the chunks of a former life, each counted once."""

    @property
    def taken(self) -> int:
        """Chunks that are stored here now."""

    @property
    def taken_bytes(self) -> int: ...

    @property
    def withheld(self) -> int:
        """Slots that somebody may still write to."""

    @property
    def withheld_bytes(self) -> int: ...

    @property
    def unfinished(self) -> int:
        """Were not stored yet, or no more, and nobody writes to their slots."""

    @property
    def damaged(self) -> int:
        """The record, or the run of its slot, is not what it was."""

    @property
    def unpublished(self) -> int:
        """Their slots' words in the index say otherwise."""

    @property
    def unknown(self) -> int:
        """Of a namespace that is not known here."""

    @property
    def orphaned(self) -> int:
        """What precedes them was not taken."""

    @property
    def unplaced(self) -> int:
        """Their slot or key is taken, or there is no room."""

def why_former_refused(index: Mapping, records: Mapping, geometry: DirectoryGeometry) -> str:
    """
    Why a directory of this geometry cannot go on with a former life's; "" where it can.
    """

class Pinned:
    """
    Chunks of one chain that have a pin, so that they stay while they are written to a lower tier.
    """

    @property
    def id(self) -> int:
        """Ends by `unpin`; 0: nothing is pinned."""

    @property
    def chunks(self) -> int:
        """
        How many are pinned; without a pin how many were found to be evicted from the lower tier with those before them:
        there may be others behind.
        """

    @property
    def parent(self) -> bytes:
        """The key before the first of them; b"": the root."""

    @property
    def namespace(self) -> int: ...

class HolderUse:
    """Bytes that one holder protects from eviction."""

    @property
    def holder(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def zombie_bytes(self) -> int:
        """Of writers whose time is over and who may still write."""

    @property
    def leased_bytes(self) -> int:
        """At most so many."""

class NamespaceUse:
    """Chunks of one namespace that cannot go."""

    @property
    def namespace(self) -> int: ...

    @property
    def writing(self) -> int:
        """Being written."""

    @property
    def zombies(self) -> int:
        """Whose slots are not free yet."""

    @property
    def held(self) -> int: ...

class ChangeRun:
    """Changes of chunks that one event reports."""

    @property
    def kind(self) -> int:
        """An `EventKind`."""

    @property
    def change_kind(self) -> int:
        """Of each of them: 0 arrived, 1 left, 2 has another priority."""

    @property
    def namespace(self) -> int: ...

    @property
    def level(self) -> int:
        """The tier that each of them came to or left."""

    @property
    def keys(self) -> bytes:
        """Packed."""

    @property
    def parent(self) -> bytes:
        """The key before the first of them; b"": the root, or not reported."""

    @property
    def tokens(self) -> bytes:
        """Token ids, i32, of all of them or of none."""

    @property
    def tiers(self) -> int:
        """Bits of the tiers that have them."""

    @property
    def tiers_before(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def priority_before(self) -> int: ...

    @property
    def cause(self) -> int:
        """A `Cause`."""

    @property
    def scope(self) -> bytes:
        """Packed, see `kvpool.keys`; b"" where it is not known."""

class ChangeFeed:
    """
    Chunks that come to tiers and leave them, in order. Control thread only.
    """

    def __init__(self, capacity: int) -> None: ...

    def take(self, limit: int) -> tuple[bool, bytes]:
        """
        (whether something before these was lost, rows in the format of `CHANGE_ROW`), the oldest first.
        """

    def fileno(self) -> int:
        """Readable while changes wait that no `take` has seen."""

    @property
    def waiting(self) -> int: ...

    @property
    def lost(self) -> int:
        """Changes forgotten since the start."""

def pack_ids(column: bytes) -> bytes:
    """
    A column of i32 as a msgpack array. Raises ValueError unless it is whole ids.
    """

class TierSet:
    """
    Directories of one pool in order of speed, which report to one another what they hold while this lives.
    """

    def __init__(self, tiers: tuple[Directory, ...]) -> None:
        """The first one has the table that clients read. All must be empty."""

    def tiers_of(self, key: bytes) -> int:
        """The tiers that can be read for a chunk, a bit a level."""

class CacheView:
    """Where an engine has its blocks; holds a reference to `owner`."""

    def __init__(self, bases: Sequence[int], *, planes: int, blocks: int, plane_block_bytes: int, plane_stride: int, block_stride: int, owner: object, runs: int = 1, run_stride: int = 0) -> None:
        """
        `runs`: of bytes in a block's plane, `run_stride` apart; plane_block_bytes is the bytes of all of them.
        """

class LoadJob:
    """A load that runs from the start."""

    def wait_extent(self, extent: int, timeout_s: float) -> int:
        """1: in place, 0: the load ended before, -1: time is over. GIL released."""

    def wait(self, timeout_s: float) -> bool: ...

    def cancel(self) -> None: ...

    def done(self) -> bool: ...

    def chunks(self) -> int: ...

    def reason(self) -> int: ...

    def reasons(self) -> bytes:
        """Of a set, of each chunk, u8; CANCELLED for one without a verdict."""

    def progress(self) -> int: ...

class SaveJob:
    """A save that copies what is announced."""

    def announce(self, extent: int) -> bool:
        """False if the extent was announced before."""

    def announce_all(self) -> None:
        """
        Copy every extent not announced: little of it before this returns. GIL released.
        """

    def wait(self, timeout_s: float) -> bool:
        """
        Whether everything announced was copied, or the job cancelled, within the time.
        """

    def cancel(self) -> None: ...

    def is_cancelled(self) -> bool: ...

    def progress(self) -> int: ...

    def checksums(self) -> bytes:
        """CRC-32C as u32 [chunk][extent]; empty unless every extent was copied."""

    def copied_extents(self) -> int:
        """Extents that were copied, from the first one up to one that was not."""

    def checksums_from(self, first: int) -> bytes:
        """
        CRC-32C as u32 [chunk][extent] of the extents from `first` on that `copied_extents` counts.
        """

class CopyPool:
    """Native threads that copy for one client."""

    def __init__(self, threads: int) -> None: ...

    def load(self, view: CacheView, arena: Mapping, index: IndexView, offsets: bytes, slots: bytes, generations: bytes, block_ids: bytes, extents: int, payload_bytes: int, verifies: bool, *, numbers: bytes = ..., extent_bytes: int = 0, is_set: bool = False) -> LoadJob:
        """
        Starts a load. Columns: u64 offsets, slots and generations, i64 block ids; u32 `numbers`: in a chunk, of each extent of the view, rising, none for all from 0 on; `extent_bytes`: of each as it is stored, 0 for payload_bytes. `is_set`: a chunk that fails takes none behind it along. ValueError for what lies outside.
        """

    def save(self, view: CacheView, arena: Mapping, offsets: bytes, block_ids: bytes, extents: int, payload_bytes: int, first_extent: int = 0, *, numbers: bytes = ..., extent_bytes: int = 0) -> SaveJob:
        """
        Prepares a save of `extents` extents of the view from `first_extent` on; nothing is copied before it is announced. `numbers` and `extent_bytes` as in `load`.
        """

    def stop(self) -> None: ...

    def bytes_copied(self) -> int: ...

    def cpu_seconds(self) -> float: ...

    def summarize(self, arena: Mapping, offsets: bytes, target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')] | None, *, form: str, dtype: str, head_dim: int, kv_heads: int, layers: int, layer_bytes: int, chunk_tokens: int, block_tokens: int, extents: int) -> SummaryJob:
        """
        Starts to build the summaries of chunks at `offsets` (u64): behind their layers where `target` is None, else in [chunk][extents * layer_bytes]. ValueError for what lies outside.
        """

def summary_bytes(form: str, head_dim: int) -> int:
    """Bytes of the summary of one block and KV head."""

def build_summaries(*, form: str, dtype: str, head_dim: int, kv_heads: int, keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], token_stride: int, block_tokens: int, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    Builds out [block][kv_head]. `keys`, `values`: addresses u64 of the first token's first KV head, for each block. GIL released.
    """

class SummaryJob:
    """Summaries that are built from the start."""

    def wait(self, timeout_s: float) -> bool:
        """Whether all was built, or the job cancelled, within the time."""

    def cancel(self) -> None: ...

    def is_cancelled(self) -> bool: ...

    def progress(self) -> int:
        """Layers of chunks that are done."""

    def checksums(self) -> bytes:
        """CRC-32C as u32 [chunk][extent]; empty unless all was built."""

def extent_checksums(arena: Mapping, offset: int, extent_bytes: int, extents: int) -> bytes:
    """CRC-32C of each extent in place, u32. GIL released."""

def copy_extents(target: Mapping, target_offsets: bytes, source: Mapping, source_offset: int, extents: int, extent_bytes: int) -> bytes:
    """
    Copies so many extents to each offset, which lie one behind the other in the source; the CRC-32C of what was stored, u32 [offset][extent]. GIL released. ValueError for what lies outside.
    """

def copy_plain(target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """memcpy, GIL released: the floor of the benchmarks."""

def gather_plain(view: CacheView, block_ids: bytes, chunk_blocks: int, chunks: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    memcpy of each piece into chunks that lie one behind the other, GIL released: a floor of the benchmarks.
    """

def scatter_plain(view: CacheView, block_ids: bytes, chunk_blocks: int, chunks: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """The way back, GIL released. ValueError for what lies outside."""

def crc32c(data: NDArray[numpy.uint8] | bytes, init: int = 0) -> int:
    """GIL released."""

def crc_path() -> str:
    """How checksums are computed: avx512, sse4.2 or table."""

class WorkerTeam:
    """The caller and some threads that work on one thing at a time."""

    def __init__(self, threads: int) -> None: ...

    @property
    def threads(self) -> int: ...

class Recall:
    """Chooses blocks by their summaries, one layer and step at a time."""

    def __init__(self, *, form: str, head_dim: int, kv_heads: int, group: int, loose_bound: float = 8.0, loose_share: float = 0.5) -> None: ...

    def run(self, team: WorkerTeam, queries: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], records: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], *, take: int, wants_tail: bool) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C')], Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')], Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')] | None, Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C')] | None]:
        """
        (chosen [kv_heads, take], is_dense [kv_heads], kept_mass [heads], loose_share [heads], tail_logits [heads] or None, tail_values [heads, head_dim] or None). `queries` [heads, head_dim] unscaled; `records`: addresses u64 of the first KV head's record, for each block. GIL released.
        """

    def attend(self, team: WorkerTeam, dtype: str, query: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], keys_behind: int, records: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], records_behind: int, tokens: int, block_tokens: int, first: int, blocks: int, take: int, value_offset: int, token_stride: int, loose_share: float, tail_weight_max: float) -> tuple[Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C')], float, int, int]:
        """
        A step of a layer: (value [heads, head_dim], sum of kept masses, how many these are, KV heads that have read everything). `keys`, `records`: addresses u64 by run, of layer 0; the layer's lie so many bytes behind. `first`: run of the first of the middle `blocks`. GIL released. ValueError for shapes that do not agree; the addresses are believed.
        """

def sparse_path() -> str:
    """What builds and recalls: avx512, avx2 or portable."""

def force_sparse_path(name: str) -> None:
    """For tests: one path, or '' for the best."""

def tune_copies(piece_bytes: int | None = None) -> None:
    """
    Measures the variants of a copy for pieces of such a length, None: of every length. Once in a process.
    """

def copy_choices() -> dict[str, str | float]:
    """
    Which variant copies pieces of which length, and what it took to find out.
    """

def copy_variant_fault() -> str:
    """What is wrong with KVPOOL_COPY_VARIANT; empty where nothing is."""

GENERATION_END: int = 4611686018427387904

def restoring_order(rows: bytes) -> bytes:
    """
    Numbers (u32) of the good rows of 120 bytes, ancestors and recent ones first. GIL released.
    """

class SlotHeader:
    """The chunk that the header page of a slot on disk describes."""

    @property
    def epoch(self) -> bytes:
        """Of the pool, 16 bytes."""

    @property
    def key(self) -> bytes: ...

    @property
    def parent(self) -> bytes:
        """Zeros: the chunk is the first of its prompt."""

    @property
    def namespace(self) -> bytes:
        """Its fingerprint, 32 bytes."""

    @property
    def generation(self) -> int:
        """Of the slot."""

    @property
    def extent_bytes(self) -> int: ...

    @property
    def extents(self) -> int: ...

    @property
    def checksums(self) -> bytes:
        """CRC-32C of each extent, u32."""

    @property
    def tokens(self) -> bytes:
        """
        Token ids and the scope behind them, i32; empty where they are not known.
        """

def decode_ssd_header(page: bytes) -> SlotHeader | None:
    """
    The header that whole pages begin with where they are a slot's, else None.
    """

def ssd_header_length(page: bytes) -> int:
    """Bytes of the header that begins with this page; 0 where none does."""

def encode_ssd_header(epoch: bytes, key: bytes, namespace: bytes, extent_bytes: int, checksums: bytes) -> bytes:
    """
    The header of a chunk outside of any slot: without parent, generation and token ids.
    """

class ChunkOutcome:
    """What became of one chunk of a job."""

    @property
    def job(self) -> int: ...

    @property
    def chunk(self) -> int:
        """Its row in the job."""

    @property
    def status(self) -> int:
        """An `SsdStatus`."""

    @property
    def moved_bytes(self) -> int: ...

    @property
    def tokens(self) -> bytes:
        """Token ids and the scope behind them, i32, of a chunk that was read."""

class FilePages:
    """Pages of a file that another library reads through a map."""

    @staticmethod
    def open(path: str) -> FilePages:
        """OSError where it cannot be mapped. GIL released."""

    def load(self, bytes: int) -> None:
        """
        Has the first bytes of the file in memory; OSError where the disk does not give them. GIL released.
        """

SSD_HEADER_BYTES: int = 4096

SSD_EXTENTS_MAX: int = 4096

def ssd_header_bytes(extents: int) -> int:
    """Bytes of the header of a slot for a chunk of so many extents."""

SSD_WRITE_BYTES: int = 4194304

class SsdFiles:
    """The segment files of an SSD tier."""

    @staticmethod
    def open(path: str, segment_bytes: int, segments: int, wants_direct: bool) -> SsdFiles:
        """
        Opens or makes the directory and its files; OSError names what is wrong. GIL released.
        """

    @property
    def is_direct(self) -> bool: ...

    def sync(self) -> None:
        """
        Has the disk make what was written durable; OSError when it did not, which is final. GIL released.
        """

class SsdQueue:
    """Threads that move chunks between segment files and the arena."""

    def __init__(self, files: SsdFiles, arena: Mapping, index: Mapping, threads: int, jobs_max: int, wants_rings: bool = False) -> None: ...

    def read(self, rows: bytes, epoch: bytes, namespace: bytes, extents: int, extent_bytes: int, index: IndexView, urgency: int) -> int:
        """
        A job's number, 0 where the queue is full. `rows` in the format of `MOVE_ROW`. Extents are announced on the index as they land.
        """

    def write(self, rows: bytes, epoch: bytes, namespace: bytes, extents: int, extent_bytes: int, index: IndexView, tokens: Sequence[bytes] = []) -> int:
        """
        The same the other way; checksums are the index's. `tokens`: token ids, i32, of each row or of none; stored where
        they fit the header.
        """

    def verify(self, rows: bytes, epoch: bytes, namespace: bytes, extents: int, extent_bytes: int) -> int:
        """
        Reads chunks and compares them with their checksums, after everything else; nothing is stored. Rows as for `read`,
        any arena offset and slot.
        """

    def longest_transfer_ns(self) -> int:
        """
        For how long the transfer has been under way that was begun first; 0: none is.
        """

    def stats(self) -> dict[str, int]: ...

    def io(self) -> dict[str, int]:
        """
        How many threads have a ring, the errno of a refusal, whether what was moved differed once, and the latest failed
        transfer: its errno (0: none has failed), whether it was a write, where it began.
        """

    def take_outcomes(self, limit: int = 18446744073709551615) -> list[ChunkOutcome]:
        """
        What has ended, each thing once, `limit` at most. Nothing writes to the slot of a reported chunk.
        """

    def fileno(self) -> int:
        """Readable while there are outcomes."""

    def stop(self, timeout_s: float) -> bool:
        """
        Ends everything, reported like any end, and the threads; False where one has not ended in time. GIL released.
        """

def tls_library() -> str:
    """
    The OpenSSL in use, with its version, as it says itself; empty: this build or this machine has none.
    """

class OfferOutcome:
    """The end of one offer."""

    @property
    def offer(self) -> int: ...

    @property
    def end(self) -> int:
        """
        0: all was sent or marked as gone; 1: a connection failed; 2: its deadline passed; 3: it was withdrawn.
        """

    @property
    def sent_bytes(self) -> int: ...

class ExtentServer:
    """Threads that send chunks to peers that present a ticket."""

    def __init__(self, arena: Mapping, index: Mapping, address: str, port: int, *, threads: int, offers_max: int, strangers_max: int, connections_max: int, hello_timeout_s: float, stall_s: float, peer_bytes_per_s: int = 0, encrypted: bool = False) -> None:
        """
        Listens on a numeric address and a port, 0: any that is free. OSError names what is wrong. GIL released.
        """

    @property
    def port(self) -> int: ...

    def offer(self, ticket: bytes, index: IndexView, offsets: bytes, slots: bytes, generations: bytes, *, extents: int, extent_bytes: int, connections: int, peer: int, timeout_s: float) -> tuple[int, int]:
        """
        The number of an offer, and 0; or 0 and why there is none: 1 too many offers, 2 the ticket is in use, 3
        stopped. Columns of u64. The slots must be protected until the offer has ended.
        """

    def checks(self, index: IndexView, offsets: bytes, slots: bytes, generations: bytes, *, extents: int, extent_bytes: int) -> bytes:
        """
        CRC-32C u32 [chunk][extent] of chunks to be offered; empty where not all of their extents have landed.
        """

    def withdraw(self, ticket: bytes) -> bool:
        """
        Ends an offer, reported like any end; False where no offer has the ticket.
        """

    def stats(self) -> dict[str, int]: ...

    def take_outcomes(self, limit: int = 18446744073709551615) -> list[OfferOutcome]:
        """
        What has ended, each thing once, `limit` at most. Nothing writes to the slot of a reported chunk.
        """

    def fileno(self) -> int:
        """Readable while there are outcomes."""

    def stop(self, timeout_s: float) -> bool:
        """
        Ends everything, reported like any end, and the threads; False where one has not ended in time. GIL released.
        """

class PullOutcome:
    """The end of one chunk of a pull."""

    @property
    def job(self) -> int: ...

    @property
    def chunk(self) -> int:
        """Its row in the job."""

    @property
    def status(self) -> int:
        """
        0: done; 1: the peer no longer has it or sent other bytes; 2: failed; 3: cancelled.
        """

    @property
    def fault(self) -> str:
        """A word for what failed; empty where nothing did."""

    @property
    def received_bytes(self) -> int: ...

    @property
    def is_unmarked(self) -> bool:
        """
        It failed before an extent had landed, and is not marked: it can be received again.
        """

    @property
    def waited_us(self) -> int:
        """
        From the call to the begin of its connection, from which the other times count.
        """

    @property
    def first_extent_us(self) -> int:
        """0: none has landed."""

    @property
    def elapsed_us(self) -> int: ...

class PullQueue:
    """Threads that receive chunks from peers into the arena."""

    def __init__(self, arena: Mapping, index: Mapping, threads: int, jobs_max: int) -> None: ...

    def pull(self, address: str, port: int, ticket: bytes, index: IndexView, offsets: bytes, slots: bytes, *, extents: int, extent_bytes: int, connections: int, stall_s: float, timeout_s: float, checks: bytes = ..., encrypted: bool = False) -> int:
        """
        A job's number, 0 where the queue is full or stopped. Columns of u64: where each chunk goes, and its slot, in which no
        extent may have landed. `stall_s`: the longest time without a byte. `checks`: CRC-32C u32 [chunk][extent] as the owner promised
        them, or empty. Extents are announced on the index as they land.
        """

    def connect_ahead(self, address: str, port: int, connections: int) -> None:
        """
        Begins to make connections for the next pull from there, which end soon where none takes them. Never waits.
        """

    def cancel(self, job: int) -> bool:
        """
        Ends a job's remaining chunks, reported like any end; False where it has ended.
        """

    def stats(self) -> dict[str, int]: ...

    def take_outcomes(self, limit: int = 18446744073709551615) -> list[PullOutcome]:
        """
        What has ended, each thing once, `limit` at most. Nothing writes to the slot of a reported chunk.
        """

    def fileno(self) -> int:
        """Readable while there are outcomes."""

    def stop(self, timeout_s: float) -> bool:
        """
        Ends everything, reported like any end, and the threads; False where one has not ended in time. GIL released.
        """

class NearMemory:
    """Arena and index of another daemon of this host, mapped read-only."""

    def __init__(self, arena: Mapping, index: Mapping) -> None:
        """Refuses what is mapped writable, and an index of another version."""

    @property
    def size(self) -> int:
        """Of the arena, in bytes."""

    @property
    def epoch(self) -> bytes: ...

class NearQueue:
    """Threads that copy chunks of other daemons of this host into the arena."""

    def __init__(self, arena: Mapping, index: Mapping, threads: int, jobs_max: int) -> None: ...

    def pull(self, source: NearMemory, source_offsets: bytes, source_slots: bytes, generations: bytes, index: IndexView, offsets: bytes, slots: bytes, *, extents: int, extent_bytes: int, checks: bytes, parts: int, timeout_s: float) -> int:
        """
        A job's number, 0 where the queue is full or stopped. Columns of u64: where each chunk is in the owner's memory and under
        which generation, and where it goes: a slot in which no extent may have landed. `checks`: CRC-32C u32 [chunk][extent] as the
        owner promised them. ValueError for what lies outside either memory. Extents are announced on the index as they land.
        """

    def cancel(self, job: int) -> bool:
        """
        Ends a job's remaining chunks, reported like any end; False where it has ended.
        """

    def stats(self) -> dict[str, int]: ...

    def take_outcomes(self, limit: int = 18446744073709551615) -> list[PullOutcome]:
        """
        What has ended, each thing once, `limit` at most. Nothing writes to the slot of a reported chunk.
        """

    def fileno(self) -> int:
        """Readable while there are outcomes."""

    def stop(self, timeout_s: float) -> bool:
        """
        Ends everything, reported like any end, and the threads; False where one has not ended in time. GIL released.
        """

class DeviceMemory:
    """
    Memory of a device, for copies alone; it must outlive those that use it.
    """

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...

    def export(self) -> int:
        """
        A new descriptor, which the caller closes; `Device.attach` of another process maps it.
        """

class PinnedMapping:
    """
    A mapping that the device copies from, and to, directly, while this object lives.
    """

    @property
    def is_pinned(self) -> bool:
        """False where the driver refused: copies are right, and slower."""

    @property
    def fault(self) -> str:
        """Why it refused, or nothing."""

class DeviceEvent:
    """Done when everything is that its stream had been given before."""

    def hold(self, stream: int) -> None:
        """
        What a stream's raw handle, an engine's, is given from now on begins after the event.
        """

    def is_done(self) -> bool:
        """RuntimeError where the device has failed."""

    def wait(self, timeout_s: float) -> bool:
        """
        Whether it is done within the time; RuntimeError as above. GIL released.
        """

class DeviceStream:
    """
    Copies in the order in which they are given. What they read and write must stay until an event behind them is
    done.
    """

    def wait_for(self, event: DeviceEvent) -> None:
        """What is given afterwards begins after the event."""

    def record(self) -> DeviceEvent:
        """An event behind everything that was given so far."""

    def scatter(self, view: CacheView, extent: int, block_ids: bytes, sources: bytes, payload_bytes: int) -> None:
        """
        One extent of chunks into the engine's blocks. `block_ids`: i64 [chunk][block], -1: no copy; `sources`: u64, the address of that
        extent of each chunk, on the host or a device. ValueError for an id outside the view. GIL released.
        """

    def gather(self, view: CacheView, extent: int, block_ids: bytes, targets: bytes, payload_bytes: int) -> None:
        """The same the other way. GIL released."""

    def copy(self, targets: bytes, sources: bytes, sizes: bytes) -> None:
        """Columns of u64. GIL released."""

class Device:
    """
    A device by its driver's library and ordinal, with the context that engines of the process use.
    """

    def __init__(self, driver: str, ordinal: int) -> None:
        """
        OSError for a library or symbol that is missing, RuntimeError for a call that failed. GIL released.
        """

    @property
    def uuid(self) -> bytes: ...

    @property
    def name(self) -> str: ...

    @property
    def ordinal(self) -> int: ...

    @property
    def driver_version(self) -> int:
        """12080 for CUDA 12.8."""

    @property
    def registers_read_only(self) -> bool:
        """
        Whether memory that is mapped read-only can be pinned; copies of it are slower where it cannot.
        """

    @property
    def copy_method(self) -> str:
        """batch, kernel or single."""

    def allocate(self, size: int) -> DeviceMemory:
        """Exportable memory, rounded up to what the driver gives. GIL released."""

    def attach(self, fd: int, size: int) -> DeviceMemory:
        """
        Maps another process's export, read-only, with the size that it has there. The descriptor stays the caller's. GIL released.
        """

    def pin(self, mapping: Mapping, writable: bool) -> PinnedMapping:
        """`writable`: copies write to it too. GIL released."""

    def stream(self) -> DeviceStream: ...

    def mark(self, stream: int) -> DeviceEvent:
        """
        An event behind what a stream's raw handle, an engine's, has been given.
        """

    @staticmethod
    def ordinal_of(address: int, driver: str = '') -> int | None:
        """
        Of the device that the address belongs to, None for the host's memory. `driver`: its library; by default what
        KVPOOL_CUDA_DRIVER names, or libcuda.so.1.
        """

    def __repr__(self) -> str: ...

DEVICE_RING_BYTES_MIN: int = 32768

class MoveEnd:
    """The end of one chunk of a job: job, chunk, outcome."""

    @property
    def job(self) -> int: ...

    @property
    def chunk(self) -> int:
        """Its row in the job."""

    @property
    def outcome(self) -> int:
        """A `kvpool.tiers.base.Outcome`."""

    def __iter__(self) -> Iterator[int]: ...

class DeviceMover:
    """
    Threads that copy chunks of the arena to a device, and check what is there. Where the device does not
    answer until the end of `stop`, its threads and memory are left behind.
    """

    def __init__(self, device: Device, memory: DeviceMemory, arena: Mapping, index: IndexView, ring_bytes: int, answer_s: float = 30.0) -> None:
        """
        `ring_bytes`: of pinned memory, for each direction. `answer_s`: after so long without an answer the device counts as
        unresponsive, and everything fails until it answers. RuntimeError for a call that failed. GIL released.
        """

    def promote(self, rows: bytes) -> int:
        """
        A job's number, 0 where the line is full or the mover stopped. `rows` in the format of `DEVICE_MOVE_ROW`, the slot and
        generation being the arena's. BAD_SOURCE: other bytes than the slot's checksums, or another generation.
        """

    def check(self, rows: bytes) -> int:
        """
        The same for copies on the device: `arena_slot` and generation are those of its own slot in the index; arena offsets are
        not used.
        """

    def stats(self) -> dict[str, Any]: ...

    def take_outcomes(self, limit: int = 18446744073709551615) -> list[MoveEnd]:
        """
        What has ended, each thing once, `limit` at most. Nothing writes to the slot of a reported chunk.
        """

    def fileno(self) -> int:
        """Readable while there are outcomes."""

    def stop(self, timeout_s: float) -> bool:
        """
        Ends everything, reported like any end, and the threads; False where one has not ended in time. GIL released.
        """

SAMPLED_SHARE: float = 0.0625

class ReuseDistances:
    """What LRU of any size would hit, from a sample. Control thread only."""

    def __init__(self, samples: int, horizon_bytes: int, rate_max: float, half_life_ns: int) -> None: ...

    def observe(self, keys: bytes, chunk_bytes: int, now_ns: int) -> None:
        """A request used these chunks, the root first."""

    def observe_holds(self, directory: Directory, holds: Sequence[int], chunk_bytes: int, now_ns: int) -> None:
        """The same for the chunks of holds."""

    def hit_share(self, capacity: int) -> float: ...

    @property
    def rate(self) -> float: ...

    @property
    def sampled(self) -> int: ...

    @property
    def referenced_bytes(self) -> float: ...

    def verify(self) -> list[str]:
        """One line per broken invariant."""

class PlainSave:
    """
    A save of whole chunks of one run. A copy: it does not follow the save.
    """

    @property
    def id(self) -> int: ...

    @property
    def owner(self) -> int:
        """The connection that it belongs to."""

    @property
    def group(self) -> int: ...

    @property
    def holders(self) -> list[int]:
        """
        The directory's reservations of its slots: of a chain one, else one of each chunk.
        """

    @property
    def is_chain(self) -> bool: ...

    @property
    def chunks(self) -> int: ...

    @property
    def committed(self) -> int:
        """How many of them, the first ones, are published."""

    @property
    def deadline_ns(self) -> int: ...

class PlainSaves:
    """Plain saves by number, owner and deadline. Control thread only."""

    def __init__(self, ttl_ns: int) -> None: ...

    def change_ttl(self, ttl_ns: int) -> None: ...

    def new_id(self) -> int:
        """The number of a new save, of any kind."""

    def take(self, save: int, owner: int) -> PlainSave | None:
        """
        The save, which is the caller's from now on; None where it is not here, or not the owner's.
        """

    def take_owner(self, owner: int) -> list[PlainSave]:
        """The same of all of an owner's, the oldest first."""

    def take_expired(self, now_ns: int) -> list[PlainSave]:
        """The same of all whose time is over."""

    def count_others(self, owner: int, saves: int) -> None:
        """So many saves of an owner's are elsewhere, more or less."""

    def count_of(self, owner: int) -> int:
        """Saves of an owner, here and elsewhere."""

    def owners(self) -> list[tuple[int, int]]:
        """Those that have saves, here or elsewhere, and how many."""

    def holders(self) -> list[int]: ...

    def verify(self) -> list[str]: ...

    def __len__(self) -> int: ...

class WriterGroup:
    """A group's chunks as a session writes them."""

    def __init__(self, *, is_chain: bool, namespace: int, size_class: int, extents: int, chunk_tokens: int, chunk_bytes: int) -> None: ...

class SaveWriter:
    """A session of one rank as the save desk knows it."""

    def __init__(self, directory: Directory, connection: int, groups: Sequence[WriterGroup]) -> None:
        """
        Raises KeyError, IndexError or ValueError for a group that the directory does not know so.
        """

class SaveDesk:
    """Plain saves, a request in a call. Control thread only."""

    def __init__(self, directory: Directory, saves: PlainSaves, reuse: ReuseDistances | None, saves_max: int, chunks_max: int, keeps_tokens: bool) -> None: ...

class SaveFrames:
    """
    Serves frames about plain saves, see `LeaseFrames`. Control thread only.
    """

    def __init__(self, desk: SaveDesk, *, reserve: int, reserved: int, commit: int, committed: int) -> None:
        """The kinds of these records."""

class SaveNote:
    """What was answered to one request about a save."""

    @property
    def is_commit(self) -> bool:
        """Otherwise it was a reservation."""

    @property
    def group(self) -> int: ...

    @property
    def states(self) -> bytes:
        """Of its chunks, u8: a `SaveState`."""

    @property
    def keys(self) -> bytes:
        """
        Of the chunks of a reservation of which some were declined, packed; else none.
        """

class Lease:
    """
    A right to read leading chunks of a hit. A copy: it does not follow the lease.
    """

    @property
    def id(self) -> int: ...

    @property
    def owner(self) -> int:
        """The connection that it belongs to."""

    @property
    def chunks(self) -> int:
        """Of the hit."""

    @property
    def rows(self) -> int:
        """Chunks of the holds of one rank together."""

    @property
    def set_group(self) -> int | None:
        """Whose chunks it has, each alone, where it is of a set."""

    @property
    def held(self) -> int:
        """Chunks of all its holds together."""

    @property
    def holds(self) -> dict[int, list[int]]:
        """By rank, in the order of the rows."""

class LeaseTable:
    """Leases by number, owner and deadline. Control thread only."""

    def __init__(self, ttl_ns: int) -> None: ...

    def change_ttl(self, ttl_ns: int) -> None: ...

    def grant(self, owner: int, chunks: int, rows: int, ranks: Sequence[int], holds: Sequence[int], least_ttl_ns: int, now_ns: int, set_group: int | None = None) -> int:
        """
        The number of a new lease. `holds`: those of one rank after those of another. `set_group`: see `Lease`.
        """

    def find(self, lease: int, owner: int) -> Lease | None: ...

    def renew(self, lease: int, owner: int, now_ns: int) -> bool:
        """Counts it as used now; False where it has ended or is another's."""

    def end_lease(self, lease: int, owner: int) -> list[int]:
        """Its holds, which the caller releases."""

    def end_owner(self, owner: int) -> None:
        """Has `expire` end all of its leases."""

    def expire(self, now_ns: int, left: int, lease_cost: int) -> tuple[list[int], int]:
        """
        Ends leases that expired or lost their owner while `left` chunks are positive: their holds, and what is left.
        """

    def count_of(self, owner: int) -> int: ...

    def chunks_of(self, owner: int) -> int:
        """Chunks of its leases, and what `count_chunks` added."""

    def count_chunks(self, owner: int, chunks: int) -> None: ...

    @property
    def expired(self) -> int: ...

    @property
    def all_chunks(self) -> int: ...

    def owners(self) -> list[tuple[int, int]]:
        """Those that have leases, and how many."""

    def all(self) -> list[Lease]:
        """The oldest first."""

    def verify(self) -> list[str]: ...

    def __len__(self) -> int: ...

class EndingHolds:
    """
    Holds that are released a bounded number of chunks at once. Control thread only.
    """

    def __init__(self, directory: Directory, at_once: int, hold_cost: int) -> None: ...

    def release_holds(self, holds: Sequence[int], now_ns: int) -> bool:
        """Releases these after those that wait; whether some are left."""

    def __len__(self) -> int: ...

class ReaderGroup:
    """
    A group's chunks as a session reads them: whether they are chains, how many a hit needs at most.
    """

    def __init__(self, is_chain: bool, chunks_max: int, namespaces: Sequence[int], chunk_bytes: Sequence[int]) -> None:
        """Namespace and bytes of a chunk on each rank."""

class Reader:
    """
    A session as the lease desk knows it: whose leases they are, and where its chunks are.
    """

    def __init__(self, connection: int, holder: int, least_ttl_ns: int, ranks: Sequence[int], is_scheduler: bool, has_groups: bool, groups: Sequence[ReaderGroup]) -> None:
        """`groups`: one, where the layout has none."""

class HeldHit:
    """Holds on all that a hit needs."""

    @property
    def chunks(self) -> int: ...

    @property
    def rows(self) -> int:
        """Chunks of the holds of one rank together."""

    @property
    def holds(self) -> list[int]:
        """Those of one rank after those of another."""

class LeaseDesk:
    """Leases of hits that are in DRAM as a whole. Control thread only."""

    def __init__(self, directory: Directory, leases: LeaseTable, ending: EndingHolds, reuse: ReuseDistances | None, leases_max: int, held_max: int, rows_max: int, named_max: int, is_alone: bool) -> None: ...

    def hold_hit(self, reader: Reader, keys: bytes, chunks: int, holder: int, now_ns: int) -> HeldHit | None:
        """None where it is not all in DRAM, or not allowed."""

    def lease_hit(self, reader: Reader, keys: bytes, chunks: int, now_ns: int) -> Lease | None:
        """The same, as a lease."""

    def columns_of(self, reader: Reader, lease: Lease) -> HoldColumns:
        """
        Where the chunks of a lease that lives lie; a scheduler's has levels alone.
        """

    def rows_by_key(self, reader: Reader, lease: Lease | None, places: Sequence[int], named: int) -> HoldColumns:
        """
        The same with a row for each of so many keys: `places` are those of the lease's rows. None: a lease of nothing.
        """

    def release_leases(self, reader: Reader, leases: Sequence[int], now_ns: int) -> bool:
        """Ends leases of a reader; whether some of their holds are left."""

class VerbTimes:
    """How long requests of each kind took, by bucket. Control thread only."""

    def __init__(self, kinds: Sequence[int], bounds_ns: Sequence[int]) -> None: ...

    def add_time(self, kind: int, taken_ns: int) -> None:
        """A request of this kind took so long."""

    def row(self, kind: int) -> tuple[list[int], int]:
        """Counts by bucket, and the sum of all times."""

class ServedFrames:
    """What came of frames that were served."""

    @property
    def consumed(self) -> int:
        """How many of the bytes that arrived they are."""

    @property
    def answers(self) -> bytes:
        """Whole frames."""

    @property
    def has_backlog(self) -> bool:
        """Holds are left to be released."""

    @property
    def saves(self) -> list[SaveNote]:
        """What was answered about saves."""

class LeaseFrames:
    """Serves frames about leases as they arrive. Control thread only."""

    def __init__(self, desk: LeaseDesk, times: VerbTimes, saves: SaveFrames, kinds: Sequence[int], frame_bytes_max: int, numbers_max: int, answer_bytes_max: int) -> None:
        """`kinds`: of Acquire, Leased, DropLeases, Renew and Done."""

    def serve(self, reader: Reader, writer: SaveWriter | None, arrived: bytes | bytearray, first: int, now_ns: int, left_ns: int) -> ServedFrames | None:
        """
        Serves the leading frames that are about leases and plain saves, for so long. None where the first frame is not for here.
        """

class PublishedBlocks:
    """
    Blocks that are published to routers, named by all before them. One thread at a time; GIL released.
    """

    def __init__(self) -> None: ...

    def add(self, keys: bytes, before: bytes, tokens: bytes, blocks: int, medium: int) -> list[int]:
        """
        A medium has a chain's chunks. The names of their blocks, in order. `before`: 32 bytes, the parent's key or a scope's hash.
        """

    def remove(self, keys: bytes, medium: int) -> list[int]:
        """A medium has them no more. The names that no chunk there has any more."""

    def clear(self) -> None: ...

    @property
    def chunks(self) -> int: ...

    @property
    def names(self) -> int:
        """Names counted, each once for a medium, without those of whole chunks."""

    def verify(self) -> list[str]:
        """One line per broken invariant."""

class FlushResult:
    """What a flush has dropped."""

    @property
    def chunks(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def skipped(self) -> int:
        """Chunks that stay, since somebody holds them."""

class FlushWalk:
    """A flush in parts of what nobody holds. Control thread only."""

    def __init__(self, directory: Directory, namespaces: Sequence[int] | None, before_ns: int) -> None: ...

    def advance(self, limit: int) -> bool:
        """Removes so many chunks at most. False at the end."""

    @property
    def generation(self) -> int:
        """The latest one when the walk began."""

    def result(self) -> FlushResult:
        """So far; `skipped` at the end."""

def attend(team: WorkerTeam, dtype: str, query: NDArray[numpy.float32], keys: NDArray[numpy.uint64], tokens: NDArray[numpy.uint64], wanted: NDArray[numpy.uint8], *, value_offset: int, token_stride: int) -> tuple[NDArray[numpy.float32], NDArray[numpy.float32]]:
    """
    Attention of one query token: (logit [heads], value [heads, head_dim]). `keys`: where the key of KV head 0 of each run's first token lies; its value lies `value_offset` behind it. `wanted` [run, kv_heads]. GIL released. ValueError for shapes that do not agree; the addresses are believed.
    """

def read_plainly(team: WorkerTeam, runs: NDArray[numpy.uint64], *, run_bytes: int) -> int:
    """
    The sum of all 64-bit words at these addresses, modulo 2^64: what reading alone costs, for benchmarks. GIL released. ValueError for a size that is no multiple of 256; the addresses are believed.
    """

def attention_path() -> str:
    """How attention is computed: avx512, avx2 or portable."""

def choose_attention_path(path: str) -> None:
    """For tests: ValueError where the processor has no such path."""
