"""Checks of what a caller passes: each raises InvalidArgument naming the argument, its value and what was expected.

Pure functions; any thread.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from kvpool.errors import InvalidArgument
from kvpool.ids import MODEL_BYTES_MAX
from kvpool.keys import namespace_name
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import peers as pm
from kvpool.socket_path import fault_of_path
from kvpool_client.copying.cache import Cache
from kvpool_client.given_numbers import is_index
from kvpool_client.key_chain import KeyChain, Namespace
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.results import Hit
from kvpool_client.verbs.set_hold import SetHold

COPY_THREADS_MAX = 64
REVISION_SEPARATOR = "@"
TIMEOUT_S_MAX = 3600.0


def check_connect(
    path: str | os.PathLike[str],
    model: str,
    layout: Layout,
    *,
    revision: str,
    salt: bytes,
    timeout_s: float,
    copy_threads: int,
) -> None:
    """Check the arguments of `connect`."""
    if fault := fault_of_path(path):
        raise InvalidArgument(f"path is {path!r}, expected {fault}")
    if not is_text(model) or not 0 < len(model.encode()) <= MODEL_BYTES_MAX:
        raise InvalidArgument(f"model is {model!r}, expected text of 1 to {MODEL_BYTES_MAX} bytes")
    if not is_text(revision) or REVISION_SEPARATOR in revision:
        raise InvalidArgument(
            f"revision is {revision!r}, expected the name of the weights, without {REVISION_SEPARATOR!r}"
        )
    if len(namespace_name(model, revision).encode()) > MODEL_BYTES_MAX:
        raise InvalidArgument(
            f"model and revision are {model!r} and {revision!r}, expected at most {MODEL_BYTES_MAX} bytes"
        )
    if not isinstance(layout, Layout):
        raise InvalidArgument(f"layout is {type(layout).__name__}, expected kvpool_client.Layout")
    if layout.group is not None:
        raise InvalidArgument(f"layout is that of one group ({layout.group}), expected the layout with all groups")
    if not isinstance(salt, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"salt is {type(salt).__name__}, expected bytes")
    if not isinstance(timeout_s, (int, float)) or not 0.0 < timeout_s <= TIMEOUT_S_MAX:
        raise InvalidArgument(f"timeout_s is {timeout_s!r}, expected seconds above 0 and at most 3600")
    if isinstance(copy_threads, bool) or not isinstance(copy_threads, int) or not 1 <= copy_threads <= COPY_THREADS_MAX:
        raise InvalidArgument(f"copy_threads is {copy_threads!r}, expected 1..{COPY_THREADS_MAX}")


def check_name(name: str) -> None:
    """Check the name of a connection."""
    if not isinstance(name, str) or len(name.encode(errors="replace")) > m.CONNECTION_NAME_BYTES_MAX:
        raise InvalidArgument(f"name is {name!r:.200}, expected text of at most {m.CONNECTION_NAME_BYTES_MAX} bytes")


def checked_shares(share: Share | Sequence[Share] | None, layout: Layout) -> tuple[Share, ...]:
    """The part of the chunks of each of a layout's groups that an engine has; without groups there is one."""
    parts = layout.group_layouts
    if share is None:
        return tuple(map(Share.whole, parts))
    if layout.groups and (not isinstance(share, Sequence) or len(share) != len(parts)):
        raise InvalidArgument(f"share is {share!r:.80}, expected a kvpool_client.Share for each of {len(parts)} groups")
    shares = []
    for one, part in zip(share if layout.groups else [share], parts, strict=True):  # type: ignore[arg-type]  # a sequence
        if not isinstance(one, Share):
            raise InvalidArgument(f"share is {type(one).__name__}, expected kvpool_client.Share")
        one.check(part)
        shares.append(one)
    return tuple(shares)


def check_no_groups(layout: Layout) -> None:
    """Check that a Pool's chunks are all of one kind."""
    if layout.groups:
        raise InvalidArgument(f"the layout of pool has {len(layout.groups)} groups, expected one without groups")


def check_whole_chunks(layout: Layout, shares: Sequence[Share]) -> None:
    """Check that a Pool has whole chunks, all of one kind."""
    check_no_groups(layout)
    if not shares[0].is_whole(layout):
        raise InvalidArgument(f"the share of pool is {shares[0]!r}, expected a Pool without share, of whole chunks")


def by_group(name: str, given: object, layout: Layout) -> Sequence[Any]:
    """An argument's entry for each of a layout's groups, None where it is not given. A plain layout is its own only one."""
    groups = max(1, len(layout.groups))
    if given is None:
        return [None] * groups
    if not isinstance(given, Sequence) or len(given) != groups:
        found = f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, Sequence) else "")
        raise InvalidArgument(f"{name} is {found}, expected a sequence with an entry for each of {groups} groups")
    return given


def check_keys(keys: KeyChain, namespace: Namespace) -> None:
    """Check that `keys` is a KeyChain of the Pool's namespace: another one's names other KV."""
    if isinstance(keys, KeyChain) and keys.namespace is namespace:
        return
    if not isinstance(keys, KeyChain):
        raise InvalidArgument(f"keys is {type(keys).__name__}, expected what Pool.keys answered")
    _check_chunks("keys are", keys.namespace, "those", namespace)


def check_hit(hit: Hit, namespace: Namespace) -> None:
    """Check that `hit` is one of keys of the Pool's namespace."""
    if isinstance(hit, Hit) and hit.keys.namespace is namespace:
        return
    if not isinstance(hit, Hit):
        raise InvalidArgument(f"hit is {type(hit).__name__}, expected what lookup answered")
    _check_chunks("hit is", hit.keys.namespace, "one", namespace)


def check_lease(lease: Lease, namespace: Namespace) -> None:
    """Check that `lease` is this Pool's: another model's or layout's is on other KV, and one of another connection is not
    renewed by this one."""
    if not isinstance(lease, Lease):
        raise InvalidArgument(f"lease is {type(lease).__name__}, expected what acquire or claim answered")
    if lease.namespace is namespace:
        return
    _check_chunks("lease is", lease.namespace, "one", namespace)
    raise InvalidArgument(
        f"lease is of another connection, {lease.namespace}, expected one of {namespace}: acquire the hit with this Pool, or "
        "take it over with claim(lease.ticket())"
    )


def check_chain_lease(lease: Lease, namespace: Namespace) -> None:
    """Check that `lease` is this Pool's, and on leading chunks of a prompt."""
    check_lease(lease, namespace)
    if isinstance(lease.hold, SetHold):
        raise InvalidArgument("lease is what acquire_set answered, expected one of acquire or claim: load_set loads it")


def check_set_lease(lease: Lease, namespace: Namespace) -> SetHold:
    """The hold of this Pool's lease of a set."""
    check_lease(lease, namespace)
    if not isinstance(lease.hold, SetHold):
        raise InvalidArgument(
            "lease is on leading chunks of a prompt, expected what acquire_set answered: load loads it"
        )
    return lease.hold


def check_owner(owner: object, layout: Layout) -> None:
    """Check that `owner` may be the name of a node that has a prompt's chunks."""
    if not isinstance(owner, str) or not pm.is_node_name(owner):
        raise InvalidArgument(
            f"owner is {str(owner)[:80]!r}, expected a node's name: printable text of at most {pm.OWNER_BYTES_MAX} bytes"
        )
    if layout.groups:
        raise InvalidArgument(f"owner is {owner!r}, a lookup of a layout with groups names no node")


def as_index(name: str, value: int, most: int) -> int:
    """`value`, an integer of Python or numpy, as an int from 0 to `most`. Raises InvalidArgument for any other."""
    if not is_index(value, most):
        raise InvalidArgument(f"{name} is {value!r}, expected 0..{most}")
    return int(value)


def as_group(group: int | None, groups: range) -> int:
    """Which of these groups is meant: the first one where none is named. Raises InvalidArgument for any other."""
    if group is None:
        return groups.start
    if not is_index(group, groups.stop - 1) or group < groups.start:
        alone = len(groups) == 1
        expected = f"{groups.start}, the only one" if alone else f"{groups.start}..{groups.stop - 1}"
        raise InvalidArgument(f"group is {group!r}, expected {expected}")
    return int(group)


def as_entries(name: str, given: Iterable[Any]) -> tuple[Any, ...]:
    """The entries of a sequence. Raises InvalidArgument for what is none."""
    try:
        return tuple(given)
    except TypeError as error:
        raise InvalidArgument(f"{name} is {given!r:.80}, expected a sequence") from error


def is_text(value: object) -> bool:
    """Whether this is a string that has bytes: one with lone surrogates has none."""
    return isinstance(value, str) and (value.isascii() or value.encode(errors="replace").decode() == value)


def check_promises(layout: Layout, tickets: int, claims: int | None) -> None:
    """Check for whom promises are made, and of how many tickets with how many claims."""
    if layout.rank is not None and layout.world > 1:
        raise InvalidArgument(
            f"layout rank is {layout.rank} of {layout.world}, expected None: promises are of all ranks"
        )
    for name, value in (("tickets", tickets), ("claims", 1 if claims is None else claims)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= m.CLAIMS_MAX:
            raise InvalidArgument(f"{name} is {value!r}, expected 1..{m.CLAIMS_MAX}")


def check_scope(salt: bytes, adapter: str) -> None:
    """Check what separates prefixes with equal tokens."""
    if not isinstance(salt, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"salt is {type(salt).__name__}, expected bytes")
    if not is_text(adapter):
        raise InvalidArgument(f"adapter is {adapter!r:.80}, expected text")


def check_cache(cache: Cache, namespace: Namespace, layout: Layout, share: Share) -> None:
    """Check that `cache` is KV of the Pool's model in `layout`, the Pool's own or that of one of its groups."""
    if not isinstance(cache, Cache):
        raise InvalidArgument(f"cache is {type(cache).__name__}, expected what Pool.register answered")
    owner = cache.namespace
    if owner is not None and owner is not namespace:
        _check_chunks(f"cache is {cache!r}", owner, "one", namespace)
    if (cache.layout, cache.share) != (layout, share):
        difference = _difference(cache.layout, layout) or f"share {cache.share!r}, expected {share!r}"
        raise InvalidArgument(
            f"cache is {cache!r} of {owner or 'no Pool'}, expected one of {namespace}, for its layout and share: it has "
            f"{difference}"
        )


def _check_chunks(subject: str, found: Namespace | None, wanted: str, namespace: Namespace) -> None:
    if found is namespace:
        return
    if found is None:
        raise InvalidArgument(f"{subject} of no Pool, expected {wanted} of {namespace}")
    if found.chunks == namespace.chunks:
        return
    difference = _difference(found.layout, namespace.layout)
    tail = f": the layout has {difference}" if difference else ""
    raise InvalidArgument(f"{subject} of {found}, expected {wanted} of {namespace}{tail}")


def _difference(found: Layout, wanted: Layout) -> str:
    """The first field in which layouts differ; empty where they are equal."""
    if len(found.groups) != len(wanted.groups):
        return f"{len(found.groups)} groups, expected {len(wanted.groups)}"
    for field in fields(Layout):
        own, expected = getattr(found, field.name), getattr(wanted, field.name)
        if field.compare and own != expected:
            return f"{field.name} {own!r}, expected {expected!r}"
    return ""
