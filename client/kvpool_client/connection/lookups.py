"""Lookups of prompts in shared memory: this node's index, and behind it the table of other nodes' chunks. Nothing is sent.

A request may name a node that has the rest of its prompt, as a router or a proxy knows before the table does: the rest is then
taken for present there, and whether it is becomes known when it is leased. Any thread.
"""

from collections.abc import Sequence

import numpy as np

from kvpool.errors import InvalidArgument
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import peers as pm
from kvpool.types import PEER
from kvpool_client.connection.session import Session
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.results import Hit

_NO_TIERS = np.empty(0, np.uint8)


def check_owner(owner: object) -> None:
    """Raises InvalidArgument unless it may be the name of a node."""
    if not isinstance(owner, str) or not pm.is_node_name(owner):
        raise InvalidArgument(
            f"owner is {str(owner)[:80]!r}, expected a node's name: printable text of at most {pm.OWNER_BYTES_MAX} bytes"
        )


def most_chunks(columns: Sequence[bytes]) -> int:
    """How many chunks a hit of these keys may have: no more than one request names, of all ranks, when it is leased."""
    return min(len(KeyColumn(columns[0])), m.KEYS_MAX // len(columns))


def look_up_each(session: Session | None, chains: Sequence[KeyChain], layout: Layout) -> list[Hit]:
    """The hits of leading chains of which this node has every chunk, by one walk through its index for each rank."""
    if session is None or not chains:
        return []
    found = [
        session.index.lookup(b"".join(columns)) for columns in zip(*(keys.columns() for keys in chains), strict=True)
    ]
    here = min(count for count, _ in found)
    tiers = np.maximum.reduce([np.frombuffer(levels, np.uint8)[:here] for _, levels in found])
    ends = np.cumsum([len(keys) for keys in chains])
    elsewhere = np.flatnonzero(tiers >= PEER)
    whole = int(np.searchsorted(ends, elsewhere[0] if len(elsewhere) else here, side="right"))
    return [
        Hit(len(keys), len(keys) * layout.chunk_tokens, tiers[end - len(keys) : end], keys)
        for keys, end in zip(chains[:whole], ends.tolist(), strict=False)
    ]


def look_up(session: Session | None, keys: KeyChain, layout: Layout, owner: str = "") -> Hit:
    """The longest run of present chunks, and where an `owner` is named all of them. A miss while the daemon is away."""
    if session is None:
        return Hit(0, 0, _NO_TIERS, keys)
    columns = keys.columns()
    found = [session.index.lookup(column) for column in columns]
    most = most_chunks(columns)
    chunks = min(most, *(count for count, _ in found))
    levels = [np.frombuffer(tiers, dtype=np.uint8)[:chunks] for _, tiers in found]
    tiers = levels[0] if len(levels) == 1 else np.maximum.reduce(levels)
    pace = session.peer_pace(columns[0], chunks - 1) if chunks and tiers.item(chunks - 1) == PEER else None
    owner = owner if chunks < most and session.has_peers else ""
    if owner:
        tiers = np.concatenate([tiers, np.full(most - chunks, PEER, np.uint8)])
        chunks, pace = most, None
    return Hit(chunks, chunks * layout.chunk_tokens, tiers, keys, pace, owner)
