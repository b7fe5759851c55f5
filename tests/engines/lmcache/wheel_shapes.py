"""The objects of LMCache's own storage manager in tests: of two groups of layers, of one rank."""

from typing import Any

import torch

from kvpool_client.lmcache.object_layout import Form

SHAPES = {0: (2, 2, 256, 128), 1: (2, 1, 256, 192)}
# One rank of one: LMCache's ComputeKVRank.
RANK = (1 << 24) | (1 << 8)


def form_of_group(group: int) -> Any:
    """The shapes and types of a group's objects."""
    return Form((torch.Size(SHAPES[group]),), (torch.bfloat16,))
