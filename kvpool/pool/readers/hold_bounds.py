"""Hold bounds: how much of DRAM may be protected from eviction, by connection, user and namespace, and how much is.

The native directory counts and refuses; this module sets the bounds and reads the largest counts. Control thread only.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from kvpool.config.config import Config
from kvpool.ids import ConnectionId, NamespaceId
from kvpool.index.namespaces import Namespaces
from kvpool_native import Directory, HolderUse

# All other nodes together, among the users of this one: a number that no user has.
PEERS_USER = (1 << 32) - 1
# Of each kind; a report is one frame.
ROWS_MAX = 32
# Memory for token ids, as a share of DRAM's capacity: those of a chunk of 256 tokens take 1 KiB, its KV hundreds of times that.
TOKEN_IDS_PART = 16
# All that are not among them.
OTHERS = "other"
_KINDS = ("reserved_bytes", "zombie_bytes", "leased_bytes")


def bound(directory: Directory, config: Config) -> None:
    """Set the bounds of DRAM's directory: above the default priority, by connection, by user, in a chain; of token ids."""
    dram = config.dram
    directory.bound_chains(config.server.max_chain_chunks)
    directory.cap_retained(dram.retained_quota)
    directory.share_among_holders(dram.connection_quota, config.server.user_quota)
    directory.limit_user(PEERS_USER, config.peer.leased_quota)
    directory.limit_token_ids(dram.token_ids or dram.capacity // TOKEN_IDS_PART)


class HoldsByOwner(Protocol):
    """A counter of what each connection has of a kind."""

    def count_by_owner(self) -> dict[ConnectionId, dict[str, int]]:
        """Numbers by name."""
        ...


def held_by_connection(directory: Directory, *owners: HoldsByOwner) -> dict[int, dict[str, int]]:
    """Numbers and bytes by name that each connection has: of its holds in the directory, and what `owners` count."""
    found: dict[int, dict[str, int]] = {}
    for use in directory.holders():
        found[use.holder] = dict(zip(_KINDS, _bytes_of(use), strict=True))
    for owner in owners:
        for connection, counts in owner.count_by_owner().items():
            found.setdefault(connection, {}).update(counts)
    return found


def count_held(directory: Directory, namespaces: Namespaces) -> dict[str, int]:
    """Bytes by name. `held.connection.0`: of tickets. Leases of one connection on the same chunks may count more than once."""
    holders = [(use.holder, *_bytes_of(use)) for use in directory.holders()]
    by_namespace = []
    for kept in directory.held_namespaces():
        size = namespaces.by_id(NamespaceId(kept.namespace)).layout.stored_bytes
        by_namespace.append((kept.namespace, kept.writing * size, kept.zombies * size, kept.held * size))
    rows = {
        "held.connections": len(holders),
        **{f"held.{kind}": sum(row[1 + at] for row in by_namespace) for at, kind in enumerate(_KINDS)},
    }
    for word, listed in (("connection", holders), ("namespace", by_namespace)):
        for number, *sizes in sorted(listed, key=lambda row: sum(row[1:]), reverse=True)[:ROWS_MAX]:
            rows |= {f"held.{word}.{number}.{kind}": size for kind, size in zip(_KINDS, sizes, strict=True)}
    return rows


def held_by_model(directory: Directory, namespaces: Namespaces) -> dict[str, int]:
    """Payload that cannot be evicted now, by model: of its ROWS_MAX with most, and of all others together."""
    found: Counter[str] = Counter()
    for kept in directory.held_namespaces():
        namespace = namespaces.by_id(NamespaceId(kept.namespace))
        found[namespace.model] += (kept.writing + kept.zombies + kept.held) * namespace.layout.stored_bytes
    return _largest(found)


def held_by_user(directory: Directory, users: Mapping[ConnectionId, int | None]) -> dict[str, int]:
    """Bytes of slots that connections protect, by the uid of their user: of the ROWS_MAX with most, and of all others
    together. `users`: the user of each engine's connection, None where no share bounds it (`operators`). Holds that are no
    engine's are those of `tickets` and of other nodes (`peers`). Two connections that lease a chunk count it both."""
    found: Counter[str] = Counter()
    for use in directory.holders():
        holder = ConnectionId(use.holder)
        user = users.get(holder, "peers" if holder else "tickets")
        found["operators" if user is None else str(user)] += sum(_bytes_of(use))
    return _largest(found)


def _largest(found: Counter[str]) -> dict[str, int]:
    kept = dict(found.most_common(ROWS_MAX))
    others = sum(found.values()) - sum(kept.values())
    return kept | ({OTHERS: kept.get(OTHERS, 0) + others} if others else {})


def _bytes_of(use: HolderUse) -> tuple[int, int, int]:
    """In the order of `_KINDS`."""
    return use.reserved_bytes, use.zombie_bytes, use.leased_bytes
