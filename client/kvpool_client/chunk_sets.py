"""Chunk sets: chunks of one group that an engine names each by a key of its own, without order and without parents.

The verbs of a Pool over such keys, on the requests that carry runs: one lease, one save and one native load serve all of a set,
and each key has an answer of its own. A Pool has one. Any thread.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool import failpoint
from kvpool.clock import MonotonicClock
from kvpool.errors import InvalidArgument, KVPoolError, ProtocolError
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import seeking as sk
from kvpool.states import STORE, TokenRange
from kvpool_client.arguments import as_index, check_set_lease
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.peer_pace import FIRST_PEER_PACE
from kvpool_client.connection.session import Session
from kvpool_client.copying.cache import SKIP_BLOCK, Cache
from kvpool_client.copying.copies import Copies, EngineBlocks
from kvpool_client.given_numbers import is_index
from kvpool_client.key_chain import Namespace
from kvpool_client.named_keys import NamedKeys, Names, ancestors_first, check_names
from kvpool_client.retention import NO_RETENTION, RetentionColumns, plan_retention
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load_starter import LoadStarter
from kvpool_client.verbs.save import Save
from kvpool_client.verbs.save_starter import SaveStarter
from kvpool_client.verbs.set_hold import SetHold, check_set_answer
from kvpool_client.verbs.set_load import SetLoad

Levels = npt.NDArray[np.uint8]
ADDRESS_MAX = (1 << 63) - 1
_NO_LEVEL = bytes([m.NO_LEVEL])


class ChunkSets:
    """See the module."""

    def __init__(
        self,
        namespace: Namespace,
        link: Link,
        counters: Counters,
        *,
        roots: Callable[[], tuple[bytes, ...]],
        sides: Sequence[Copies],
        load_starter: LoadStarter,
        save_starter: SaveStarter,
        timeout_s: float,
    ) -> None:
        """`roots`: the current root of each group's chains, rank by rank; `sides`: the copying side of each group."""
        self._namespace = namespace
        self._link = link
        self._counters = counters
        self._roots = roots
        self._sides = sides
        self._load_starter = load_starter
        self._save_starter = save_starter
        self._timeout_s = timeout_s
        self._ranks = len(namespace.layout.ranks)
        # The roots, and those of each group's ranks in one piece: replaced together.
        self._joined: tuple[tuple[bytes, ...], list[bytes]] = ((), [])

    def probe(self, names: Names, group: int, *, asks_store: bool, is_counted: bool) -> Levels:
        """See `Pool.probe`."""
        check_names("keys", names)
        found = self._probe(names, self._as_group(group), asks_store=asks_store)
        if is_counted:
            self._counters.count_lookup(len(found), found[found > 0].tobytes())
        return found

    def _probe(self, names: Names, group: int, *, asks_store: bool) -> Levels:
        roots = self._roots_of(group)
        session = self._link.session
        if session is None:
            return np.zeros(len(names), np.uint8)
        levels = session.index.probe(roots, names)
        found: Levels = np.frombuffer(levels, np.uint8)
        if asks_store and session.welcome.has_store and 0 in levels:
            return self._with_store(session, found, NamedKeys.of(names, roots, group))
        return found

    def acquire(self, names: Names, group: int, timeout_s: float) -> Lease:
        """See `Pool.acquire_set`."""
        group = self._as_group(group)
        keys = self._keys_of(names, group)
        count, session = len(keys), self._link.session
        asked_ns = MonotonicClock.now_ns()
        leased = self._ask(session, keys, count, timeout_s) if session is not None and count else None
        if leased is None:
            leased = m.Leased(lease=0, chunks=0, offsets=b"", generations=b"", tiers=_NO_LEVEL * count)
        hold = SetHold(
            session if leased.chunks else None,
            leased,
            KeyColumn(keys.columns()[group]),
            group=group,
            namespace=self._namespace,
            asked_ns=asked_ns,
        )
        self._counters.count("acquired_chunks", hold.chunks)
        return Lease(hold, estimate_s=self._sides[group].estimate_s, peer_pace=FIRST_PEER_PACE)

    def load(self, lease: Lease, rows: object, *, cache: Cache | None, block_ids: object, may_outlive: bool) -> SetLoad:
        """See `Pool.load_set`."""
        hold = check_set_lease(lease, self._namespace)
        blocks = self._blocks(hold.group, hold.count, rows, cache=cache, block_ids=block_ids, is_load=True)
        wanted = hold.held
        if block_ids is not None and hold.count:
            wanted &= (blocks.block_ids.reshape(hold.count, -1) != SKIP_BLOCK).any(axis=1)
        chosen = np.flatnonzero(wanted).tolist()
        blocks = EngineBlocks(blocks.view, blocks.of_chunks(chosen, hold.count), blocks.cache)
        return self._load_starter.begin_set(hold, wanted, blocks, may_outlive=may_outlive)

    def save(
        self,
        names: Names,
        rows: object,
        parents: Names | None,
        retention: Sequence[TokenRange],
        *,
        group: int,
        cache: Cache | None,
        block_ids: object,
    ) -> Save:
        """See `Pool.save_set`."""
        group = self._as_group(group)
        keys = self._keys_of(names, group)
        count = len(keys)
        columns = plan_retention(retention, chunks=count, chunk_tokens=self._namespace.layout.chunk_tokens)
        blocks = self._blocks(group, count, rows, cache=cache, block_ids=block_ids, is_load=False)
        order = range(count) if parents is None else ancestors_first(names, parents)
        named, places = list(KeyColumn(keys.columns()[group])), None
        if len(set(named)) < count or not isinstance(order, range):
            firsts: dict[bytes, int] = {}  # the first chunk of each key, which stands for all of them
            for at in order:
                firsts.setdefault(named[at], at)
            numbers, chosen = {key: number for number, key in enumerate(firsts)}, list(firsts.values())
            places = [numbers[key] for key in named]
            keys = NamedKeys(KeyColumn.of(firsts).packed, group=group, ranks=1)
            blocks = EngineBlocks(blocks.view, blocks.block_ids.reshape(count, -1)[chosen].reshape(-1), blocks.cache)
            if columns is not NO_RETENTION:
                columns = RetentionColumns(columns.priorities[chosen], columns.durations_ms[chosen])
        return self._save_starter.begin_save(self._save_starter.plan_set(keys, columns, blocks, places))

    def _roots_of(self, group: int) -> bytes:
        """The roots of a group's ranks."""
        roots, joined = self._joined
        if roots is not (current := self._roots()):
            firsts = range(0, len(current), self._ranks)
            joined = [b"".join(current[first : first + self._ranks]) for first in firsts]
            self._joined = current, joined
        return joined[group]

    def _keys_of(self, names: Names, group: int) -> NamedKeys:
        """The keys of a set. Raises InvalidArgument."""
        check_names("keys", names)
        most = m.SET_KEYS_MAX // self._ranks
        if len(names) > most:
            raise InvalidArgument(f"keys are {len(names)}, expected at most {most} in a set")
        return NamedKeys.of(names, self._roots_of(group), group)

    def _as_group(self, group: int) -> int:
        """The number of a group, whatever integer it is given as. Raises InvalidArgument."""
        return as_index("group", group, len(self._sides) - 1)

    def _ask(self, session: Session, keys: NamedKeys, count: int, timeout_s: float) -> m.Leased | None:
        """The daemon's answer; None where it does not answer."""
        try:
            leased = session.call(m.Acquire(keys.packed, 0, "", keys.group + 1), m.Leased, timeout_s)
            failpoint.reach("client.acquire.after", failpoint.unreachable)
            check_set_answer(leased, count)
        except KVPoolError as error:
            self._link.note_failure(session, error)
            return None
        return leased

    def _blocks(
        self, group: int, count: int, rows: object, *, cache: Cache | None, block_ids: object, is_load: bool
    ) -> EngineBlocks:
        """The engine's memory for so many keys. Raises InvalidArgument."""
        side = self._sides[group]
        addresses = _addresses_in(rows) if cache is None and block_ids is None else None
        if addresses is None:
            return side.blocks(cache, block_ids, rows, chunks=count, is_load=is_load, is_set=True)
        if len(addresses) != count:
            raise InvalidArgument(f"rows are {len(addresses)} addresses, expected {count}, one for each key")
        return side.rows_at(addresses, is_load=is_load)

    def _with_store(self, session: Session, levels: Levels, keys: NamedKeys) -> Levels:
        """The same levels, with those of absent chunks that the shared store has on every rank."""
        found, parts = levels.copy(), len(self._namespace.layout.parts)
        of_ranks = KeyColumn(keys.packed).by_rank(self._ranks)
        absent = np.flatnonzero(levels == 0)
        most = sk.SEEK_KEYS_MAX // self._ranks
        counts = np.zeros(parts, np.dtype("<u4"))
        for first in range(0, len(absent), most):
            sought = absent[first : first + most]
            counts[keys.group * self._ranks : (keys.group + 1) * self._ranks] = len(sought)
            packed = b"".join(column.chosen(sought.tolist()).packed for column in of_ranks)
            try:
                answer = session.call(sk.Seek(counts.tobytes(), packed, self._timeout_s / 2, are_alone=True), sk.Sought)
                if packed_bytes(len(answer.there)) != len(packed):
                    raise ProtocolError(f"there has {len(answer.there)} bytes, expected {len(packed)} / 32")
            except KVPoolError as error:
                self._link.note_failure(session, error)
                break
            there = (np.frombuffer(answer.there, np.uint8).reshape(self._ranks, -1) == 1).all(axis=0)
            found[sought[there]] = STORE
        return found


def _addresses_in(rows: object) -> npt.NDArray[np.int64] | None:
    """Addresses of rows; None for what is no list, no tuple and no array of one axis of words. Raises InvalidArgument."""
    if isinstance(rows, np.ndarray):
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.dtype.itemsize < np.dtype(np.int64).itemsize:
            return None
        given = rows.tolist()
    elif isinstance(rows, (list, tuple)):
        given = rows
    else:
        return None
    for number, one in enumerate(given):
        if not is_index(one, ADDRESS_MAX) or not one:
            raise InvalidArgument(f"rows[{number}] is {one!r:.80}, expected the address of a row")
    return np.array(given, np.int64)
