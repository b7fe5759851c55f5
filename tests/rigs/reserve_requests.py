"""Requests for slots, as tests make them."""

from kvpool.key_column import keys_in
from kvpool.layouts.share import Share
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import ReserveRun, RunForm, pack_runs, reserve_chain


def reserve_share(
    first_layer: int,
    layers: int,
    first_group: int,
    groups: int,
    /,
    parent: bytes,
    keys: bytes,
    priorities: bytes = b"",
    durations: bytes = b"",
    group: int = 0,
) -> m.Reserve:
    """For the part of each chunk of a chain that a share is."""
    share = Share(first_layer, layers, first_group, groups)
    return reserve_chain(parent, keys, priorities, durations, group=group, share=share)


def reserve_alone(group: int, keys: bytes, share: Share | None = None) -> m.Reserve:
    """For chunks of a group without a parent."""
    return m.Reserve(pack_runs([ReserveRun(group, RunForm.ALONE, keys_in(keys), share)]), keys)
