"""Checks of what a caller passes: each raises InvalidArgument naming the argument, its value and what was expected.

Pure functions; any thread.
"""

import os
from collections.abc import Sequence

from kvpool.errors import InvalidArgument
from kvpool.keys import namespace_name
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.protocol.records import messages as m
from kvpool.socket_path import fault_of_path
from kvpool_client.key_chain import KeyChain, Namespace
from kvpool_client.lease import Lease

COPY_THREADS_MAX = 64
MODEL_BYTES_MAX = 512
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
    if not isinstance(model, str) or not 0 < len(model.encode()) <= MODEL_BYTES_MAX:
        raise InvalidArgument(f"model is {model!r}, expected a name of 1 to {MODEL_BYTES_MAX} bytes")
    if not isinstance(revision, str) or REVISION_SEPARATOR in revision:
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


def check_keys(keys: KeyChain, namespace: Namespace) -> None:
    """Check that `keys` is a KeyChain of the Pool's namespace: another one's names other KV."""
    if not isinstance(keys, KeyChain):
        raise InvalidArgument(f"keys is {type(keys).__name__}, expected what Pool.keys answered")
    if keys.namespace is None:
        raise InvalidArgument(f"keys are {keys!r} of no Pool, expected what Pool.keys answered")
    _check_namespace("keys are", keys.namespace, "those", namespace)


def check_lease(lease: Lease, namespace: Namespace) -> None:
    """Check that `lease` is one on chunks of the Pool's namespace: another one's are other KV."""
    if not isinstance(lease, Lease):
        raise InvalidArgument(f"lease is {type(lease).__name__}, expected what acquire or claim answered")
    _check_namespace("lease is", lease.namespace, "one", namespace)


def check_index(name: str, value: int, most: int) -> None:
    """Check that `value` is an integer from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InvalidArgument(f"{name} is {value!r}, expected 0..{most}")


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
    if not isinstance(adapter, str):
        raise InvalidArgument(f"adapter is {type(adapter).__name__}, expected str")


def _check_namespace(subject: str, found: Namespace, wanted: str, namespace: Namespace) -> None:
    if found is namespace:
        return
    for what, own, expected in zip(("model", "layout"), found, namespace, strict=True):
        if own != expected:
            raise InvalidArgument(f"{subject} of {what} {own!r}, expected {wanted} of this Pool, of {expected!r}")
